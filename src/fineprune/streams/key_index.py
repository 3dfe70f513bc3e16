"""KeyIndex: which samples the shards of a stream contain, so that each sample has a number.

A sample's number is the first number of its shard plus its place in the shard. The index holds a
checksum of each key, so a shard that has changed since the index was made is noticed. Without this
check, the losses of one sample would count for another.
"""

import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError, check_whole_number, explaining
from fineprune.writing import replacing

# The version of the files.
_VERSION = 1


class KeyIndex:
    """The shards of a stream, how many samples each of them has, and a checksum of each key.

    ``scan`` makes an index of keys, ``of_ids`` one for samples that store their own numbers, and
    ``load`` reads one from a file. ``len(index)`` is the number of samples N.

    Args:
        shards: The names of the shards (paths, URLs or numbers as text), without repetitions.
        sizes: Number of samples of each shard.
        checksums: The checksum of each sample's key, uint32, shape (N,), shard after shard; None if
            the keys are the numbers 0..N-1 themselves.

    Attributes:
        shards, checksums: As given.
        firsts: The number of the first sample of each shard, and N at the end; int64, shape
            (shards + 1,).

    Raises:
        InputError: There are no shards or no samples, a name is repeated or not text, or the
            numbers do not fit together.
    """

    def __init__(
        self,
        shards: Sequence[str],
        sizes: Sequence[int],
        checksums: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        self.shards = _checked_names(shards)
        if len(sizes) != len(self.shards):
            raise InputError(
                f"expected one size for each of {len(self.shards)} shards, got {len(sizes)}"
            )
        for shard, size in zip(self.shards, sizes, strict=True):
            check_whole_number(f"the number of samples of shard {shard!r}", size, 0)
        if sum(sizes) > np.iinfo(np.int64).max:
            raise InputError(f"expected fewer than 2**63 samples, got {sum(sizes)}")
        self.firsts: npt.NDArray[np.int64] = np.cumsum([0, *sizes], dtype=np.int64)
        self.checksums = checksums
        if not len(self):
            raise InputError(f"expected at least one sample in {len(self.shards)} shards, got none")
        if checksums is not None and checksums.shape != (len(self),):
            raise InputError(
                f"expected one checksum for each of {len(self)} samples, got an array of shape "
                f"{checksums.shape}"
            )

    @classmethod
    def scan(cls, shards: Sequence[str], keys: Callable[[str], Iterable[str | int]]) -> "KeyIndex":
        """Make an index by reading the keys of every shard once.

        Args:
            shards: The names of the shards. Another order numbers the samples differently.
            keys: A function that yields the keys of a shard in stored order: text or integers that
                are unique within the shard.

        Raises:
            InputError: As for ``KeyIndex``, or a key occurs twice in a shard or is neither text nor
                an integer.
        """
        names = _checked_names(shards)
        sizes, parts = [], []
        for shard in names:
            seen: set[str | int] = set()
            checksums: list[int] = []
            for key in keys(shard):
                checksums.append(_checksum(shard, key))
                if key in seen:
                    raise InputError(
                        f"expected keys that are unique within a shard, got {key!r} twice in shard "
                        f"{shard!r}: make the key of more than one field, or write the shard again"
                    )
                seen.add(key)
            sizes.append(len(checksums))
            parts.append(np.array(checksums, np.uint32))
        return cls(names, sizes, np.concatenate(parts))

    @classmethod
    def of_ids(cls, shards: Sequence[str], sizes: Sequence[int]) -> "KeyIndex":
        """Make an index for samples whose keys are their own numbers 0..N-1, without reading them.

        The numbers ascend in stored order, shard after shard. For shuffled or missing ones, use
        ``scan``. The arguments and errors are those of ``KeyIndex``.
        """
        return cls(shards, sizes)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "KeyIndex":
        """Read an index that ``save`` wrote.

        Raises:
            InputError: The file is missing, is damaged or has another version.
        """
        expected = f"expected an index in {path}, cannot read it"
        # For a damaged archive, NumPy raises many types of exceptions.
        cannot_read = explaining(expected, Exception, ": make it with KeyIndex.scan")
        with cannot_read, np.load(path, allow_pickle=False) as stored:
            version = int(stored["version"])
            if version != _VERSION:
                raise InputError(
                    f"expected an index of version {_VERSION} in {path}, got version {version}: "
                    f"make it again with KeyIndex.scan"
                )
            checksums = stored["checksums"].astype(np.uint32, copy=False)
            return cls(
                stored["shards"].tolist(),
                stored["sizes"].tolist(),
                checksums if stored["has_checksums"] else None,
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a NumPy archive (npz), and replace one that exists atomically.

        Raises:
            InputError: The path is that of a folder, a device or a pipe.
            OSError: The file cannot be written.
        """
        stored = self.checksums
        with replacing(Path(path)) as file:
            np.savez(
                file,
                version=np.array(_VERSION),
                shards=np.array(self.shards),
                sizes=np.diff(self.firsts),
                has_checksums=np.array(stored is not None),
                checksums=np.zeros(0, np.uint32) if stored is None else stored,
            )

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def numbering(self) -> int:
        """Return a number that is equal for equal indices, and almost certainly not for others.

        The folders of the shards may differ, as between the nodes of a cluster.
        """
        names = [name.rpartition("/")[2] for name in self.shards]
        digest = zlib.crc32("\0".join(names).encode("utf-8", "surrogateescape"))
        digest = zlib.crc32(self.firsts.tobytes(), digest)
        return digest if self.checksums is None else zlib.crc32(self.checksums.data, digest)

    def expected(self, shard: int) -> Sequence[int]:
        """Return what ``found`` must return for each sample of a shard, in stored order."""
        first, end = self.firsts[shard : shard + 2].tolist()
        return range(first, end) if self.checksums is None else self.checksums[first:end].tolist()

    def found(self, shard: int, key: str | int) -> int:
        """Return the checksum of a key that was read, or the key itself if keys are numbers."""
        if self.checksums is not None:
            return _checksum(self.shards[shard], key)
        if not isinstance(key, Integral) or isinstance(key, bool):
            raise InputError(
                f"expected the samples' numbers as the keys of shard {self.shards[shard]!r}, got "
                f"{key!r}: yield (number, sample)"
            )
        return int(key)

    def refusal(self, shard: int, place: int, key: object) -> InputError:
        """Return the error for a key (None: the end) that is not the one at a place of a shard."""
        name = self.shards[shard]
        size = len(self.expected(shard))
        if key is None:
            problem = f"expected {size} samples in shard {name!r}, got {place}"
        elif place >= size:
            problem = f"expected {size} samples in shard {name!r}, got one more with key {key!r}"
        elif self.checksums is None:
            wanted = self.expected(shard)[place]
            problem = f"expected key {wanted} at place {place} of shard {name!r}, got {key!r}"
        else:
            listed = _checksum(name, key) in self.expected(shard)
            what = "listed at another place" if listed else "not listed"
            problem = (
                f"expected the keys of the index in their order in shard {name!r}, got at place "
                f"{place} the key {key!r}, which is {what}"
            )
        return InputError(
            f"{problem}: restore the shard, or make a new index and begin a new training"
        )


def _checked_names(shards: Sequence[str]) -> tuple[str, ...]:
    if isinstance(shards, str):
        raise InputError(f"expected a list of shard names, got one text {shards!r}: give a list")
    if isinstance(shards, set | frozenset):
        raise InputError(
            "expected the names of shards in a fixed order, which numbers their samples, got a "
            "set, whose order differs between processes: give sorted(...)"
        )
    names = tuple(shards)
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"expected the names of shards as text, got {name!r}: use str()")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"expected each shard once, got {twice!r} at least twice")
    if not names:
        raise InputError("expected at least one shard, got none")
    return names


def _checksum(shard: str, key: object) -> int:
    """Return the CRC-32 of a key. An integer and the same number as text have different ones."""
    if isinstance(key, str):
        return zlib.crc32(key.encode("utf-8", "surrogateescape"))
    if isinstance(key, Integral) and not isinstance(key, bool):
        return zlib.crc32(b"\0%d" % int(key))
    raise InputError(f"expected keys as text or integers, got {key!r} in shard {shard!r}")
