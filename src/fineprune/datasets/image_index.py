"""ImageIndex: what is known of each image of a data set without opening it.

It is made once per data set and kept in a cache file. Processes map this file into their memory,
so that all of them share one copy, and private memory does not grow with the number of images.
"""

import functools
import hashlib
import json
import logging
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fineprune.datasets.image_set import in_another_form
from fineprune.datasets.image_sources import Found, find_images, shards_of, stamp_of
from fineprune.errors import MOST_DIGITS, InputError

_LOGGER = logging.getLogger(__name__)

# The first bytes of a cache file, followed by the length of its header. The last digit is the
# version of the format.
_MAGIC = b"fineidx2"
_START = struct.Struct("<8sQ")

# Arrays start at multiples of this, so that their numbers are aligned.
_ALIGNMENT = 64


class ImageIndex:
    """The images of a data set: where each of them is, and its class.

    Args:
        header: What a cache file has before its arrays.
        arrays: The arrays of ``Found``.
        file: The cache file that holds the arrays; None if they are in memory only.

    Attributes:
        classes: The name of each class, sorted.
        places: Where the first image of each class was found, for error messages.
        labels: The class of each image; int32, shape (N,).
        digest: A digest of the locations, relative to their folder, and of the labels.
    """

    def __init__(
        self, header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], file: Path | None
    ) -> None:
        self.classes: tuple[str, ...] = tuple(header["classes"])
        self.places: tuple[str, ...] = tuple(header["places"])
        self.labels: npt.NDArray[np.int32] = arrays["labels"]
        self.digest: str = header["digest"]
        self._base: str = header["base"]
        self._shards: tuple[str, ...] = tuple(header["shards"])
        self._header = header
        self._arrays = arrays
        self._file = file

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the name of the cache file to another process instead of the arrays."""
        if self._file is None:
            return ImageIndex, (self._header, self._arrays, None)
        return _open_again, (self._file, self.digest)

    def read(self, image: int) -> bytes:
        """Return the bytes of the file of an image, or of a member of a shard."""
        if not self._shards:
            with open(self._path(image), "rb", buffering=0) as file:
                return file.read()
        start, size = int(self._arrays["start"][image]), int(self._arrays["size"][image])
        with open(self._shard(image), "rb", buffering=0) as file:
            file.seek(start)
            return file.read(size)

    def name(self, image: int) -> str:
        """Return where an image is, for messages."""
        if not self._shards:
            return self._path(image)
        return f"{self._shard(image)} at byte {int(self._arrays['start'][image])}"

    def numbered(self, classes: tuple[str, ...], source: Path) -> npt.NDArray[np.int32]:
        """Return the labels as numbers of other classes, those of the training set."""
        if self.classes == classes:
            return self.labels
        numbers = {name: number for number, name in enumerate(classes)}
        for name, place in zip(self.classes, self.places, strict=True):
            if name not in numbers:
                advice = (
                    ", which the training set writes in another Unicode form: rename one of them"
                    if in_another_form(name, classes)
                    else ""
                )
                raise InputError(
                    f"expected in {source} only classes of the training set, got {name!r} in "
                    f"{place}{advice}"
                )
        order = np.array([numbers[name] for name in self.classes], np.int32)
        return order[self.labels]

    def keys(self) -> tuple[str, ...]:
        """Return what names each image in a table: its path, or where it is in which shard.

        Returns:
            The keys, relative to the folder of the images. A path that a list repeats is numbered
            from the second time on, as in ``a.png#2``.
        """
        if self._shards:
            places = zip(
                self._arrays["shard"].tolist(), self._arrays["start"].tolist(), strict=True
            )
            return tuple(f"{self._shards[shard]}:{start}" for shard, start in places)
        # Names of files that are not valid text get replacement characters.
        keys = [
            self._relative(image).decode("utf-8", "backslashreplace") for image in range(len(self))
        ]
        if len(set(keys)) < len(keys):
            times: Counter[str] = Counter()
            for image, key in enumerate(keys):
                times[key] += 1
                if times[key] > 1:
                    keys[image] = f"{key}#{times[key]}"
        return tuple(keys)

    def with_numbers(self, classes: int | None, source: Path) -> "ImageIndex":
        """Return the index with the classes 0 to ``classes`` - 1 if all labels are such numbers.

        Otherwise, the classes that occur are numbered in their order, which is reported if they
        are numbers. Names of so many digits that int64 may not hold them are not.

        Args:
            classes: The number of classes of the network; None if it is not known.
            source: Where the images come from, for the message.
        """
        if not all(name.isascii() and name.isdigit() for name in self.classes):
            return self
        if max(map(len, self.classes)) > MOST_DIGITS:
            return self
        numbers = [int(name) for name in self.classes]
        if numbers == list(range(len(numbers))):
            return self
        canonical = [str(number) for number in numbers] == list(self.classes)
        if classes is None or not canonical or max(numbers) >= classes:
            _LOGGER.warning(
                "%s has the labels %s, which are numbered 0 to %d in their order%s",
                *(source, f"{self.classes[0]} ... {self.classes[-1]}", len(numbers) - 1),
                ": set network.classes above the largest label to keep the numbers"
                if canonical  # Names such as 01 would not be kept.
                else "",
            )
            return self
        there = dict(zip(numbers, self.places, strict=True))
        header = {
            **self._header,
            "classes": [str(number) for number in range(classes)],
            "places": [there.get(number, "") for number in range(classes)],
        }
        labels = np.array(numbers, np.int32)[self.labels]
        # The file of the cache has other labels, so that other processes are sent the arrays.
        return ImageIndex(header, {**self._arrays, "labels": labels}, None)

    def _relative(self, image: int) -> bytes:
        ends = self._arrays["ends"]
        start = int(ends[image - 1]) if image else 0
        path: bytes = self._arrays["paths"][start : int(ends[image])].tobytes()
        return path

    def _path(self, image: int) -> str:
        return os.path.join(self._base, os.fsdecode(self._relative(image)))

    def _shard(self, image: int) -> str:
        return os.path.join(self._base, self._shards[int(self._arrays["shard"][image])])


def load_index(source: Path, digest: str | None = None, *, keep: bool = True) -> ImageIndex:
    """Return the index of a data set: from the cache if the source has not changed since.

    Several processes may do this at the same time.

    Args:
        source: The source, as for ``find_images``.
        digest: The digest of the index with which the run began. If the cache has this index, it is
            used although the source has changed, so that all indices of samples stay right. None
            for a new run.
        keep: Whether a new index replaces the one in the cache, with which other runs may have
            begun. A command that trains nothing must not do that.
    """
    source = Path(os.path.abspath(source))
    file = cache_folder() / f"{hashlib.sha256(os.fsencode(source)).hexdigest()[:32]}.index"
    known = _read(file)
    if known is not None and digest in (None, known[0]["digest"]):
        if stamp_of(source, known[0]["stamp"]) == known[0]["stamp"]:
            return ImageIndex(*known, file)
        if digest is not None:
            shards_of(source)  # It raises an error if the whole source is gone.
            _LOGGER.warning(
                "%s has changed since the run began: the run goes on with the images of then, and "
                "missing ones count as broken",
                source,
            )
            return ImageIndex(*known, file)
    del known  # It maps the old file into memory, and Windows does not replace such a file.
    found = find_images(source)
    if found.ignored:
        _LOGGER.warning("%s: ignored %d files that are not images", source, found.ignored)
    header, arrays = _header(found), found.arrays
    if digest not in (None, header["digest"]):
        raise InputError(
            f"expected in {source} the images and labels with which the run began, got others: "
            f"restore them, or train into a new folder"
        )
    if not keep:
        return ImageIndex(header, arrays, None)
    try:
        _write(file, header, arrays)
    except OSError as error:
        _LOGGER.warning(
            "cannot write the index of %s to %s: %s: each process makes and keeps its own; set "
            "XDG_CACHE_HOME to a folder that can be written",
            *(source, file, error.strerror),
        )
        return ImageIndex(header, arrays, None)
    written = _read(file)
    # Another process may have replaced the file, if the source has changed just now.
    same = written is not None and written[0]["digest"] == header["digest"]
    return ImageIndex(*written, file) if written and same else ImageIndex(header, arrays, None)


def cache_folder() -> Path:
    """Return the folder of the cache files: in ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fineprune"


