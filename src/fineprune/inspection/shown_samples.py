"""What a page shows of the samples of a run, read one by one."""

import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from fineprune.datasets.image_index import ImageIndex, load_index
from fineprune.errors import InputError
from fineprune.inspection.known_samples import KnownSamples
from fineprune.inspection.pictures import image_of
from fineprune.training.data.user import checked_keys, load_own, samples_digest
from fineprune.training.recipe import make_recipe

_LOGGER = logging.getLogger(__name__)

Show = Callable[[int], Any]

_UNREADABLE = "This sample cannot be read: its file is missing or damaged."


def shown_samples(samples: KnownSamples, *, own_data: bool) -> Show:
    """Return a function from the index of a sample of a run to what ``view_of`` can show of it."""
    pictures, number = samples.pictures, samples.training_set.index
    if pictures is not None:
        return lambda sample: image_of(pictures[sample])  # It takes fewer bytes than an array.
    data = make_recipe(samples.run.run.recipe).data
    if data.name == "images" and data.train is not None:
        source = Path(data.train)
        index = load_index(source, keep=False)
        files = _places(index.keys(), samples, str(source))
        return lambda sample: _file(index, files[sample])
    if not data.own:
        raise InputError(f"expected the data {data.name} as they were trained, got others or none")
    if not own_data:
        raise InputError(
            f"expected --own-data to show samples of {data.name!r}, which runs its code, got none"
        )
    train, test, plain = load_own(data.name, needs_plain=False)
    keys = checked_keys(train, data.name)
    if keys is not None and samples.training_set.keys is not None:
        places = _places(keys, samples, data.name)
        return lambda sample: _UNREADABLE if (at := places[sample]) is None else plain[at]
    if len(plain) <= number.max():
        raise InputError(
            f"expected at least {number.max() + 1} training samples from {data.name}, got "
            f"{len(plain)}"
        )
    begun = samples.run.run.summary.data_sha256
    if begun not in (None, samples_digest(data, train, test, plain)):
        _LOGGER.warning(
            "%s returns other data than in the run, so the page may not show the samples that were "
            "trained: give its training set an attribute keys, to find them",
            data.name,
        )
    return lambda sample: plain[int(number[sample])]


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
