"""Label files: the user's own label for each image of a training set."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fineprune.datasets.image_set import class_number
from fineprune.errors import InputError

# The label of an image that is left out of the training, in text files and in the result.
DROP_WORD, DROP = "drop", -1


def read_labels(path: Path, classes: Sequence[str], images: int) -> npt.NDArray[np.int64]:
    """Read one label for each image of a training set.

    Args:
        path: The file. A file whose name ends in ``.npy`` holds integers of shape (N,), where -1
            leaves an image out. Any other file is text in UTF-8 with one label per line: the name
            or the number of a class, or ``drop``.
        classes: The name of each class.
        images: The number of images in the training set, N.

    Returns:
        The labels, with -1 for the images to leave out; int64, shape (N,).

    Raises:
        InputError: The file cannot be read, has another number of labels, or has an unknown label.
    """
    labels = _from_array(path, classes) if path.suffix == ".npy" else _from_text(path, classes)
    if len(labels) != images:
        raise InputError(
            f"expected {images} labels in {path}, one for each image of the training set before "
            f"it is split, got {len(labels)}"
        )
    return labels


def _from_array(path: Path, classes: Sequence[str]) -> npt.NDArray[np.int64]:
    try:
        # Mapped, so that a damaged header cannot ask for more memory than the file has bytes.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise InputError(f"expected labels in {path}, cannot read it: {_reason(error)}") from error
    except (ValueError, EOFError) as error:
        # NumPy's message would advise to allow pickle, which runs code.
        raise InputError(
            f"expected labels in {path}, cannot read it: no whole array of numbers in NumPy's "
            f"format"
        ) from error
    integers = isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.integer)
    if not integers or array.ndim != 1:
        shown = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "more"
        raise InputError(f"expected one array of integers of shape (N,) in {path}, got {shown}")
    wrong = np.flatnonzero((array < DROP) | (array >= len(classes)))
    if len(wrong):
        raise InputError(
            f"expected labels 0..{len(classes) - 1}, or {DROP} to leave an image out, in {path}, "
            f"got {array[wrong[0]]} at index {wrong[0]}"
        )
    return np.array(array, dtype=np.int64)


def _from_text(path: Path, classes: Sequence[str]) -> npt.NDArray[np.int64]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"expected labels in {path}, cannot read it: {_reason(error)}") from error
    lines = text.removesuffix("\n").split("\n") if text else []
    numbers = {DROP_WORD: DROP}
    labels = np.empty(len(lines), dtype=np.int64)
    for position, line in enumerate(lines):
        label = line.strip()
        if label not in numbers:
            place = f"line {position + 1} of {path}"
            numbers[label] = class_number(place, label, classes)
        labels[position] = numbers[label]
    return labels


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
