"""What a page shows of the samples of a run, read one by one."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from fineprune.errors import InputError
from fineprune.inspection.known_samples import KnownSamples
from fineprune.inspection.pictures import image_of
from fineprune.training.data.run_data import data_fingerprint, open_sources
from fineprune.training.data.source import UNREADABLE
from fineprune.training.recipe import make_recipe

_LOGGER = logging.getLogger(__name__)

Show = Callable[[int], Any]


def shown_samples(samples: KnownSamples, *, own_data: bool) -> Show:
    """Return a function from the index of a sample of a run to what ``view_of`` can show of it."""
    number, pictures = samples.training_set.index, samples.pictures
    if pictures is not None:
        return lambda sample: image_of(pictures[sample])  # It takes fewer bytes than an array.
    recipe = make_recipe(samples.run.run.recipe).replaced("data", download=False)
    if recipe.data.own and not own_data:
        raise InputError(
            f"expected --own-data to show samples of {recipe.data.name!r}, which runs its code, "
            f"got none"
        )
    whole, test = open_sources(recipe)
    keys = whole.keys()
    if keys is not None and samples.training_set.keys is not None:
        places = _places(keys, samples, whole.place)
        return lambda sample: UNREADABLE if (at := places[sample]) is None else whole.show(at)
    if not recipe.data.own:  # Their pictures are there unless something has changed.
        raise InputError(
            f"expected the data {whole.place} as they were trained, got others or none"
        )
    if len(whole) <= number.max():
        raise InputError(
            f"expected at least {number.max() + 1} training samples from {whole.place}, got "
            f"{len(whole)}"
        )
    if samples.run.run.summary.data_sha256 not in (None, data_fingerprint(whole, test)):
        _LOGGER.warning(
            "%s returns other data than in the run, so the page may not show the samples that were "
            "trained: give its training set an attribute keys, to find them",
            whole.place,
        )
    return lambda sample: whole.show(int(number[sample]))


def _places(keys: Sequence[str], samples: KnownSamples, source: str) -> list[int | None]:
    """Return where each sample of a run is now, which its key says: others may have been added."""
    places = {key: place for place, key in enumerate(keys)}
    trained = map(samples.training_set.key, range(len(samples)))
    found = [None if key is None else places.get(key) for key in trained]
    gone = found.count(None)
    if gone == len(samples):
        raise InputError(
            f"expected in {source} the samples with which the run was trained, got others"
        )
    if gone:
        _LOGGER.warning(
            "%s: %d of the %d samples of the run no longer exist, and are not shown",
            *(source, gone, len(samples)),
        )
    return found
