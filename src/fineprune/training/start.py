"""How a run starts: from nothing, from a checkpoint, or not at all because it is finished.

It is decided from what the run's folder holds. Nothing is changed here, and files that do
not belong together are refused with the reason.
"""

from dataclasses import dataclass
from typing import Any

from fineprune.errors import InputError
from fineprune.runs.files import CHECKPOINT, RECIPE, whole_lines
from fineprune.runs.folder import RunFolder
from fineprune.runs.run import read_run
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.recipe import Recipe, differences, read_recipe


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        checkpoint: Whether the run goes on from the folder's checkpoint.
        summary: The summary of a run that is finished, to which nothing is left to do; else None.
    """

    checkpoint: bool = False
    summary: dict[str, Any] | None = None


def start_of(recipe: Recipe, folder: RunFolder, resume: bool) -> Start:
    """Decide how a run starts.

    Args:
        recipe: What is to be trained.
        folder: Where.
        resume: Whether the folder may hold a part of the run already, or all of it.

    Raises:
        InputError: The folder holds a run that may not be continued, or one of another recipe, or
            files that do not belong together.
    """
    there = folder.files()
    if not there:
        return Start()
    if not resume:
        raise InputError(
            f"expected a new folder for the run, but {folder.path} holds {', '.join(there)}: give "
            f"another --out, or --resume to continue the run"
        )
    _check_recipe(recipe, folder)
    if folder.summary.exists():
        return Start(summary=read_run(folder.path).summary)
    if folder.checkpoint.exists():
        return Start(checkpoint=True)
    epochs = len(whole_lines(folder.metrics))
    if epochs > recipe.run.checkpoint_every:
        raise InputError(
            f"expected {CHECKPOINT} in {folder.path} beside the metrics of {epochs} epochs, found "
            f"none: restore the file, or train into a new folder"
        )
    return Start()


def recipe_of(folder: RunFolder) -> Recipe | None:
    """Return the recipe that a folder was started with; None where there is none.

    Raises:
        InputError: The file is damaged.
    """
    return read_recipe(folder.recipe) if folder.recipe.exists() else None


def checkpoint_of(folder: RunFolder, recipe: Recipe) -> dict[str, Any]:
    """Read the checkpoint of a folder.

    Raises:
        InputError: The checkpoint is damaged, or of another recipe.
    """
    state = load_checkpoint(folder.checkpoint)
    found = differences(state["recipe"], recipe.method())
    if found:
        raise InputError(_of_another(folder, found))
    return state


def _check_recipe(recipe: Recipe, folder: RunFolder) -> None:
    there = recipe_of(folder)
    if there is None:
        raise InputError(
            f"expected {RECIPE} in {folder.path} beside {', '.join(folder.files())}, found none: "
            f"train into a new folder"
        )
    found = there.differences(recipe)
    if recipe.run.arm not in (None, there.run.arm):
        found.append(f'run.arm is "{there.run.arm}" and "{recipe.run.arm}"')
    if found:
        raise InputError(_of_another(folder, found))


def _of_another(folder: RunFolder, found: list[str]) -> str:
    return (
        f"expected a checkpoint of this recipe in {folder.path}, got one of another "
        f"({'; '.join(found)}): resume with the settings in its {RECIPE}, or train into a new "
        f"folder"
    )
