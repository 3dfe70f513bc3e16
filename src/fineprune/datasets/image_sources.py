"""Finds the images of a data set without opening them: in class folders, a list or tar shards."""

import csv
import glob
import logging
import math
import os
import re
import stat
import tarfile
import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError, check_installed, explaining

_LOGGER = logging.getLogger(__name__)

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_KNOWN = frozenset(IMAGE_SUFFIXES)
_LIST_SUFFIXES = (".csv", ".parquet", ".txt")

# The largest file in a shard that is read as the name of a class, in bytes.
_MOST_TEXT = 1 << 20

# Rows of a Parquet file that are converted to Python objects at a time.
_ROWS = 65_536

# What tells whether a source has changed: pairs of a name and numbers from ``os.stat``.
Stamp = list[list[Any]]


@dataclass
class Found:
    """The images of a data set in their order.

    Attributes:
        classes: The name of each class, sorted; as numbers if all of them are numbers.
        places: Where the first image of each class was found, for error messages.
        base: The folder that paths are relative to.
        shards: The tar files, relative to ``base``; empty if each image is a file.
        arrays: The ``labels``, the class of each image (int32, shape (N,)), and where the images
            are. For files, ``paths``, the bytes of all paths after one another, and ``ends``, the
            end of each path in them (int64, shape (N,)). For shards, the number of the ``shard``
            (int32), and the ``start`` and the ``size`` of the image in it, in bytes (int64); each
            of shape (N,).
        ignored: The number of files that are not images.
        stamp: What changes if the source changes, as ``stamp_of`` returns it.
    """

    classes: tuple[str, ...]
    places: tuple[str, ...]
    base: str
    shards: tuple[str, ...]
    arrays: dict[str, npt.NDArray[Any]]
    ignored: int
    stamp: Stamp


# A whole number, perhaps with a point, and what programs write for a number that is missing.
_WHOLE = re.compile(r"[0-9]+(\.0+)?")
_GAP = "nan"

# By convention, the label of an image without one.
_NO_LABEL = re.compile(r"-1(\.0+)?")

# Folders that are parts of a data set, and no classes.
_TRAIN = ("train", "training")
_HELD_OUT = ("val", "valid", "validation", "test", "testing")


@dataclass
class _Labels:
    """Collects the labels of images, which are names until all of them are known."""

    source: Path
    unlabelled: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    given: "array[int]" = field(default_factory=lambda: array("i"))

    def add(self, name: str, place: str) -> bool:
        """Add the label of an image; return False if it stands for none, which is counted."""
        if _NO_LABEL.fullmatch(name):
            self.unlabelled += 1
            return False
        self.given.append(self.number(name, place))
        return True

    def number(self, name: str, place: str) -> int:
        """Return the provisional number of a class."""
        known = self.numbers.get(name)
        if known is None:
            known = self.numbers[name] = len(self.places)
            self.places.append(place)
        return known

    def check_numbers(self) -> None:
        """Refuse or report labels of a list that are probably meant to be other numbers."""
        whole = [name for name in self.numbers if _WHOLE.fullmatch(name)]
        if _GAP in self.numbers and len(whole) == len(self.numbers) - 1:
            place = self.places[self.numbers[_GAP]]
            raise InputError(f"expected a label in {place}, got {_GAP}, which stands for none")
        if len(whole) < len(self.numbers):
            return
        values: dict[str, str] = {}
        for name in whole:
            other = values.setdefault(name.partition(".")[0].lstrip("0"), name)
            if other != name:
                places = (self.places[self.numbers[each]] for each in (other, name))
                raise InputError(
                    f"expected one name for each class, got {other} in {next(places)} and {name} "
                    f"in {next(places)}: write the number in one way"
                )
        pointed = next((name for name in whole if "." in name), None)
        if pointed is not None:
            _LOGGER.warning(
                "%s has labels such as %s, which are names, and sorted as text: write whole "
                "numbers without a point, since these are sorted and kept as numbers",
                *(self.source, pointed),
            )

    def finish(self) -> tuple[tuple[str, ...], tuple[str, ...], npt.NDArray[np.int32]]:
        """Return the sorted classes, the place of each, and the labels."""
        composed: dict[str, str] = {}
        for name in self.numbers:
            other = composed.setdefault(unicodedata.normalize("NFC", name), name)
            if other != name:
                first, second = (self.places[self.numbers[each]] for each in (other, name))
                raise InputError(
                    f"expected one name for each class, got two Unicode forms of one: "
                    f"{other!a} in {first} and {name!a} in {second}: rename one of them"
                )
        self._say_what_is_alike()
        if all(name.isascii() and name.isdigit() for name in self.numbers):
            # By their values, also those with more digits than Python converts.
            digits = {name: name.lstrip("0") for name in self.numbers}
            classes = sorted(digits, key=lambda name: (len(digits[name]), digits[name], name))
        else:
            classes = sorted(self.numbers)
        order = np.empty(len(classes), np.int32)
        order[[self.numbers[name] for name in classes]] = np.arange(len(classes), dtype=np.int32)
        places = tuple(self.places[self.numbers[name]] for name in classes)
        if self.unlabelled:
            _LOGGER.warning(
                "%s: left out %d images with the label -1, which stands for none",
                *(self.source, self.unlabelled),
            )
        return tuple(classes), places, order[np.frombuffer(self.given, np.int32)]

    def _say_what_is_alike(self) -> None:
        """Report classes that may be one: handwritten letters are not, other names mostly are."""
        alike: dict[str, str] = {}
        pairs = [
            (other, name)
            for name in self.numbers
            if (other := alike.setdefault(name.casefold().strip(), name)) != name
        ]
        if pairs:
            first, second = (self.places[self.numbers[name]] for name in pairs[0])
            _LOGGER.warning(
                "%s: %d names of classes differ from another one only in capitals or spaces, such "
                "as %r (%s) and %r (%s): give them one name if they are one class",
                *(self.source, len(pairs), pairs[0][0], first, pairs[0][1], second),
            )


