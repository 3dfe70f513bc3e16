"""A run that an experiment will make or has made: its recipe, its folder, and how far it is."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fineprune.errors import InputError
from fineprune.runs.files import METRICS, RECIPE, SUMMARY
from fineprune.training.recipe import Recipe, read_recipe


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment.

    Attributes:
        name: What it stands for: an arm, or a configuration.
        number: The number of its seed, from 0.
        recipe: The recipe; "auto" may be left in it.
        folder: The run's folder.
    """

    name: str
    number: int
    recipe: Recipe
    folder: Path

    def finished(self) -> bool:
        """Say whether the run is finished.

        Raises:
            InputError: The folder holds a run of another recipe.
        """
        if not (self.folder / RECIPE).exists():
            return False
        found = read_recipe(self.folder / RECIPE).differences(self.recipe)
        if found:
            raise InputError(
                f"expected {self.folder} to hold this run, but its {RECIPE} differs "
                f"({'; '.join(found)}): give another --out"
            )
        return (self.folder / SUMMARY).exists()


def epochs_done(runs: Sequence[PlannedRun]) -> int:
    """Count the epochs that are done, by lines of metrics, which is cheap to ask often."""
    files = [run.folder / METRICS for run in runs]
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())