def _header(found: Found) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps([found.classes, found.shards]).encode())
    for name, array in sorted(found.arrays.items()):
        digest.update(name.encode())
        digest.update(array.data)
    return {
        "classes": found.classes,
        "places": found.places,
        "base": found.base,
        "shards": found.shards,
        "stamp": found.stamp,
        "digest": digest.hexdigest(),
        "arrays": {name: [array.dtype.str, len(array)] for name, array in found.arrays.items()},
    }


# It lists the user's files.
_for_its_owner = functools.partial(os.open, mode=0o600)


def _write(file: Path, header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a cache file under a temporary name, and rename it when it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as unfinished:
        partial = Path(unfinished, file.name)
        with open(partial, "xb", opener=_for_its_owner) as out:
            out.write(_START.pack(_MAGIC, len(text)) + text)
            for array in arrays.values():
                out.seek(_aligned(out.tell()))
                out.write(array.data)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]] | None:
    """Return the header and the mapped arrays of a cache file; None if there is no whole one."""
    try:
        with file.open("rb") as opened:
            magic, length = _START.unpack(opened.read(_START.size))
            if magic != _MAGIC:
                return None
            header = json.loads(opened.read(length))
            content = np.memmap(opened, np.uint8, "r")
        arrays = {}
        position = _START.size + length
        for name, (dtype, number) in header["arrays"].items():
            position = _aligned(position)
            # A plain array is faster than a memmap, and it keeps the file mapped.
            arrays[name] = np.frombuffer(content, dtype, number, position)
            position += arrays[name].nbytes
    except (OSError, ValueError, struct.error):
        return None
    return header, arrays


def _open_again(file: Path, digest: str) -> ImageIndex:
    known = _read(file)
    if known is None or known[0]["digest"] != digest:
        raise InputError(f"expected the index {file} as it was at the start, found another one")
    return ImageIndex(*known, file)


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
