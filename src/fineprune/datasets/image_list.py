"""ImageList: the images of a data set and their classes, found without opening an image.

They are in a folder with one folder per class, or in a list: a CSV file. In memory, they are two
packed arrays, so that loader processes share them with the training.
"""

import functools
import hashlib
import json
import logging
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fineprune.datasets.image_set import one_form
from fineprune.datasets.table import table_rows
from fineprune.errors import MOST_DIGITS, InputError, explaining
from fineprune.writing import replacing

_LOGGER = logging.getLogger(__name__)

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_KNOWN = frozenset(IMAGE_SUFFIXES)

# Programs write whole numbers with a point in a column with gaps.
_POINT = re.compile(r"(-?[0-9]+)\.0+")
# What they write for a number that is missing.
_GAP = "nan"
# By convention, the label of an image without one.
_NO_LABEL = "-1"

# Folders that are parts of a data set, and no classes.
_TRAIN = ("train", "training")
_HELD_OUT = ("val", "valid", "validation", "test", "testing")

# Ends each path, which no system allows it to contain.
_END = b"\0"


@dataclass(frozen=True, eq=False)
class ImageList:
    """The images of a data set, in a fixed order.

    Attributes:
        source: The folder or the list.
        classes: The name of each class, sorted; as numbers if all of them are numbers.
        labels: The class of each image; int32, shape (N,).
        paths: The path of each image, relative to ``base``, as the bytes of the file system, each
            of which a 0 ends; uint8.
    """

    source: Path
    classes: tuple[str, ...]
    labels: npt.NDArray[np.int32]
    paths: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def base(self) -> Path:
        """The folder that the paths are relative to."""
        return self.source.parent if self.source.suffix == ".csv" else self.source

    @functools.cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.paths == 0)

    def digest(self) -> str:
        """Return a digest of the classes, the relative paths and the labels, in hexadecimal."""
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        digest.update(self.labels.data)
        digest.update(self.paths.data)
        return digest.hexdigest()

    def read(self, image: int) -> bytes:
        """Return the bytes of the file of an image."""
        with open(self.name(image), "rb", buffering=0) as file:
            return file.read()

    def name(self, image: int) -> str:
        """Return the path of an image."""
        return os.path.join(self.base, os.fsdecode(self._relative(image)))

    def keys(self) -> tuple[str, ...]:
        """Return what names each image in a table: its path, relative to ``base``.

        A path that a list repeats is numbered from the second time on, as in ``a.png#2``.
        """
        # Names of files that are not valid text get replacement characters.
        paths = self.paths.tobytes().split(_END)[:-1]
        keys = [path.decode("utf-8", "backslashreplace") for path in paths]
        if len(set(keys)) < len(keys):
            times: Counter[str] = Counter()
            for image, key in enumerate(keys):
                times[key] += 1
                if times[key] > 1:
                    keys[image] = f"{key}#{times[key]}"
        return tuple(keys)

    def numbered(self, classes: tuple[str, ...]) -> "ImageList":
        """Return the list with its labels as numbers of other classes, those of the training set.

        Raises:
            InputError: It has a class that is none of them.
        """
        numbers = {one_form(name): number for number, name in enumerate(classes)}
        order = np.array([numbers.get(one_form(name), -1) for name in self.classes], np.int32)
        labels = order[self.labels]
        if (labels < 0).any():
            image = int(np.argmax(labels < 0))
            raise InputError(
                f"expected in {self.source} only classes of the training set, got "
                f"{self.classes[self.labels[image]]!r} in {self.name(image)}"
            )
        return replace(self, classes=classes, labels=labels)

    def with_numbers(self, classes: int | None) -> "ImageList":
        """Return the list with the classes 0 to ``classes`` - 1 if all labels are such numbers.

        Otherwise, the classes that occur are numbered in their order, which is reported if they
        are numbers. ``classes`` is the number of classes of the network; None if it is not known.
        """
        if not all(map(_is_number, self.classes)) or max(map(len, self.classes)) > MOST_DIGITS:
            return self
        numbers = [int(name) for name in self.classes]
        if numbers == list(range(len(numbers))):
            return self
        canonical = [str(number) for number in numbers] == list(self.classes)
        if canonical and classes is not None and max(numbers) < classes:
            return self.numbered(tuple(str(number) for number in range(classes)))
        _LOGGER.warning(
            "%s has the labels %s ... %s, which are numbered 0 to %d in their order%s",
            *(self.source, self.classes[0], self.classes[-1], len(numbers) - 1),
            ": set network.classes above the largest label to keep the numbers"
            if canonical  # Names such as 01 would not be kept.
            else "",
        )
        return self

    def _relative(self, image: int) -> bytes:
        start = int(self._ends[image - 1]) + 1 if image else 0
        path: bytes = self.paths[start : int(self._ends[image])].tobytes()
        return path


