"""A run of an experiment: its recipe, its folder, its progress, and what it has to read.

The file that lists the runs of an experiment contains the digests with which it began, as
``training.summary.input_digests`` returns them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fineprune.errors import InputError, RunError
from fineprune.experiments.controls import matched_recipe
from fineprune.runs.files import METRICS, RECIPE, REPORT, RESULTS, SUMMARY, read_json
from fineprune.runs.run import read_run
from fineprune.runs.summary import read_summary
from fineprune.training.recipe import Recipe, read_written_recipe

# The sample order of an epoch is drawn from seed + epoch, as in DistributedSampler. Two seeds whose
# difference is smaller than the number of epochs would therefore share most of their orders.
_SEED_STEP = 1_000_003

# Called with a line of text (which may be empty), the number of epochs trained so far, and the
# number of all epochs.
OnProgress = Callable[[str, int, int], None]

Digests = Mapping[str, str | None]


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment, which may not have started yet.

    Attributes:
        name: The arm or the configuration that the run trains.
        number: The number of the run's seed, counted from 0.
        recipe: The recipe, which may contain "auto" settings. If the run is the control of another
            one, this is the recipe of that run, and ``complete()`` returns its own.
        folder: The folder of the run.
        matches: The run whose numbers of samples this control repeats, and which must therefore be
            finished first; None for any other run.
        trunk: The run of which this one begins as a copy, and which must therefore be finished
            first; None for any other run.
        first: The run whose suspects this second training leaves out, and which must therefore be
            finished first; None for any other run.
    """

    name: str
    number: int
    recipe: Recipe
    folder: Path
    matches: "PlannedRun | None" = None
    trunk: "PlannedRun | None" = None
    first: "PlannedRun | None" = None

    @property
    def needs(self) -> "PlannedRun | None":
        """The run that must be finished before this one starts; None if there is none."""
        return self.matches or self.trunk or self.first

    def complete(self) -> Recipe | None:
        """Return the recipe to train; None if the run that this one matches is not finished."""
        if self.matches is None:
            return self.recipe
        if not self.matches.finished():
            return None
        return matched_recipe(self.recipe, read_run(self.matches.folder))

    def finished(self) -> bool:
        """Return whether the run is finished."""
        if not (self.folder / RECIPE).exists():
            return False
        previous, complete = read_written_recipe(self.folder / RECIPE), self.complete()
        # What does not depend on the run to match is checked before that run is trained.
        expected = complete or dataclasses.replace(self.recipe, pruning=previous.pruning)
        changed = previous.differences(expected)
        if changed and self.matches is not None and previous.pruning != expected.pruning:
            raise InputError(
                f"expected the control of {self.matches.folder} in {self.folder}, got the control "
                f"of another run: remove this folder to train the control again"
            )
        if changed:
            raise InputError(
                f"expected a run of this recipe in {self.folder}, got one whose {RECIPE} differs "
                f"({'; '.join(changed)}): give another --out"
            )
        return complete is not None and (self.folder / SUMMARY).exists()


def with_seed(recipe: Recipe, number: int) -> Recipe:
    """Return the recipe with the seed of the run with this number, counted from 0."""
    return recipe.replaced("run", seed=recipe.run.seed + number * _SEED_STEP)


def check_own_folder(folder: Path, listing: str, what: str) -> None:
    """Check that a folder holds an experiment, or nothing that an experiment would replace.

    ``listing`` is the name of the file that lists the runs of such an experiment.
    """
    if (folder / listing).exists():
        return
    foreign = [name for name in (*RESULTS, REPORT) if (folder / name).exists()]
    if foreign:
        raise InputError(
            f"expected a folder for {what}, got {folder}, which holds {', '.join(foreign)}: give "
            f"another --out"
        )


def check_begun_with(listing: Path, digests: Digests, what: str) -> None:
    """Check that an experiment goes on with the files with which it began.

    The runs are not enough, because runs that are added have nothing to check yet. If the file that
    lists them does not exist, has no digests or is damaged, nothing is known and nothing checked.
    """
    try:
        begun = dict(read_json(listing)["sha256"])
    except (InputError, KeyError, TypeError, ValueError):
        return
    changed = _changed(begun, digests)
    if changed:
        raise InputError(
            f"expected {changed} with which the {what} in {listing.parent} began, got others: "
            f"restore the files, or give another --out"
        )


def check_finished(run: Path, digests: Digests, what: str) -> None:
    """Check that the run in a folder has just trained with what its experiment began with."""
    changed = _changed(digests, read_summary(run / SUMMARY).digests)
    if changed:
        raise RunError(
            f"{changed} changed while the {what} trained: remove {run}, restore what changed (a "
            f"function must return the same data on every call), and run the same command again"
        )


def _changed(digests: Digests, others: Digests) -> str:
    """Return what has other digests; an empty text if nothing has."""
    return " and ".join(f"the {name}" for name in digests if digests[name] != others.get(name))


def epochs_done(runs: Sequence[PlannedRun]) -> int:
    """Return the number of epochs that are trained.

    The lines of metrics are counted, which is fast enough to be repeated often.
    """
    files = [run.folder / METRICS for run in runs]
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())
