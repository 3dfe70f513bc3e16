"""The runs of an experiment: what is planned, what is finished, and what they have read."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from fineprune.errors import InputError, RunError
from fineprune.experiments.controls import SECOND, matched_recipe
from fineprune.runs.files import METRICS, RECIPE, REPORT, RESULTS, SUMMARY, read_json
from fineprune.runs.run import read_run
from fineprune.runs.summary import LEFT_OUT, read_summary
from fineprune.training.recipe import Recipe, read_written_recipe

# Called with a line of text (which may be empty), the number of epochs trained so far, and the
# number of all epochs.
OnProgress = Callable[[str, int, int], None]

# What ``training.results.input_digests`` returns.
Digests = Mapping[str, str | None]

_Listing = TypeVar("_Listing")


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment, which may not have started yet.

    Attributes:
        name: The arm or the configuration that the run trains.
        recipe: The recipe, which may contain "auto" settings. ``complete()`` adds what the run
            takes from the one that it needs.
        folder: The folder of the run.
        needs: The run that must be finished before this one starts; None if there is none.
    """

    name: str
    recipe: Recipe
    folder: Path
    needs: "PlannedRun | None" = None

    @property
    def label(self) -> str:
        """What progress and errors call the run."""
        return f"{self.name}, seed {self.recipe.run.seed}"

    def complete(self) -> Recipe | None:
        """Return the recipe to train; None if the run that this one needs is not finished."""
        if self.needs is None:
            return self.recipe
        if not self.needs.finished():
            return None
        if self.name == SECOND:
            return self.recipe.replaced("data", without=str(self.needs.folder))
        return matched_recipe(self.recipe, read_run(self.needs.folder))

    def finished(self) -> bool:
        """Return whether the run is finished; InputError if the folder is that of another one."""
        if not (self.folder / RECIPE).exists():
            return False
        previous, complete = read_written_recipe(self.folder / RECIPE), self.complete()
        # What does not depend on the run that this one needs is checked before that is trained.
        expected = complete or dataclasses.replace(self.recipe, pruning=previous.pruning)
        check_same_recipe(previous, expected, self.folder, "a run")
        return complete is not None and (self.folder / SUMMARY).exists()


def check_same_recipe(written: Recipe, recipe: Recipe, folder: Path, what: str) -> None:
    """Check that a folder holds a run or a comparison of a recipe."""
    if changed := written.differences(recipe):
        raise InputError(
            f"expected {what} of this recipe in {folder}, got one whose {RECIPE} differs "
            f"({'; '.join(changed)}): give another --out, or remove this folder to begin again"
        )


def with_seed(recipe: Recipe, number: int) -> Recipe:
    """Return the recipe with the seed of the run with this number, counted from 0."""
    return recipe.replaced("run", seed=recipe.run.seed + number)


def read_begun(listing: Path, kind: type[_Listing], what: str) -> _Listing | None:
    """Return what a file says of the experiment in its folder, which may go on.

    Args:
        listing: The file that lists the runs of such an experiment.
        kind: What it is read as.
        what: What such an experiment is called.

    Returns:
        The content; None without the file, or if it is damaged, since it is then written again.

    Raises:
        InputError: The folder holds something else, which the experiment would replace.
    """
    foreign = [name for name in (*RESULTS, REPORT) if (listing.parent / name).exists()]
    if not listing.exists() and foreign:
        raise InputError(
            f"expected a folder for {what}, got {listing.parent}, which holds "
            f"{', '.join(foreign)}: give another --out"
        )
    with contextlib.suppress(InputError):
        return read_json(listing, kind)
    return None


def check_begun_with(begun: Digests, digests: Digests, folder: Path) -> None:
    """Check that an experiment goes on with what it began with; added runs cannot check it."""
    if changed := _changed(begun, digests):
        raise InputError(
            f"expected {changed} with which the runs in {folder} began, got others: restore the "
            f"files, or give another --out"
        )


def check_trained_with(run: PlannedRun, digests: Digests) -> None:
    """Check that a run has just trained with what its experiment began with."""
    # What a second training leaves out depends on its seed.
    own = {LEFT_OUT} if run.name == SECOND else set()
    expected = {name: digest for name, digest in digests.items() if name not in own}
    if changed := _changed(expected, read_summary(run.folder / SUMMARY).digests):
        raise RunError(
            f"{changed} changed while runs trained: remove {run.folder}, restore what changed (a "
            f"function must return the same data on every call), and run the same command again"
        )


def _changed(digests: Digests, others: Digests) -> str:
    """Return what has other digests; an empty text if nothing has."""
    return " and ".join(f"the {name}" for name in digests if digests[name] != others.get(name))


def named(name: str, on_progress: OnProgress) -> OnProgress:
    """Return what tells progress with a name before each line."""
    return lambda line, done, total: on_progress(line and f"{name}: {line}", done, total)


def teller(runs: Sequence[PlannedRun], on_progress: OnProgress) -> Callable[[str], None]:
    """Return what tells a line, which may be empty, with the epochs that runs have trained."""
    total = sum(run.recipe.training.epochs for run in runs)
    files = [run.folder / METRICS for run in runs]

    def tell(line: str = "") -> None:
        # Counting the lines of the metrics is fast enough to be repeated often.
        done = sum(file.read_bytes().count(b"\n") for file in files if file.exists())
        on_progress(line, done, total)

    return tell