def find_images(source: Path) -> ImageList:
    """Find the images that ``data.train`` or ``data.test`` names.

    Args:
        source: A folder with one folder per class, or a CSV file with the columns ``path`` and
            ``label``, whose paths are absolute or relative to its folder.

    Raises:
        InputError: There are none, or what there is cannot be meant.
    """
    source = Path(os.path.abspath(source))
    with explaining(f"expected images in {source}, cannot read it", (OSError, UnicodeError)):
        if source.is_dir():
            return _of_folder(source)
        if source.suffix != ".csv":
            found = "which is none" if source.exists() else "which does not exist"
            raise InputError(
                f"expected a folder with one folder per class, or a .csv with the columns path and "
                f"label, got {source}, {found}"
            )
        return _of_csv(source)


def save_images(file: Path, images: ImageList) -> None:
    """Write a list, and replace a file at this path atomically."""
    classes = np.frombuffer(json.dumps(images.classes).encode(), np.uint8)
    with replacing(file) as opened:
        np.savez_compressed(opened, classes=classes, labels=images.labels, paths=images.paths)


def load_images(file: Path, source: Path) -> ImageList:
    """Read a list that ``save_images`` wrote, whose source may have been moved since."""
    expected = f"expected the list of the images of a run in {file}, cannot read it"
    # For a damaged archive, NumPy raises many types of exceptions.
    with (
        explaining(expected, Exception),
        file.open("rb") as opened,
        np.load(opened, allow_pickle=False) as arrays,
    ):
        classes = tuple(json.loads(arrays["classes"].tobytes()))
        return ImageList(Path(os.path.abspath(source)), classes, arrays["labels"], arrays["paths"])


def _of_folder(root: Path) -> ImageList:
    top = _visible(root)
    folders = [entry.name for entry in top if entry.is_dir()]
    ignored = len(top) - len(folders)
    if not folders:
        raise InputError(f"expected one folder per class with its images in {root}, found none")
    _check_no_parts(root, folders)
    paths, names, numbers = bytearray(), [], []
    for folder in folders:
        images, others = _add_folder(root, folder, paths)
        ignored += others
        if not images:
            raise InputError(
                f"expected images ({' '.join(IMAGE_SUFFIXES)}) in the class folder "
                f"{root / folder}, found none: add some, or remove the folder"
            )
        numbers.append(images)
        names.append(_text(folder, root))
    if ignored:
        _LOGGER.warning("%s: ignored %d files that are not images", root, ignored)
    labels = np.repeat(np.arange(len(names)), numbers)
    return _list(root, names, [str(root / folder) for folder in folders], labels, paths)


def _add_folder(root: Path, folder: str, paths: bytearray) -> tuple[int, int]:
    """Add the images of a folder and of those below it; return how many, and how many others.

    Links to folders are followed. The system ends a circle with an OSError.
    """
    images = ignored = 0
    prefix = os.fsencode(folder) + b"/"
    for entry in _visible(root / folder):
        name = entry.name
        if entry.is_dir():
            below, others = _add_folder(root, f"{folder}/{name}", paths)
            images, ignored = images + below, ignored + others
        elif name[name.rfind(".") :].lower() in _KNOWN:
            paths += prefix + os.fsencode(name) + _END
            images += 1
        else:
            ignored += 1
    return images, ignored


