"""A run of an experiment: its recipe, its folder, and its progress."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fineprune.errors import InputError
from fineprune.runs.files import METRICS, RECIPE, SUMMARY
from fineprune.training.recipe import Recipe, read_recipe


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment, which may not have started yet.

    Attributes:
        name: The arm or the configuration that the run trains.
        number: The number of the run's seed, counted from 0.
        recipe: The recipe, which may contain "auto" settings.
        folder: The folder of the run.
    """

    name: str
    number: int
    recipe: Recipe
    folder: Path

    def finished(self) -> bool:
        """Return whether the run is finished.

        Raises:
            InputError: The folder holds a run of another recipe.
        """
        if not (self.folder / RECIPE).exists():
            return False
        changed = read_recipe(self.folder / RECIPE).differences(self.recipe)
        if changed:
            raise InputError(
                f"expected a run of this recipe in {self.folder}, got one whose {RECIPE} differs "
                f"({'; '.join(changed)}): give another --out"
            )
        return (self.folder / SUMMARY).exists()


def epochs_done(runs: Sequence[PlannedRun]) -> int:
    """Return the number of epochs that are trained.

    The lines of metrics are counted, which is fast enough to be repeated often.
    """
    files = [run.folder / METRICS for run in runs]
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())
