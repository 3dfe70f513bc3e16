"""Decides from the content of a run's folder how the run starts.

A run can be new, continue from a checkpoint, or be finished already. This module changes no files,
and it raises an error if the files in the folder do not belong together.
"""

from typing import Any

from fineprune.errors import InputError
from fineprune.runs.files import CHECKPOINT, COMPARISON, RECIPE, SCALING, whole_lines
from fineprune.runs.folder import RunFolder
from fineprune.runs.run import read_run
from fineprune.runs.summary import Summary
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.data import load_data
from fineprune.training.recipe import Recipe, differences, read_written_recipe


def finished_summary(recipe: Recipe, folder: RunFolder, resume: bool) -> Summary | None:
    """Return the summary of a run that is finished already; None if it begins or continues.

    With ``resume``, the folder may already hold a part of the run, or the finished run. Without a
    checkpoint in the folder, the run begins anew.
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
    if not resume:
        # A single file may be the user's own recipe, which a run would replace.
        go_on = ", or --resume to continue the run" if len(files) > 1 else ""
        raise InputError(
            f"expected a new folder for the run, got {folder.path}, which holds "
            f"{', '.join(files)}: give another --out{go_on}"
        )
    previous = _check_recipe(recipe, folder)
    if folder.summary.exists():
        finished = read_run(folder.path).summary
        if recipe.data.labels or recipe.data.without or finished.left_out_sha256:
            load_data(recipe, finished.digests, folder.path)
        return finished
    # Before its first checkpoint, a run writes at most this many lines of metrics.
    epochs = 0 if folder.checkpoint.exists() else len(whole_lines(folder.metrics))
    if epochs > previous.run.checkpoint_every:
        raise InputError(
            f"expected {CHECKPOINT} in {folder.path}, which holds the metrics of {epochs} epochs, "
            f"found none: restore the file, or train into a new folder"
        )
    return None


def recipe_of(folder: RunFolder) -> Recipe | None:
    """Return the recipe in a run's folder; None if the folder holds none."""
    return read_written_recipe(folder.recipe) if folder.recipe.exists() else None


def checkpoint_of(folder: RunFolder, recipe: Recipe) -> dict[str, Any]:
    """Read the checkpoint in a run's folder."""
    state = load_checkpoint(folder.checkpoint)
    _check_same_recipe(folder, differences(state["recipe"], recipe.method()))
    return state


def _check_recipe(recipe: Recipe, folder: RunFolder) -> Recipe:
    """Return the recipe in a run's folder, after checking that this one continues it."""
    previous = recipe_of(folder)
    if previous is None:
        raise InputError(
            f"expected {RECIPE} in {folder.path}, which holds {', '.join(folder.files())}, found "
            f"none: train into a new folder"
        )
    changed = previous.differences(recipe)
    # An arm may be left out. A history may end, but a later one would have a part of the epochs.
    names = ["arm"] if recipe.run.arm is not None else []
    names += ["history"] if recipe.run.history else []
    own = [{"run": {n: getattr(made.run, n) for n in names}} for made in (previous, recipe)]
    _check_same_recipe(folder, [*changed, *differences(*own)])
    return previous


def _check_same_recipe(folder: RunFolder, changed: list[str]) -> None:
    if changed:
        raise InputError(
            f"expected a checkpoint of this recipe in {folder.path}, got one of another recipe "
            f"({'; '.join(changed)}): resume with the settings in its {RECIPE}, or train into a "
            f"new folder"
        )
