"""The curve of cost against accuracy: trainings of several lengths out of a single long one.

With the schedule ``cooldown``, the rate is constant until the last fifth of the epochs, so
trainings of different lengths are equal until the cooldown of the shorter one begins (Hägele et
al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", NeurIPS 2024). The
longest of them is the trunk. Each shorter one begins as a copy of the trunk's folder at that point,
and trains its cooldown only. Its result is bit for bit that of a training of its own.
"""

import dataclasses
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fineprune.errors import InputError
from fineprune.experiments.controls import COOLDOWN
from fineprune.experiments.planned_run import PlannedRun
from fineprune.runs.folder import RunFolder
from fineprune.runs.lock import LOCK
from fineprune.training.checkpoint import load_checkpoint, save_checkpoint
from fineprune.training.learning_rate import begin_of_cooldown
from fineprune.training.loop import train
from fineprune.training.recipe import Recipe, read_written_recipe
from fineprune.writing import cannot_write, temporary_of, write_atomically

# The lengths of the trainings, as shares of the epochs of the recipe.
_LENGTHS = (0.25, 0.5, 0.75, 1.0)


def plan_curve(recipe: Recipe, number: int, folder: Path) -> list[PlannedRun]:
    """List the runs of a curve on all data, the trunk first.

    The recipe has the seed with this number, and the folder is that of the comparison.
    """
    runs: list[PlannedRun] = []
    for share in reversed(_LENGTHS):
        epochs = round(share * recipe.training.epochs)
        known = [run.recipe.training.epochs for run in runs]
        if epochs < max(2, recipe.training.warmup) or epochs in known:
            continue
        arm = f"{COOLDOWN}{epochs}"
        made = recipe.replaced("pruning", policy="full").replaced("run", arm=arm)
        made = made.replaced("training", epochs=epochs, schedule="cooldown", milestones=())
        if begin_of_cooldown(made.training) < recipe.training.warmup:
            continue
        trunk = runs[0] if runs else None
        runs.append(PlannedRun(arm, number, made, folder / f"{arm}-{number}", trunk=trunk))
    if len(runs) < 2:
        raise InputError(
            f"expected a curve with at least two cooldowns that begin after the warm-up, got "
            f"{recipe.training.epochs} epochs with a warm-up of {recipe.training.warmup}: set a "
            f"larger training.epochs, or a smaller training.warmup"
        )
    begins = [begin_of_cooldown(run.recipe.training) for run in runs[1:]]
    every = math.gcd(runs[0].recipe.run.checkpoint_every, *begins)
    # A cooldown begins from a checkpoint of the trunk.
    recipe = runs[0].recipe.replaced("run", checkpoint_every=every)
    return [dataclasses.replace(runs[0], recipe=recipe), *runs[1:]]


def train_trunk(
    recipe: Recipe, folder: Path, sharing: int, cooldowns: Sequence[tuple[Path, Recipe]]
) -> None:
    """Train a run, or continue it, and copy it where other runs begin their cooldowns.

    ``cooldowns`` are the folders and the recipes of the other runs. A folder that exists stays as
    it is.
    """
    begins = {begin_of_cooldown(recipe.training): (to, recipe) for to, recipe in cooldowns}

    def after_epoch(metrics: dict[str, Any]) -> None:
        if metrics["epoch"] + 1 in begins:
            _copy_run(folder, *begins[metrics["epoch"] + 1])

    for to, _ in cooldowns:
        shutil.rmtree(temporary_of(to), ignore_errors=True)  # Left by a process that was killed.
    train(recipe, folder, resume=True, sharing=sharing, on_epoch=after_epoch)


def _copy_run(trunk: Path, folder: Path, planned: Recipe) -> None:
    """Copy a run that has just written a checkpoint, so that it continues with another recipe."""
    if folder.exists():
        return
    temporary = temporary_of(folder)
    try:
        shutil.copytree(trunk, temporary, ignore=shutil.ignore_patterns(LOCK))
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise cannot_write(folder, error) from error
    files = RunFolder(temporary)
    # The recipe of the trunk has no "auto" settings, which must be the same in both.
    recipe = read_written_recipe(files.recipe).replaced("training", epochs=planned.training.epochs)
    recipe = recipe.replaced("run", arm=planned.run.arm)
    save_checkpoint(
        files.checkpoint, {**load_checkpoint(files.checkpoint), "recipe": recipe.method()}
    )
    write_atomically(files.recipe, recipe.to_toml())
    temporary.rename(folder)
