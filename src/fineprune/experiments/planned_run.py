"""A run that an experiment will make or has made: its recipe, its folder, how far it is."""

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
        name: of what it stands for: an arm, a configuration.
        number: which of the seeds, from 0.
        recipe: resolved.
        folder: of the run.
    """

    name: str
    number: int
    recipe: Recipe
    folder: Path

    def finished(self) -> bool:
        """Say whether the run is there, whole.

        Raises:
            InputError: the folder holds a run of another recipe.
        """
        if not (self.folder / SUMMARY).exists():
            return False
        if read_recipe(self.folder / RECIPE) != self.recipe:
            raise InputError(
                f"expected {self.folder} to hold this recipe's run, but its recipe.toml differs: "
                f"give another --out"
            )
        return True


def epochs_done(runs: Sequence[PlannedRun]) -> int:
    """Count the epochs done: lines, which takes no parsing however often it is asked."""
    files = [run.folder / METRICS for run in runs]
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())
