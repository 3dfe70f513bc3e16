"""What a page shows of the samples of a run, read one by one."""

import logging
from collections.abc import Sequence

from fineprune.errors import InputError
from fineprune.inspection.inspected import Inspected
from fineprune.labels.review_page import Show
from fineprune.runs.training_set import TrainingSet
from fineprune.training.data.run_data import data_fingerprint, open_sources
from fineprune.training.data.source import UNREADABLE
from fineprune.training.recipe import make_recipe

_LOGGER = logging.getLogger(__name__)


def shown_samples(inspected: Inspected, *, own_data: bool) -> Show:
    """Return a function from the index of a sample of the runs to what a page can show of it.

    The first run says where the samples are. ``own_data`` allows to run the code of user's data.

    Raises:
        InputError: The samples are no longer there, or may not be read.
    """
    run, training_set = inspected.runs[0], inspected.training_set
    recipe = make_recipe(run.recipe).replaced("data", download=False)
    if recipe.data.own and not own_data:
        raise InputError(
            f"expected --own-data to show samples of {recipe.data.name!r}, which runs its code, "
            f"got none"
        )
    whole, test = open_sources(recipe)
    keys, number = whole.keys(), training_set.index
    if keys is not None and training_set.keys is not None:
        places = _places(keys, training_set, whole.place)
        return lambda sample: UNREADABLE if (at := places[sample]) is None else whole.show(at)
    if len(whole) <= number.max():
        raise InputError(
            f"expected at least {number.max() + 1} training samples from {whole.place}, got "
            f"{len(whole)}"
        )
    if run.summary.data_sha256 not in (None, data_fingerprint(whole, test)):
        if not recipe.data.own:
            raise InputError("the data or their labels have changed since the training")
        _LOGGER.warning(
            "%s returns other data than in the run, so the page may not show the samples that were "
            "trained: give its training set an attribute keys, to find them",
            whole.place,
        )
    return lambda sample: whole.show(int(number[sample]))


def _places(keys: Sequence[str], training_set: TrainingSet, source: str) -> list[int | None]:
    """Return where each sample of a run is now, which its key says: others may have been added."""
    places = {key: place for place, key in enumerate(keys)}
    trained = map(training_set.key, range(len(training_set.index)))
    found = [places.get(str(key)) for key in trained]
    gone = found.count(None)
    if gone == len(found):
        raise InputError(
            f"expected in {source} the samples with which the run was trained, got others"
        )
    if gone:
        _LOGGER.warning(
            "%s: %d of the %d samples of the run no longer exist, and are not shown",
            *(source, gone, len(found)),
        )
    return found
