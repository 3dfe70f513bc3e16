"""Checkpoints: written atomically, and read without trusting a pickle."""

from pathlib import Path
from typing import Any

import torch

from fineprune.errors import InputError
from fineprune.runs.files import replacing

CHECKPOINT_VERSION = 3


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that the file is always either the old one or the new one, whole."""
    with replacing(path) as file:
        torch.save({"version": CHECKPOINT_VERSION, **state}, file)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint with ``weights_only=True``; its tensors stay on the CPU.

    Raises:
        InputError: The file cannot be read as a checkpoint of this version.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"expected a checkpoint in {path}, cannot read it: {reason}") from error
    version = state.get("version") if isinstance(state, dict) else None
    if version != CHECKPOINT_VERSION:
        raise InputError(
            f"expected a checkpoint of version {CHECKPOINT_VERSION} in {path}, got {version}"
        )
    return state
