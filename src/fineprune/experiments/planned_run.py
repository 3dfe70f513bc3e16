"""A run of an experiment: its recipe, its folder, its progress, and what it has to read.

The file that lists the runs of an experiment contains the digests with which it began, as
``training.results.input_digests`` returns them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fineprune.errors import InputError, RunError
from fineprune.experiments.controls import matched_recipe
from fineprune.runs.files import METRICS, RECIPE, REPORT, RESULTS, SUMMARY, read_json
from fineprune.runs.run import read_run
from fineprune.runs.summary import read_summary
from fineprune.training.recipe import Recipe, read_written_recipe

# Called with a line of text (which may be empty), the number of epochs trained so far, and the
# number of all epochs.
OnProgress = Callable[[str, int, int], None]

Digests = Mapping[str, str | None]


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment, which may not have started yet.

    Attributes:
        name: The arm or the configuration that the run trains.
        recipe: The recipe, which may contain "auto" settings. If the run repeats the numbers of
            another one, this is the recipe of that run, and ``complete()`` returns its own.
        folder: The folder of the run.
        needs: The run that must be finished before this one starts; None if there is none.
        takes: What it takes from that run; see ``Arm``.
    """

    name: str
    recipe: Recipe
    folder: Path
    needs: "PlannedRun | None" = None
    takes: str | None = None

    def complete(self) -> Recipe | None:
        """Return the recipe to train; None if the run that this one needs is not finished."""
        if self.needs is None:
            return self.recipe
        if not self.needs.finished():
            return None
        if self.takes == "suspects":
            return self.recipe.replaced("data", without=str(self.needs.folder))
        return matched_recipe(self.recipe, read_run(self.needs.folder))

    def finished(self) -> bool:
        """Return whether the run is finished."""
        if not (self.folder / RECIPE).exists():
            return False
        previous, complete = read_written_recipe(self.folder / RECIPE), self.complete()
        # What does not depend on the run that this one needs is checked before that is trained.
        expected = complete or dataclasses.replace(self.recipe, pruning=previous.pruning)
        changed = previous.differences(expected)
        if changed and self.takes == "numbers" and previous.pruning != expected.pruning:
            raise InputError(
                f"expected in {self.folder} the control of the run that it needs, got the control "
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
    return recipe.replaced("run", seed=recipe.run.seed + number)


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
        begun = dict(read_json(listing, dict[str, Any])["sha256"])
    except (InputError, KeyError, TypeError, ValueError):
        return
    changed = _changed(begun, digests)
    if changed:
        raise InputError(
            f"expected {changed} with which the {what} in {listing.parent} began, got others: "
            f"restore the files, or give another --out"
        )


def check_finished(run: PlannedRun, digests: Digests, what: str) -> None:
    """Check that a run has just trained with what its experiment began with."""
    # What a second training leaves out depends on its seed.
    own = {"suspects"} if run.takes == "suspects" else set()
    expected = {name: digest for name, digest in digests.items() if name not in own}
    changed = _changed(expected, read_summary(run.folder / SUMMARY).digests)
    if changed:
        raise RunError(
            f"{changed} changed while the {what} trained: remove {run.folder}, restore what "
            f"changed (a function must return the same data on every call), and run the same "
            f"command again"
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
