"""Checkpoints, which are written atomically and loaded with ``weights_only=True``."""

from pathlib import Path
from typing import Any

import torch

from fineprune.errors import InputError, explaining
from fineprune.writing import replacing

CHECKPOINT_VERSION = 3


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: after a crash, the file is either the old one or the new one.

    The state consists of types that load with ``weights_only=True``.
    """
    with replacing(path) as file:
        torch.save({"version": CHECKPOINT_VERSION, **state}, file)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint with ``weights_only=True``, with all tensors on the CPU."""
    # For damaged files, torch raises many types of exceptions.
    advice = ": restore the checkpoint, or train into a new folder"
    with explaining(f"expected a checkpoint in {path}, cannot read it", Exception, advice):
        state = torch.load(path, map_location="cpu", weights_only=True)
    version = state.get("version") if isinstance(state, dict) else None
    if version is None:
        raise InputError(
            f"expected a checkpoint in {path}, got a {type(state).__name__} that is not one: "
            f"restore the checkpoint, or train into a new folder"
        )
    if version != CHECKPOINT_VERSION:
        raise InputError(
            f"expected a checkpoint of version {CHECKPOINT_VERSION} in {path}, got {version}: "
            f"resume with the fineprune version that wrote it, or train into a new folder"
        )
    checkpoint: dict[str, Any] = state
    return checkpoint
