"""What a page shows of the samples of a run, read one by one."""

import io
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fineprune.datasets.image_index import ImageIndex, load_index
from fineprune.errors import InputError
from fineprune.inspection.inspected import Inspected
from fineprune.labels.review_page import Show
from fineprune.runs.training_set import TrainingSet
from fineprune.training.data.memory import load_images
from fineprune.training.data.user import checked_keys, load_own, samples_digest
from fineprune.training.recipe import Recipe, make_recipe

_LOGGER = logging.getLogger(__name__)

_UNREADABLE = "This sample cannot be read: its file is missing or damaged."


def shown_samples(inspected: Inspected, *, own_data: bool) -> Show:
    """Return a function from the index of a sample of the runs to what a page can show of it.

    Args:
        inspected: The runs, whose first one says where the samples are.
        own_data: Whether the code of user-defined data may be run.

    Raises:
        InputError: The samples are no longer there, or may not be read.
    """
    run, training_set = inspected.runs[0], inspected.training_set
    recipe = make_recipe(run.recipe)
    data = recipe.data
    if data.name == "images" and data.train is not None:
        source = Path(data.train)
        index = load_index(source, keep=False)
        files = _places(index.keys(), training_set, str(source))
        return lambda sample: _file(index, files[sample])
    if not data.own:
        return _in_memory(recipe, training_set)
    if not own_data:
        raise InputError(
            f"expected --own-data to show samples of {data.name!r}, which runs its code, got none"
        )
    train, test, plain = load_own(data.name, needs_plain=False)
    keys, number = checked_keys(train, data.name), training_set.index
    if keys is not None and training_set.keys is not None:
        places = _places(keys, training_set, data.name)
        return lambda sample: _UNREADABLE if (at := places[sample]) is None else plain[at]
    if len(plain) <= number.max():
        raise InputError(
            f"expected at least {number.max() + 1} training samples from {data.name}, got "
            f"{len(plain)}"
        )
    begun = run.summary.data_sha256
    if begun not in (None, samples_digest(data, train, test, plain)):
        _LOGGER.warning(
            "%s returns other data than in the run, so the page may not show the samples that were "
            "trained: give its training set an attribute keys, to find them",
            data.name,
        )
    return lambda sample: plain[int(number[sample])]


def _in_memory(recipe: Recipe, training_set: TrainingSet) -> Show:
    """Return what shows the pictures of built-in data, which fetches nothing."""
    loaded = load_images(recipe.replaced("data", download=False, without=None))
    place = {index: place for place, index in enumerate(loaded.weak.index.tolist())}
    try:
        places = [place[index] for index in training_set.index.tolist()]
    except KeyError:
        places = []
    labels = loaded.train.labels.numpy()
    if not np.array_equal(labels[places], training_set.trained_labels):
        raise InputError("the data or their labels have changed since the training")
    images = loaded.train.images

    def show(sample: int) -> Image.Image:
        picture = images[places[sample]].numpy()
        pixels = picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0)
        return Image.fromarray(np.ascontiguousarray(pixels))

    return show


def _places(keys: Sequence[str], training_set: TrainingSet, source: str) -> list[int | None]:
    """Return where each sample of a run is now, which its key says: others may have been added."""
    places = {key: place for place, key in enumerate(keys)}
    trained = map(training_set.key, range(len(training_set.index)))
    found = [None if key is None else places.get(key) for key in trained]
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


def _file(index: ImageIndex, image: int | None) -> Image.Image | str:
    """Return an image file, or a text if it cannot be read: a page needs most of its samples."""
    if image is None:
        return _UNREADABLE
    try:
        opened = Image.open(io.BytesIO(index.read(image)))
        opened.load()
    except MemoryError:
        raise
    except Exception:  # Each decoder has errors of its own for damaged files.
        return _UNREADABLE
    return opened
