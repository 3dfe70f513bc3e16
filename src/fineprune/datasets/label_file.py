"""Label files: the user's own label for each image of a training set."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fineprune.datasets.image_set import class_number, one_form
from fineprune.datasets.table import table_rows
from fineprune.errors import MOST_DIGITS, InputError, explaining, shown

# The label of an image that is left out of the training, in text files and in the result.
DROP_WORD, DROP = "drop", -1


def read_labels(
    path: Path, classes: Sequence[str], images: int, keys: Sequence[str] | None = None
) -> npt.NDArray[np.int64]:
    """Return one label for each image of a training set, -1 to leave it out; int64, shape (N,).

    Args:
        path: The file: ``.npy`` with integers of shape (N,); ``.csv`` with the column ``label``,
            with ``key`` or ``index``, and with one row per image in any order, as ``fineprune
            inspect`` writes it; or a text with one label per line. A label is the name or the
            number of a class (a name counts first), or ``drop``, in an array -1.
        classes: The name of each class.
        images: The number of images in the training set, N.
        keys: What names each image in the column ``key``, such as its path; None if the images
            have only their indices. Keys count first: an index changes when an image is added.
    """
    expected = f"expected labels in {path}, cannot read it"
    with explaining(expected, OSError), explaining(expected, UnicodeError, ": save it as UTF-8"):
        if path.suffix == ".npy":
            labels = _from_array(path, classes)
        elif path.suffix == ".csv":
            labels = _from_table(path, classes, images, keys)
        else:
            labels = _from_text(path, classes)
    if len(labels) != images:
        raise InputError(
            f"expected {images} labels in {path}, one for each image of the training set before "
            f"it is split, got {len(labels)}"
        )
    return labels


def check_class_names(classes: Sequence[str], table: str) -> None:
    """Raise InputError if a table of labels cannot name the classes.

    It cannot if two classes have the same name, or one is named like what leaves a sample out.
    """
    if DROP_WORD in classes:
        raise InputError(
            f"expected no class that is named {DROP_WORD!r} with labels of {table}, where this "
            f"word leaves a sample out: rename the class"
        )
    twice = next((name for name, number in Counter(classes).items() if number > 1), None)
    if twice is not None:
        raise InputError(
            f"expected a unique name for each class with labels of {table}, got {twice!r} "
            f"more than once: rename these classes"
        )


def _from_array(path: Path, classes: Sequence[str]) -> npt.NDArray[np.int64]:
    try:
        # Mapped, so that a damaged header cannot ask for more memory than the file has bytes.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        # NumPy's message would advise to allow pickle, which runs code.
        raise InputError(
            f"expected labels in {path}, cannot read it: no whole array of numbers in NumPy's "
            f"format"
        ) from error
    integers = isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.integer)
    if not integers or array.ndim != 1:
        given = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "more"
        raise InputError(f"expected one array of integers of shape (N,) in {path}, got {given}")
    wrong = np.flatnonzero((array < DROP) | (array >= len(classes)))
    if len(wrong):
        raise InputError(
            f"expected labels 0..{len(classes) - 1}, or {DROP} to leave an image out, in {path}, "
            f"got {array[wrong[0]]} at index {wrong[0]}"
        )
    return np.array(array, dtype=np.int64)


def _from_text(path: Path, classes: Sequence[str]) -> npt.NDArray[np.int64]:
    text = path.read_text(encoding="utf-8-sig")
    lines = text.removesuffix("\n").split("\n") if text else []
    places = (f"line {line} of {path}" for line in range(1, len(lines) + 1))
    return _numbers(list(zip(places, lines, strict=True)), path, classes)


def _from_table(
    path: Path, classes: Sequence[str], images: int, keys: Sequence[str] | None
) -> npt.NDArray[np.int64]:
    numbers = None if keys is None else {one_form(key): number for number, key in enumerate(keys)}
    index, labels = [], []
    for place, (label, key, position) in table_rows(path, ["label"], ["key", "index"]):
        index.append(_of_key(key, place, numbers) if key else _index(position, place, images))
        labels.append((place, label))
    there = np.bincount(np.array(index, dtype=np.int64), minlength=images)
    if len(there) and not (there == 1).all():
        image = int(np.flatnonzero(there != 1)[0])
        name = f"index {image}" if keys is None else keys[image]
        raise InputError(
            f"expected one row for each of {images} images in {path}, got {there[image]} rows for "
            f"{name}"
        )
    whole = np.empty(images, dtype=np.int64)
    whole[index] = _numbers(labels, path, classes)
    return whole


def _of_key(key: str, place: str, numbers: Mapping[str, int] | None) -> int:
    if numbers is None:
        raise InputError(
            f"expected a table without keys in {place}, got the key {shown(key)}: the samples of "
            f"this training set have only their indices, so it was made for another one"
        )
    number = numbers.get(one_form(key))
    if number is None:
        raise InputError(
            f"expected the key of a training sample in {place}, got {shown(key)}: the table was "
            f"made for another training set, or the file is gone"
        )
    return number


def _index(text: str, place: str, images: int) -> int:
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > MOST_DIGITS or int(digits) >= images:
        raise InputError(
            f"expected an index of 0 to {images - 1}, or a key, in {place}, got {shown(digits)}"
        )
    return int(digits)


def _numbers(
    labels: Sequence[tuple[str, str]], path: Path, classes: Sequence[str]
) -> npt.NDArray[np.int64]:
    """Return the number of each label, which comes with its place."""
    check_class_names(classes, str(path))
    known = {name: number for number, name in enumerate(classes)}
    for place, text in labels:
        if text not in known:
            name = text if text in classes else text.strip()
            left_out = name.lower() == DROP_WORD and name not in classes
            known[text] = DROP if left_out else class_number(place, name, classes, [DROP_WORD])
    return np.array([known[text] for _, text in labels], dtype=np.int64)