def _check_no_parts(root: Path, folders: list[str]) -> None:
    """Raise InputError if folders hold parts of a data set rather than classes."""
    train = next((name for name in folders if name.lower() in _TRAIN), None)
    held_out = [name for name in folders if name.lower() in _HELD_OUT]
    if train is not None and held_out:
        raise InputError(
            f"expected one folder per class in {root}, got {', '.join([train, *held_out])}, which "
            f"are parts of a data set: train on {root / train}, and test on {root / held_out[0]}"
        )


def _of_csv(file: Path) -> ImageList:
    paths, unlabelled = bytearray(), 0
    labels: list[int] = []
    numbers: dict[str, int] = {}
    places: list[str] = []
    for place, (path, text) in table_rows(file, ["path", "label"]):
        label = text.strip()
        whole = _POINT.fullmatch(label)
        label = label if whole is None else whole[1]
        if not path or "\0" in path or not label or label == _GAP:
            raise InputError(f"expected a path and a label in {place}, got {path!r} and {label!r}")
        if label == _NO_LABEL:
            unlabelled += 1
            continue
        if label not in numbers:
            numbers[label] = len(places)
            places.append(place)
        paths += os.fsencode(path) + _END
        # The rest is found out while training, because 10 million files take too long here.
        if not labels and not (file.parent / path).is_file():
            raise InputError(
                f"expected the image of {place} at {file.parent / path}, found no file: give paths "
                f"that are absolute or relative to the folder of the list"
            )
        labels.append(numbers[label])
    if unlabelled:
        _LOGGER.warning(
            "%s: left out %d images with the label -1, which stands for none", file, unlabelled
        )
    if not labels:
        raise InputError(f"expected images with labels in {file}, found none")
    return _list(file, list(numbers), places, np.array(labels), paths)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _list(
    source: Path, names: list[str], places: list[str], labels: npt.NDArray[Any], paths: bytearray
) -> ImageList:
    """Make a list from classes in any order, after checking that each of them has one name."""
    _check_names(source, names, places)
    if all(map(_is_number, names)):
        # By their values, also those with more digits than Python converts.
        classes = sorted(names, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name))
    else:
        classes = sorted(names)
    numbers = {name: number for number, name in enumerate(classes)}
    order = np.array([numbers[name] for name in names], np.int32)
    return ImageList(source, tuple(classes), order[labels], np.frombuffer(paths, np.uint8))


def _check_names(source: Path, names: list[str], places: list[str]) -> None:
    """Refuse two names of one class, and report names that differ in capitals or spaces only."""
    known: dict[str, tuple[str, str]] = {}
    alike: dict[str, tuple[str, str]] = {}
    pairs = []
    for name, place in zip(names, places, strict=True):
        form = name.lstrip("0") or "0" if _is_number(name) else one_form(name)
        other, there = known.setdefault(form, (name, place))
        if other != name:
            raise InputError(
                f"expected one name for each class, got {other!a} in {there} and {name!a} in "
                f"{place}: write it in one way"
            )
        other, there = alike.setdefault(name.casefold().strip(), (name, place))
        if other != name:
            pairs.append(f"{other!r} ({there}) and {name!r} ({place})")
    if pairs:
        _LOGGER.warning(
            "%s: %d names of classes differ from another one only in capitals or spaces, such as "
            "%s: give them one name if they are one class",
            *(source, len(pairs), pairs[0]),
        )


def _visible(folder: Path) -> "list[os.DirEntry[str]]":
    """Return what is in a folder, sorted by name, without hidden files and folders."""
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    return sorted(visible, key=lambda entry: entry.name)


def _text(name: str, root: Path) -> str:
    """Return the name of a class folder, which is also written to files in UTF-8."""
    try:
        return os.fsencode(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"expected class folders with names in UTF-8 in {root}, got {name!r}"
        ) from error