@dataclass
class _Paths:
    """Collects paths in a few bytes more than they have."""

    text: bytearray = field(default_factory=bytearray)
    ends: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, path: bytes) -> None:
        self.text += path
        self.ends.append(len(self.text))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "paths": np.frombuffer(self.text, np.uint8),
            "ends": np.frombuffer(self.ends, np.int64),
        }


def find_images(source: Path) -> Found:
    """Find the images that ``data.train`` or ``data.test`` names.

    Args:
        source: A folder with one folder per class; a list of files (``.csv``, ``.parquet`` or
            ``.txt``); or tar shards: one ``.tar``, a folder that contains nothing else, or a
            pattern such as ``shards/train-*.tar``.
    """
    try:
        shards = shards_of(source)
        if shards:
            return _scan_shards(source, shards)
        if source.is_dir():
            return _scan_folder(source)
    except OSError as error:
        raise InputError(f"expected images in {source}, cannot read it: {error}") from error
    return _read_list(source)


def stamp_of(source: Path, known: Stamp) -> Stamp | None:
    """Return the current stamp of a source that was scanned before; None if it is gone.

    Only the folders, the list or the shards that ``known`` names are looked at, and no image. Since
    a new folder changes the time of the folder that contains it, this finds new folders, too.
    """
    try:
        shards = shards_of(source)
        if shards:
            return [_file_stamp(shard) for shard in shards]
        if source.is_dir():
            return [_folder_stamp(source, name) for name, *_ in known]
        return [_file_stamp(source)]
    except (OSError, InputError):
        return None


def shards_of(source: Path) -> list[Path]:
    """Return the tar files that a source names, sorted; none if it is a folder or a list."""
    if source.is_dir():
        names = [entry.name for entry in _visible(source)]
        shards = names and all(name.endswith(".tar") for name in names)
        return [source / name for name in names] if shards else []
    if source.is_file():
        if source.suffix in _LIST_SUFFIXES:
            return []
        matches = [str(source)]
    else:
        matches = sorted(glob.glob(str(source)))
    if not matches:
        raise InputError(f"expected images in {source}, found no such file or folder")
    for match in matches:
        if not match.endswith(".tar"):
            raise InputError(
                f"expected a folder with one folder per class, a list ({', '.join(_LIST_SUFFIXES)})"
                f" or tar shards (.tar, not compressed) with images, got {match}"
            )
    return [Path(match) for match in matches]


def _scan_folder(root: Path) -> Found:
    labels, paths = _Labels(root), _Paths()
    stamp = [_folder_stamp(root, "")]
    top = _visible(root)
    folders = [entry.name for entry in top if entry.is_dir()]
    ignored = len(top) - len(folders)
    if not folders:
        raise InputError(f"expected one folder per class with its images in {root}, found none")
    _check_no_parts(root, folders)
    for name in folders:
        number = labels.number(_text(name, root), str(root / name))
        before = len(paths.ends)
        ignored += _scan_class(root, name, paths, stamp)
        images = len(paths.ends) - before
        if not images:
            raise InputError(
                f"expected images ({' '.join(IMAGE_SUFFIXES)}) in the class folder {root / name}, "
                f"found none: add some, or remove the folder"
            )
        labels.given.extend([number] * images)
    classes, places, numbers = labels.finish()
    arrays = {"labels": numbers, **paths.arrays()}
    return Found(classes, places, str(root), (), arrays, ignored, stamp)


