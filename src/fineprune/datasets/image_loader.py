"""ImageLoader: batches of image files, which processes prepare while the previous one trains.

Pixels go to the device as bytes and are normalised there. The copy of the next batch is started
before the current batch is handed out.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from fineprune.datasets.augment import Normalise
from fineprune.datasets.broken_files import BrokenFiles
from fineprune.datasets.image_files import (
    Batch,
    ImageFiles,
    collate_leaving_out,
    collate_replacing,
)
from fineprune.datasets.loader_process import TrainingLoader

# The mean and the standard deviation of the channels of ImageNet's training images, scaled to 0..1,
# with which published networks are trained.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Labelled = tuple[Tensor, Tensor]


class ToDevice:
    """Moves batches of bytes to the device and normalises them there, and notes broken files."""

    def __init__(self, size: int, device: str, broken: BrokenFiles) -> None:
        self._broken = broken
        self._device = torch.device(device)
        self._normalise = Normalise(IMAGENET_MEAN, IMAGENET_STD, size, self._device)
        cuda = self._device.type == "cuda"
        # Copies in a stream of their own run while the device computes.
        self._stream = torch.cuda.Stream(self._device) if cuda else None

    def __call__(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Labelled]]:
        """Yield each batch with its ``(x, y)`` on the device, and start the copy of the next one.

        ``x`` is float32 of shape (B, 3, size, size) in the channels-last memory format, and ``y``
        is int64 of shape (B,).
        """
        started = ((batch, self._start(batch)) for batch in batches)
        current = next(started, None)
        while current is not None:
            following = next(started, None)
            yield current[0], self._finish(*current[1])
            current = following

    def _start(self, batch: Batch) -> tuple[Labelled, Any]:
        self._broken.add(batch)
        assert batch.images is not None
        if self._stream is None:
            return (batch.images.to(self._device), batch.labels.to(self._device)), None
        with torch.cuda.stream(self._stream):
            copied = tuple(
                part.to(self._device, non_blocking=True) for part in (batch.images, batch.labels)
            )
            return (copied[0], copied[1]), self._stream.record_event()

    def _finish(self, copied: Labelled, done: Any) -> Labelled:
        if done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(done)
            for part in copied:
                # Otherwise, its memory could be reused while this stream still reads it.
                part.record_stream(stream)
        return self._normalise(copied[0].permute(0, 2, 3, 1)).permute(0, 3, 1, 2), copied[1]


class ImageLoader:
    """Yields ``(index, (x, y))`` for the keys ``(epoch, index)`` of a sampler.

    With 0 ``workers``, this process loads.

    Attributes:
        broken: Takes note of broken files.
    """

    def __init__(
        self,
        dataset: ImageFiles,
        sampler: Sampler[tuple[int, int]],
        *,
        batch_size: int,
        device: str,
        workers: int,
        broken: BrokenFiles,
        drop_last: bool = False,
    ) -> None:
        self._replaced = 0
        self.broken = broken
        self._to_device = ToDevice(dataset.view.size, device, broken)
        self._loader = TrainingLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=workers,
            pin_memory=device.startswith("cuda"),
            collate_fn=collate_replacing,
            drop_last=drop_last,
            # The keys of each epoch come from this process, so the loader processes can stay.
            persistent_workers=workers > 0,
        )

    def __len__(self) -> int:
        """Return the number of batches in the sampler's epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Labelled]]:
        for batch, moved in self._to_device(self._loader):
            self._replaced += len(batch.broken)
            yield batch.samples, moved

    def take_replaced(self) -> int:
        """Return how many samples of an epoch replaced a broken one since the last call."""
        replaced, self._replaced = self._replaced, 0
        return replaced


class EvaluationImages:
    """Batches ``(x, y)`` of images for evaluation, which can be iterated any number of times.

    Each iteration starts and ends its loader processes, and broken files are left out.
    """

    def __init__(
        self,
        dataset: ImageFiles,
        *,
        batch_size: int,
        device: str,
        workers: int,
        broken: BrokenFiles,
    ) -> None:
        self._to_device = ToDevice(dataset.view.size, device, broken)
        self._loader = TrainingLoader(
            dataset,
            batch_size=batch_size,
            sampler=[(0, i) for i in range(len(dataset))],
            num_workers=workers,
            pin_memory=device.startswith("cuda"),
            collate_fn=collate_leaving_out,
        )

    def __iter__(self) -> Iterator[Labelled]:
        return (moved for _, moved in self._to_device(self._loader))


def image_fetch(
    dataset: ImageFiles, *, device: str, threads: int, broken: BrokenFiles
) -> Callable[[Tensor, int], Labelled]:
    """Return a function that loads any batch in this process, for workers of parameter servers.

    It takes the indices of samples (int64, shape (B,)) and an epoch, and returns the batch
    ``(x, y)``, in which broken files are replaced. With 0 ``threads``, the caller's own decodes.
    """
    to_device = ToDevice(dataset.view.size, device, broken)
    # Reading and decoding release the interpreter's lock.
    load_all: Callable[..., Iterable[Any]] = ThreadPoolExecutor(threads).map if threads else map

    def fetch(index: Tensor, epoch: int) -> Labelled:
        keys = [(epoch, i) for i in index.tolist()]
        items = list(load_all(dataset.__getitem__, keys))
        ((_, moved),) = to_device([collate_replacing(items)])
        return moved

    return fetch
