"""What a training that a framework resumes must have in common with its checkpoint."""

from dataclasses import asdict
from typing import Any

from fineprune.errors import InputError
from fineprune.pruning.pruner import Pruner


def check_same_batches(state: dict[str, Any], pruner: Pruner) -> None:
    """Raise InputError unless a pruner's batches, which the framework counts, are those before."""
    before, now = state.get("shape"), asdict(pruner.shape)
    if before != now:
        raise InputError(
            f"expected to resume with the batches of the checkpoint, {before}, got {now}: resume "
            f"with the same numbers, or begin a new training with its weights"
        )