def _check_no_parts(root: Path, folders: list[str]) -> None:
    """Raise InputError if folders hold parts of a data set rather than classes."""
    train = next((name for name in folders if name.lower() in _TRAIN), None)
    held_out = [name for name in folders if name.lower() in _HELD_OUT]
    if train is not None and held_out:
        raise InputError(
            f"expected one folder per class in {root}, got {', '.join([train, *held_out])}, which "
            f"are parts of a data set: train on {root / train}, and test on {root / held_out[0]}"
        )


def _scan_class(root: Path, folder: str, paths: _Paths, stamp: Stamp) -> int:
    """Add the images of a folder and of those below it; return the number of other files.

    Links to folders are followed. The system ends a circle with an OSError.
    """
    stamp.append(_folder_stamp(root, folder))
    ignored = 0
    prefix = os.fsencode(folder) + b"/"
    for entry in _visible(root / folder):
        name = entry.name
        if entry.is_dir():
            ignored += _scan_class(root, f"{folder}/{name}", paths, stamp)
        elif name[name.rfind(".") :].lower() in _KNOWN:
            paths.add(prefix + os.fsencode(name))
        else:
            ignored += 1
    return ignored


def _read_list(path: Path) -> Found:
    stamp = [_file_stamp(path)]
    rows = {".csv": _csv_rows, ".parquet": _parquet_rows, ".txt": _text_rows}[path.suffix]
    labels, paths = _Labels(path), _Paths()
    base = path.parent
    try:
        for line, name, label in rows(path):
            if not name or "\0" in name or not label:
                raise InputError(
                    f"expected a path and a label in {line} of {path}, got {name!r} and {label!r}"
                )
            if not labels.add(label, f"{line} of {path}"):
                continue
            paths.add(os.fsencode(name))
            # The rest is found out while training, because 10 million files take too long here.
            if len(paths.ends) == 1 and not (base / name).is_file():
                raise InputError(
                    f"expected the image of {line} of {path} at {base / name}, found no file: give "
                    f"paths that are absolute or relative to the folder of the list"
                )
    except (OSError, UnicodeError, csv.Error) as error:
        raise InputError(f"expected a list of images in {path}, cannot read it: {error}") from error
    if not len(paths.ends):
        found = (
            f"only {labels.unlabelled} without a label" if labels.unlabelled else "an empty list"
        )
        raise InputError(f"expected images in {path}, got {found}")
    labels.check_numbers()
    classes, places, numbers = labels.finish()
    arrays = {"labels": numbers, **paths.arrays()}
    return Found(classes, places, str(base), (), arrays, 0, stamp)


