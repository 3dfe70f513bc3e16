"""Checkpoints: written atomically, read without trusting a pickle."""

import os
from pathlib import Path
from typing import Any

import torch

from fineprune.errors import InputError

CHECKPOINT_VERSION = 2


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that the file is always either the old one or the new one, whole."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save({"version": CHECKPOINT_VERSION, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint with ``weights_only=True``.

    Raises:
        InputError: the file cannot be read as a checkpoint of this version.
    """
    try:
        # Tensors stay on the CPU; the model and the optimizer copy theirs to where they belong.
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"expected a checkpoint in {path}, cannot read it: {reason}") from error
    if state.get("version") != CHECKPOINT_VERSION:
        raise InputError(
            f"expected a checkpoint of version {CHECKPOINT_VERSION} in {path}, "
            f"got {state.get('version')}"
        )
    return state
