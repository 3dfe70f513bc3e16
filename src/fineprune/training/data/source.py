"""Source: samples with labels, wherever they are; and the loader that reads any source."""

import abc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fineprune.pruning.sampler import PruningSampler

if TYPE_CHECKING:
    from fineprune.datasets.device_images import DeviceImages
    from fineprune.training.data.loaded import LoadedBatches

Batch = tuple[Tensor, Tensor]
Array = npt.NDArray[np.int64]

UNREADABLE = "This sample cannot be read: its file is missing or damaged."


@dataclass(frozen=True, eq=False, kw_only=True)
class Source(abc.ABC):
    """A data set, or a part of one, whose samples depend on (seed, epoch, index) only.

    It is small: ``open`` returns what reads it.

    Attributes:
        place: What holds the data, for error messages.
        device: Where batches go.
        classes: The name of each class; empty if the classes have no names.
        index: Which items of the data set are the samples, sorted; int64, shape (N,).
        labels: The class of each sample, integers, shape (N,); ``UNKNOWN`` for one that is not
            known, and None if only reading the samples says it.
        relabelled: Whether the samples have these labels in place of their own.
        evaluated: Whether the samples are for evaluation.
        evaluation_batch: How many samples to evaluate at once.
        workers: The number of loader processes; 0 to read in this process.
        overlaps: Whether a batch may be read in another thread while a step is computed.
    """

    place: str
    device: str
    classes: tuple[str, ...]
    index: Array
    labels: npt.NDArray[np.integer] | None
    relabelled: bool = False
    evaluated: bool = False
    evaluation_batch: int = 500
    workers: int = 0
    overlaps: bool = True

    # Whether the first samples may be all of one class.
    sorted_by_class: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.index)

    def part(self, index: Array, labels: Array | None = None) -> Self:
        """Return the samples with these sorted indices, perhaps with other labels; shape (M,)."""
        given: npt.NDArray[np.integer] | None = labels
        if given is None and self.labels is not None:
            given = self.labels[index]
        relabelled = self.relabelled or labels is not None
        return replace(self, index=self.index[index], labels=given, relabelled=relabelled)

    def plain(self, train: Any) -> Self:
        """Return these samples for evaluation; ``train`` are those to train on."""
        return replace(self, evaluated=True)

    def keys(self) -> tuple[str, ...] | None:
        """Return what names each sample in tables of labels; None if only its index does."""
        return None

    def save(self, name: str, folder: Path) -> None:  # noqa: B027  # Most have nothing to write.
        """Write what a resumed run needs to find the same samples, under a name in its folder."""

    @abc.abstractmethod
    def blank(self) -> Tensor:
        """Return zeros with the shape (1, channels, ...) and the dtype of the ``x`` of a sample."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of the whole data set and of its labels, in hexadecimal."""

    @abc.abstractmethod
    def open(self) -> "DeviceImages | LoadedBatches":
        """Return what reads the batches. It holds what costs memory or time, such as processes."""

    @abc.abstractmethod
    def show(self, sample: int) -> Any:
        """Return a sample as ``labels.sample_view`` can show it; a text if it cannot be read."""


def evaluation_batch(device: str) -> int:
    """Return how many small images to evaluate at once; both numbers divide CIFAR's test set."""
    return 2000 if device.startswith("cuda") else 500  # On a CPU, they should stay in the cache.


class EpochLoader:
    """Batches ``(index, (x, y))`` of a source on its device.

    ``index`` is int64 of shape (B,), and ``x`` and ``y`` are a batch; images are float32 of shape
    (B, channels, height, width), channels last.

    Args:
        source: The samples.
        sampler: Chooses the samples of each iteration, which is one epoch; None for all samples in
            their order, as an evaluation reads them.
        batch_size: The number of samples of each batch but the last; by default, that of
            evaluations.
        drop_last: Whether to drop an incomplete last batch.

    Attributes:
        broken: What takes note of files that cannot be read; None if the samples are not files.
    """

    def __init__(
        self,
        source: Source,
        sampler: PruningSampler | None = None,
        batch_size: int | None = None,
        *,
        drop_last: bool = False,
    ) -> None:
        self._reader = source.open()
        self._sampler = sampler
        self._all = torch.arange(len(source))
        self._batch_size = batch_size or source.evaluation_batch
        self._drop_last = drop_last
        self.broken = self._reader.broken

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        samples = len(self._all if self._sampler is None else self._sampler)
        whole, rest = divmod(samples, self._batch_size)
        return whole if self._drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[tuple[Tensor, Batch]]:
        if self._sampler is None:
            return self._reader.batches(self._all, 0, self._batch_size)
        order = self._sampler.order()  # After a resume, the rest of it.
        if self._drop_last:
            order = order[: len(order) - len(order) % self._batch_size]
        return self._reader.batches(order, self._sampler.epoch, self._batch_size)