def _csv_rows(path: Path) -> Iterator[tuple[str, str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.reader(file)
        header = [name.strip() for name in next(table, [])]
        if not header.count("path") == header.count("label") == 1:
            raise _wrong_header(path, header)
        columns = header.index("path"), header.index("label")
        for row in table:
            if not any(map(str.strip, row)):
                continue
            if len(row) != len(header):
                raise InputError(
                    f"expected {len(header)} values in line {table.line_num} of {path}, as in its "
                    f"header, got {len(row)}"
                )
            yield f"line {table.line_num}", row[columns[0]], row[columns[1]].strip()


def _text_rows(path: Path) -> Iterator[tuple[str, str, str]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            words = line.split()
            if not words:
                continue
            if len(words) > 2:
                raise InputError(
                    f"expected a path and one label in line {number} of {path}, got "
                    f"{len(words) - 1} labels: give each image one label (a path with spaces needs "
                    f"a .csv)"
                )
            yield f"line {number}", words[0], words[1] if len(words) > 1 else ""


def _label(value: object) -> str:
    """Return a label as text. Programs write whole numbers as floats where a table has gaps."""
    if isinstance(value, float | Decimal):
        if math.isnan(value):
            return ""
        if math.isfinite(value) and value == int(value):
            return str(int(value))
    return "" if value is None else str(value).strip()


def _parquet_rows(path: Path) -> Iterator[tuple[str, str, str]]:
    check_installed("pyarrow", f"pyarrow to read {path}", "parquet")
    from pyarrow import ArrowException, parquet

    cannot_read = explaining(f"expected a Parquet file, cannot read {path}", ArrowException)
    with cannot_read, parquet.ParquetFile(path) as table:
        names = table.schema_arrow.names
        if not names.count("path") == names.count("label") == 1:
            raise _wrong_header(path, names)
        row = 0
        for batch in table.iter_batches(_ROWS, columns=["path", "label"]):
            paths, labels = (batch.column(name).to_pylist() for name in ("path", "label"))
            _check_column(path, row, paths, "a path as text", str)
            _check_column(
                path, row, labels, "a label as text or a number", str, int, float, Decimal
            )
            for name, label in zip(paths, labels, strict=True):
                row += 1
                yield f"row {row}", name or "", _label(label)


def _check_column(path: Path, row: int, values: Iterable[Any], what: str, *kinds: type) -> None:
    """Raise InputError unless the values after a row, which are of one type, are of these."""
    for number, value in enumerate(values, row + 1):
        if isinstance(value, kinds):
            return
        if value is not None:
            raise InputError(
                f"expected {what} in row {number} of {path}, got {type(value).__name__}"
            )


def _wrong_header(path: Path, header: Iterable[str]) -> InputError:
    return InputError(
        f"expected one column for each of path and label in {path}, got "
        f"{', '.join(header) or 'none'}"
    )


def _scan_shards(source: Path, shards: list[Path]) -> Found:
    stamp = [_file_stamp(shard) for shard in shards]
    base = shards[0].parent
    labels = _Labels(source)
    numbers, starts, sizes = array("i"), array("q"), array("q")
    ignored = 0
    for number, shard in enumerate(shards):
        # tarfile believes the sizes in damaged headers, or reads one header within another.
        damaged = (
            OSError,
            ValueError,
            tarfile.TarError,
            OverflowError,
            MemoryError,
            RecursionError,
        )
        with explaining(f"expected a tar file, cannot read {shard}", damaged):
            for sample in _samples(shard):
                image, label = sample.image, sample.label
                ignored += sample.others
                if image is None:
                    continue
                if label is None:
                    raise _no_label(shard, sample)
                place = f"{sample.key}.cls of {shard}"
                if not labels.add(_decoded(label, place), place):
                    continue
                numbers.append(number)
                starts.append(image[0])
                sizes.append(image[1])
    if not len(numbers):
        raise InputError(f"expected samples with an image and a .cls file in {source}, found none")
    classes, places, given = labels.finish()
    arrays: dict[str, npt.NDArray[Any]] = {
        "labels": given,
        "shard": np.frombuffer(numbers, np.int32),
        "start": np.frombuffer(starts, np.int64),
        "size": np.frombuffer(sizes, np.int64),
    }
    names = tuple(os.path.relpath(shard, base) for shard in shards)
    return Found(classes, places, str(base), names, arrays, ignored, stamp)


@dataclass
class _Sample:
    """The members of a shard with one key. An image is its start and its size in the shard."""

    key: str
    image: tuple[int, int] | None = None
    label: bytes | None = None
    json: bool = False
    others: int = 0


def _samples(shard: Path) -> Iterator[_Sample]:
    """Yield the samples of a shard: the members that follow one another with the same key."""
    sample = _Sample("")
    with shard.open("rb") as file:
        for member in _members(file):
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            if not stem:
                continue  # A hidden file, such as those that macOS adds.
            key = f"{folder}/{stem}" if folder else stem
            if key != sample.key:
                if sample.key:
                    yield sample
                sample = _Sample(key)
            extension = extension.lower()
            if f".{extension}" in _KNOWN and sample.image is None:
                sample.image = member.offset_data, member.size
            elif extension == "cls":
                if member.size > _MOST_TEXT:
                    raise ValueError(f"{member.name} has {member.size} bytes, too many for a class")
                file.seek(member.offset_data)
                sample.label = file.read(member.size)
            else:
                sample.json |= extension == "json"
                sample.others += 1
    if sample.key:
        yield sample


def _members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a tar archive that is not compressed, in their order."""
    with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as archive:
        for member in archive:
            archive.members.clear()  # type: ignore[attr-defined]  # It would keep all of them.
            if member.size < 0:  # Python 3.11.7 would read it again and again.
                raise ValueError(f"{member.name} has a negative size")
            if member.issparse():
                raise ValueError(f"{member.name} is stored as a sparse file")
            if member.isreg():
                yield member
        # It takes a damaged header for the end.
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise ValueError(f"no header of a member at byte {archive.offset}")


def _no_label(shard: Path, sample: _Sample) -> InputError:
    there = f"only {sample.key}.json" if sample.json else "none"
    return InputError(
        f"expected the class of the image {sample.key} of {shard} in {sample.key}.cls, got "
        f"{there}: write shards with a .cls file, which holds the name or the number of the class"
    )


def _decoded(label: bytes, place: str) -> str:
    try:
        text = label.decode("utf-8").strip()
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise InputError(f"expected the name or the number of a class in {place}, got {label!r}")
    return text


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


def _folder_stamp(root: Path, name: str) -> list[Any]:
    status = os.stat(root / name)
    return [name, status.st_mtime_ns if stat.S_ISDIR(status.st_mode) else None]


def _file_stamp(path: Path) -> list[Any]:
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns]
