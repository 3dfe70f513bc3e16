"""Source: samples with labels, wherever they are; and the loaders that read any source.

Nothing outside this package asks where samples come from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fineprune.datasets.broken_files import BrokenFiles
from fineprune.errors import InputError
from fineprune.pruning.sampler import PruningSampler

Batch = tuple[Tensor, Tensor]

UNREADABLE = "This sample cannot be read: its file is missing or damaged."


class Reader(Protocol):
    """Reads the batches of a source. It holds what costs memory or time, such as processes."""

    @property
    def broken(self) -> BrokenFiles | None:
        """What takes note of files that cannot be read; None if the samples are not files."""

    def batches(self, order: Tensor, epoch: int, size: int) -> Iterator[tuple[Tensor, Batch]]:
        """Yield ``(index, (x, y))`` for the samples of an order, ``size`` at a time, on the device.

        ``order`` is int64 of shape (n,), on the CPU. What a sample looks like depends only on the
        seed of the run, the epoch and the sample's index.
        """

    def batch(self, index: Tensor, epoch: int) -> Batch:
        """Return the batch ``(x, y)`` of these samples (int64, shape (B,)), as ``batches`` does."""


class Source(Protocol):
    """A data set, or a part of one. It is small: ``open`` returns what reads it."""

    @property
    def place(self) -> str:
        """What holds the data, for error messages."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class; empty if the classes have no names."""

    @property
    def labels(self) -> npt.NDArray[np.integer] | None:
        """The class of each sample, integers, shape (N,); None if only reading them says it."""

    @property
    def sorted_by_class(self) -> bool:
        """Whether the first samples may be all of one class."""

    @property
    def evaluation_batch(self) -> int:
        """How many samples to evaluate at once."""

    @property
    def overlaps(self) -> bool:
        """Whether a batch may be read in another thread while a step is computed."""

    def __len__(self) -> int: ...

    def keys(self) -> tuple[str, ...] | None:
        """Return what names each sample in tables of labels; None if only its index does."""

    def blank(self) -> Tensor:
        """Return zeros with the shape (1, channels, ...) and the dtype of the ``x`` of a sample."""

    def fingerprint(self) -> str:
        """Return a digest that differs if the samples or their labels do, in hexadecimal."""

    def part(
        self, index: npt.NDArray[np.int64], labels: npt.NDArray[np.int64] | None = None
    ) -> "Source":
        """Return the samples with these sorted indices, int64, shape (M,).

        With ``labels``, int64, shape (M,), they have these in place of their own.
        """

    def plain(self, train: Any) -> "Source":
        """Return these samples for evaluation, normalised like those of ``train``.

        ``train`` is a source of the same kind.
        """

    def open(self) -> Reader:
        """Return what reads the batches."""

    def show(self, sample: int) -> Any:
        """Return a sample as ``labels.sample_view`` can show it; a text if it cannot be read."""

    def save(self, name: str, folder: Path) -> None:
        """Write what a resumed run needs to find the same samples, under a name in its folder."""


class EpochLoader:
    """Batches ``(index, (x, y))`` of a source on its device, in the order of a sampler.

    ``index`` is int64 of shape (B,), and ``x`` and ``y`` are a batch; images are float32 of shape
    (B, channels, height, width), channels last. Each iteration is one epoch, that of the sampler:
    call its ``set_epoch`` before.

    Args:
        source: The samples.
        sampler: Chooses the samples of each epoch.
        batch_size: The number of samples of each batch but the last.
        drop_last: Whether to drop an incomplete last batch.

    Attributes:
        broken: As for ``Reader``.
    """

    def __init__(
        self, source: Source, sampler: PruningSampler, batch_size: int, *, drop_last: bool = False
    ) -> None:
        self._reader = source.open()
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self.broken = self._reader.broken

    def __len__(self) -> int:
        """Return the number of batches in the sampler's epoch."""
        whole, rest = divmod(len(self._sampler), self._batch_size)
        return whole if self._drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[tuple[Tensor, Batch]]:
        order = self._sampler.order()  # After a resume, the rest of it.
        if self._drop_last:
            order = order[: len(order) - len(order) % self._batch_size]
        return self._reader.batches(order, self._sampler.epoch, self._batch_size)


@dataclass(frozen=True, eq=False)
class EvaluationBatches:
    """All batches ``(x, y)`` of a source in order, which can be iterated any number of times."""

    source: Source
    reader: Reader

    def __iter__(self) -> Iterator[Batch]:
        order = torch.arange(len(self.source))
        read = self.reader.batches(order, 0, self.source.evaluation_batch)
        return (batch for _, batch in read)


def evaluation_batch(device: str) -> int:
    """Return the number of samples per evaluation batch of data that fit into memory.

    Evaluation keeps nothing for a backward pass, so its batches can be larger than those of
    training. On a CPU, they are smaller than on a GPU so that the activations stay in the cache.
    Both sizes divide the size of CIFAR's test set.
    """
    return 2000 if device.startswith("cuda") else 500


def check_same(place: str, begun: str | None, found: str) -> None:
    """Raise InputError if data have another fingerprint than that with which a run began."""
    if begun not in (None, found):
        raise InputError(
            f"expected in {place} the data with which the run began, got different data: restore "
            f"them (a function of your own must return the same on every call, so seed the split), "
            f"or train into a new folder"
        )
