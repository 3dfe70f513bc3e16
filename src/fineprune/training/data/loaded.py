"""LoadedBatches: batches that loader processes prepare while the device computes.

For samples that do not lie on the device: image files and user-defined data. The copy of the next
batch to the device is started before the current batch is handed out.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fineprune.datasets.broken_files import Broken, BrokenFiles
from fineprune.datasets.loader_process import TrainingLoader
from fineprune.training.data.source import Batch

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
    broken: list[Broken]


class LoadedSource(Protocol):
    """What loader processes read."""

    @property
    def workers(self) -> int:
        """The number of loader processes; 0 to read in this process."""

    @property
    def device(self) -> str:
        """Where batches go."""

    @property
    def evaluated(self) -> bool:
        """Whether the samples are for evaluation, so that no loader process is kept after it."""

    @property
    def in_threads(self) -> bool:
        """Whether several threads may read samples at once."""

    def __getitems__(self, keys: Keys, map_all: Any = map) -> Loaded:
        """Read the samples with these keys ``(epoch, index)``. It may run in another process.

        If ``in_threads``, ``map_all`` maps in several threads what reads a sample.
        """

    def on_device(self) -> Callable[[Tensor], Tensor]:
        """Return a function that makes the ``x`` of a batch from the one on the device."""

    def broken_files(self) -> BrokenFiles | None:
        """Return what takes note of broken files; None if the samples are not files."""


class LoadedBatches:
    """Reads batches of a source in loader processes, as a ``Reader``."""

    def __init__(self, source: LoadedSource) -> None:
        self.broken = source.broken_files()
        self._source = source
        self._finish = source.on_device()
        self._device = torch.device(source.device)
        cuda = self._device.type == "cuda"
        # Copies in a stream of their own run while the device computes.
        self._stream = torch.cuda.Stream(self._device) if cuda else None
        # The keys of the batches to read, where the loader looks for them in each epoch.
        self._wanted: list[Keys] = []
        self._loader: TrainingLoader | None = None
        self._threads: ThreadPoolExecutor | None = None

    def batches(self, order: Tensor, epoch: int, size: int) -> Iterator[tuple[Tensor, Batch]]:
        """Yield ``(index, (x, y))``; see ``Reader``. Broken files are noted."""
        parts = order.split(size) if len(order) else ()
        started = ((loaded, self._start(loaded)) for loaded in self._read(parts, epoch))
        current = next(started, None)
        while current is not None:
            following = next(started, None)
            loaded, copied = current
            if self.broken is not None:
                self.broken.replaced += len(loaded.broken)
            yield loaded.samples, self._arrived(*copied)
            current = following

    def batch(self, index: Tensor, epoch: int) -> Batch:
        """Return the batch of these samples, which the workers load together.

        For workers of parameter servers. With no loader processes, this thread loads.
        """
        workers = self._source.workers
        if self._source.in_threads and workers:
            self._threads = self._threads or ThreadPoolExecutor(workers)
            (keys,) = _keys([index], epoch)
            loaded = [self._source.__getitems__(keys, self._threads.map)]
        else:
            parts = index.split(-(-len(index) // max(1, workers)))
            loaded = list(self._read(parts, epoch, "forkserver"))
        copies = [self._arrived(*self._start(part)) for part in loaded]
        x, y = (torch.cat(halves) for halves in zip(*copies, strict=True))
        return x, y

    def _read(
        self, parts: Iterable[Tensor], epoch: int, start_method: str | None = None
    ) -> Iterator[Loaded]:
        """Read batches here or in loader processes.

        A process of Ray has threads. If it were forked, a lock that one of them held would never be
        released, so the loader processes of a worker of parameter servers come from a fork server.
        """
        self._wanted[:] = _keys(parts, epoch)
        if not self._source.workers or not self._wanted:
            return map(self._source.__getitems__, self._wanted.copy())
        if self._loader is None:
            known = multiprocessing.get_all_start_methods()
            self._loader = TrainingLoader(
                self._source,
                self._wanted,
                num_workers=self._source.workers,
                start_method=start_method if start_method in known else None,
                pin_memory=self._stream is not None,
                # The keys of each epoch come from this process, so the processes can stay.
                persistent_workers=not self._source.evaluated,
            )
        return iter(self._loader)

    def _start(self, loaded: Loaded) -> tuple[Batch, Any]:
        if self.broken is not None:
            self.broken.add(loaded.broken, of_all=loaded.x is None)
        assert loaded.x is not None
        if self._stream is None:
            return (loaded.x.to(self._device), loaded.y.to(self._device)), None
        with torch.cuda.stream(self._stream):
            x = loaded.x.to(self._device, non_blocking=True)
            y = loaded.y.to(self._device, non_blocking=True)
            return (x, y), self._stream.record_event()

    def _arrived(self, copied: Batch, done: Any) -> Batch:
        if done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(done)
            for part in copied:
                # Otherwise, its memory could be reused while this stream still reads it.
                part.record_stream(stream)
        return self._finish(copied[0]), copied[1]


def _keys(parts: Iterable[Tensor], epoch: int) -> list[Keys]:
    return [[(epoch, i) for i in part.tolist()] for part in parts]
