"""Checkpoints, and what a run's folder holds of an earlier start of the run.

A run can be new, continue from a checkpoint, or be finished already. Checkpoints are written
atomically and loaded with ``weights_only=True``.
"""

from pathlib import Path
from typing import Any

import torch

from fineprune.errors import InputError, explaining
from fineprune.runs.files import CHECKPOINT, COMPARISON, RECIPE, SCALING, whole_lines
from fineprune.runs.folder import RunFolder
from fineprune.runs.history import load_tensors
from fineprune.runs.run import read_run
from fineprune.runs.summary import Summary
from fineprune.training.data import load_data
from fineprune.training.recipe import Recipe, differences, read_written_recipe
from fineprune.writing import replacing

_VERSION = 6


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: after a crash, the file is either the old one or the new one.

    The state consists of types that load with ``weights_only=True``.
    """
    with replacing(path) as file:
        torch.save({"version": _VERSION, **state}, file)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint with ``weights_only=True``, with all tensors on the CPU."""
    # For damaged files, torch raises many types of exceptions.
    advice = ": restore the checkpoint, or train into a new folder"
    with explaining(f"expected a checkpoint in {path}, cannot read it", Exception, advice):
        state: Any = load_tensors(path)
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise InputError(
            f"expected a checkpoint of this version of fineprune in {path}, got something else: "
            f"resume with the version that wrote it, or train into a new folder"
        )
    checkpoint: dict[str, Any] = state
    return checkpoint


def checkpoint_of(folder: RunFolder, recipe: Recipe) -> dict[str, Any]:
    """Read the checkpoint of a run, which must be one of this recipe."""
    saved = load_checkpoint(folder.checkpoint)
    _check_unchanged(folder, differences(saved["recipe"], recipe.method()))
    return saved


def recipe_of(folder: RunFolder) -> Recipe | None:
    """Return the recipe in a run's folder; None if the folder holds none."""
    return read_written_recipe(folder.recipe) if folder.recipe.exists() else None


def finished_summary(recipe: Recipe, folder: RunFolder, resume: bool) -> Summary | None:
    """Return the summary of a run that is finished already; None if it begins or continues.

    With ``resume``, the folder may already hold a part of the run, or the finished run.

    Raises:
        InputError: The folder holds something else, or a run of another recipe or on other data.
    """
    for file, kind in ((COMPARISON, "comparison"), (SCALING, "scaling experiment")):
        if (folder.path / file).exists():
            raise InputError(
                f"expected a folder for one run, got {folder.path}, which holds a {kind}: give "
                f"another --out"
            )
    files = folder.files()
    if not files:
        return None
    held = f"got {folder.path}, which holds {', '.join(files)}"
    if not resume:
        # A single file may be the user's own recipe, which a run would replace.
        go_on = ", or --resume to continue the run" if len(files) > 1 else ""
        raise InputError(f"expected a new folder for the run, {held}: give another --out{go_on}")
    previous = recipe_of(folder)
    if previous is None:
        raise InputError(f"expected {RECIPE} of a run, {held}: train into a new folder")
    changed = previous.differences(recipe)
    # An arm may be left out. A history may end, but a later one would have a part of the epochs.
    names = ["arm"] if recipe.run.arm is not None else []
    names += ["history"] if recipe.run.history else []
    own = [
        {"run": {name: getattr(made.run, name) for name in names}} for made in (previous, recipe)
    ]
    _check_unchanged(folder, changed + differences(*own))
    if not folder.summary.exists():
        # Before its first checkpoint, a run writes at most so many lines of metrics.
        epochs = 0 if folder.checkpoint.exists() else len(whole_lines(folder.metrics))
        if epochs > previous.run.checkpoint_every:
            raise InputError(
                f"expected {CHECKPOINT} in {folder.path}, which holds the metrics of {epochs} "
                f"epochs, found none: restore the file, or train into a new folder"
            )
        return None
    finished = read_run(folder.path).summary
    if recipe.data.labels or recipe.data.without or finished.left_out_sha256:
        load_data(recipe, finished.digests, folder.path)
    return finished


def _check_unchanged(folder: RunFolder, changed: list[str]) -> None:
    if changed:
        raise InputError(
            f"expected a checkpoint of this recipe in {folder.path}, got one of another recipe "
            f"({'; '.join(changed)}): resume with the settings in its {RECIPE}, or train into a "
            f"new folder"
        )
