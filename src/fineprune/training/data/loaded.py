"""LoadedBatches: batches that loader processes prepare while the device computes.

For samples that do not lie on the device: image files and user-defined data.
"""

import abc
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fineprune.datasets.broken_files import Broken, BrokenFiles
from fineprune.datasets.loader_process import TrainingLoader
from fineprune.training.data.source import Batch, Source

Keys = Sequence[tuple[int, int]]


class Loaded(NamedTuple):
    """A batch on the CPU.

    Attributes:
        samples: The index of each sample; int64, shape (B,).
        x: The inputs, shape (B, ...); None if all files of the batch are broken.
        y: The labels, shape (B,), or the probabilities of the classes, shape (B, C).
        broken: The files that could not be used.
    """

    samples: Tensor
    x: Tensor | None
    y: Tensor
    broken: Sequence[Broken] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedSource(Source):
    """A ``Source`` whose batches are read one by one, perhaps in loader processes."""

    def open(self) -> "LoadedBatches":
        """Return what reads the batches."""
        return LoadedBatches(self)

    @abc.abstractmethod
    def __getitems__(self, keys: Keys) -> Loaded:
        """Read the samples with these keys ``(epoch, index)``. It may run in another process."""

    def on_device(self) -> Callable[[Tensor], Tensor]:
        """Return a function that makes the ``x`` of a batch from the one on the device."""
        return lambda x: x

    def broken_files(self) -> BrokenFiles | None:
        """Return what takes note of broken files; None if the samples are not files."""
        return None


class LoadedBatches:
    """Reads the batches of a source.

    Attributes:
        broken: What takes note of files that cannot be read; None if the samples are not files.
    """

    def __init__(self, source: LoadedSource) -> None:
        self.broken = source.broken_files()
        self._source = source
        self._finish = source.on_device()
        # The keys of the batches to read, where the loader looks for them in each epoch.
        self._wanted: list[Keys] = []
        self._loader: TrainingLoader | None = None

    def batches(self, order: Tensor, epoch: int, size: int) -> Iterator[tuple[Tensor, Batch]]:
        """Yield ``(index, (x, y))`` on the device, and note broken files.

        Args:
            order: The indices of the samples; int64, shape (n,), on the CPU.
            epoch: The epoch, from 0.
            size: The number of samples of each batch but the last.
        """
        for loaded in self._read(order.split(size) if len(order) else (), epoch):
            yield loaded.samples, self._on_device(loaded)

    def batch(self, index: Tensor, epoch: int) -> Batch:
        """Return the batch of these samples (int64, shape (B,)), which all processes load together.

        For workers of parameter servers. Such a process has threads. If it were forked, a lock that
        one of them held would never be released, so its loader processes come from a fork server.
        """
        parts = index.split(-(-len(index) // max(1, self._source.workers)))
        arrived = [self._on_device(loaded) for loaded in self._read(parts, epoch, "forkserver")]
        return torch.cat([x for x, _ in arrived]), torch.cat([y for _, y in arrived])

    def _read(
        self, parts: Iterable[Tensor], epoch: int, start_method: str | None = None
    ) -> Iterator[Loaded]:
        """Read batches here or in loader processes."""
        self._wanted[:] = [[(epoch, sample) for sample in part.tolist()] for part in parts]
        if not self._source.workers or not self._wanted:
            return map(self._source.__getitems__, self._wanted.copy())
        if self._loader is None:
            known = multiprocessing.get_all_start_methods()
            self._loader = TrainingLoader(
                self._source,
                self._wanted,
                num_workers=self._source.workers,
                start_method=start_method if start_method in known else None,
                pin_memory=self._source.device.startswith("cuda"),
                # The keys of each epoch come from this process, so the processes can stay.
                persistent_workers=not self._source.evaluated,
            )
        return iter(self._loader)

    def _on_device(self, loaded: Loaded) -> Batch:
        if self.broken is not None:
            self.broken.add(loaded.broken, of_all=loaded.x is None)
            self.broken.replaced += len(loaded.broken)
        assert loaded.x is not None
        device = self._source.device
        x = loaded.x.to(device, non_blocking=True)
        return self._finish(x), loaded.y.to(device, non_blocking=True)
