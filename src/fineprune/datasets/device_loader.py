"""DeviceLoader: a whole image set on the device, and batches made there without waiting.

An image set that fits into memory needs no loader processes: the bytes go to the device once, and
a batch is one gather of bytes, one conversion and one normalisation. Nothing in an epoch waits for
the device: the indices of the whole epoch go there at its start.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from fineprune.datasets.augment import Augment, Canvas, Draws, Normalise, draw
from fineprune.datasets.image_set import ImageSet
from fineprune.errors import InputError


class EpochSampler(Protocol):
    """What a DeviceLoader asks of a sampler.

    One that also has ``order() -> int64 tensor of shape (n,)`` is asked for that instead of being
    iterated: it is the same indices, faster.
    """

    epoch: int

    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int: ...


class DeviceImages:
    """A whole image set on the device, and any batch of it, augmented and normalised.

    Args and errors: as those of ``DeviceLoader``, which makes one.
    """

    def __init__(
        self,
        data: ImageSet,
        *,
        seed: int,
        device: str | torch.device,
        augment: Augment,
        mean: Sequence[float],
        std: Sequence[float],
        channels_last: bool = True,
    ) -> None:
        _check(data, 1, mean)
        self.device = torch.device(device)
        self._seed = seed
        self._samples = len(data)
        self._channels_last = channels_last
        self._canvas = Canvas(data.images, augment, self.device)
        self._normalise = Normalise(mean, std, data.images.shape[3], self.device)
        self._labels = data.labels.to(self.device)
        self._drawn: tuple[int, Draws] | None = None

    def __len__(self) -> int:
        return self._samples

    def upload(self, index: Tensor, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return index, windows and labels of samples on the device, int64 of shape (n,) each.

        Args:
            index: which samples, int64, shape (n,), on the CPU.
            epoch: whose crops and flips they get.
        """
        if self._drawn is None or self._drawn[0] != epoch:
            augment = self._canvas.augment
            drawn = draw(augment, seed=self._seed, epoch=epoch, samples=self._samples)
            self._drawn = (epoch, drawn)
        # No copy waits: the driver takes pageable memory over before it returns.
        starts = self._canvas.starts(index, self._drawn[1]).to(self.device, non_blocking=True)
        index = index.to(self.device, non_blocking=True)
        return index, starts, self._labels.index_select(0, index)

    def images(self, starts: Tensor) -> Tensor:
        """Return the windows as float32 of shape (n, channels, height, width), normalised."""
        return _to_nchw(self._normalise(self._canvas.cut(starts)), self._channels_last)

    def fetch(self, index: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return one batch ``(x, y)`` of these samples, as ``epoch`` augments them."""
        _, starts, labels = self.upload(index, epoch)
        return self.images(starts), labels


class DeviceLoader:
    """Batches ``(index, (x, y))`` of an image set, augmented and normalised on the device.

    ``index`` is int64 of shape (B,), ``x`` float32 of shape (B, channels, height, width), ``y``
    int64 of shape (B,), all on the device. Each iteration is one epoch, in the sampler's order and
    with the draws of ``sampler.epoch``; call the sampler's ``set_epoch`` before it.

    Args:
        data: the training images; a copy of them goes to the device (``Canvas`` says how large).
        batch_size: samples in a batch; the last may be smaller.
        sampler: gives the order and the epoch; a ``Pruner``'s sampler, or a
            ``DistributedSampler``.
        seed: the run's seed; augmentation depends on it, the epoch and a sample's index only.
        device: where batches are made.
        augment: random crop and flip.
        mean: one float a channel over values scaled to 0..1, as ``channel_statistics`` gives.
        std: likewise.
        drop_last: leave out a last batch that is not whole.
        channels_last: lay ``x`` out with a pixel's channels together, which convolutions on
            most devices prefer; the shape is the same either way.

    Raises:
        InputError: a batch size below 1, an empty set, a sampler without ``epoch``, or ``mean``
            and ``std`` that do not fit the images.
    """

    def __init__(
        self,
        data: ImageSet,
        batch_size: int,
        *,
        sampler: EpochSampler,
        seed: int,
        device: str | torch.device = "cpu",
        augment: Augment = Augment(),  # noqa: B008  (frozen, so one for all calls is safe)
        mean: Sequence[float],
        std: Sequence[float],
        drop_last: bool = False,
        channels_last: bool = True,
    ) -> None:
        _check(data, batch_size, mean)
        if not hasattr(sampler, "epoch"):
            raise InputError(
                f"expected a sampler with an epoch, got {type(sampler).__name__}: use "
                "pruner.sampler or a DistributedSampler"
            )
        self.batch_size = batch_size
        self.sampler = sampler
        self.drop_last = drop_last
        self._images = DeviceImages(
            data,
            seed=seed,
            device=device,
            augment=augment,
            mean=mean,
            std=std,
            channels_last=channels_last,
        )

    def __len__(self) -> int:
        """Return the number of batches in the sampler's epoch."""
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        order = self._order()
        order, starts, labels = self._images.upload(order, self.sampler.epoch)
        last = len(order) - len(order) % self.batch_size if self.drop_last else len(order)
        for first in range(0, last, self.batch_size):
            # Slices are views of the epoch's tensors: no batch copies its index or its labels.
            batch = slice(first, first + self.batch_size)
            yield order[batch], (self._images.images(starts[batch]), labels[batch])

    def _order(self) -> Tensor:
        order_of = getattr(self.sampler, "order", None)
        if order_of is None:
            order = torch.tensor(list(self.sampler), dtype=torch.int64)
        else:
            order = cast(Tensor, order_of())
        if len(order) and not (int(order.min()) >= 0 and int(order.max()) < len(self._images)):
            raise InputError(
                f"expected indices 0..{len(self._images) - 1} from the sampler, got "
                f"{int(order.min())}..{int(order.max())}: make the sampler for this data set"
            )
        return order


def evaluation_batches(
    data: ImageSet,
    batch_size: int,
    device: str | torch.device,
    mean: Sequence[float],
    std: Sequence[float],
    channels_last: bool = True,
) -> Iterable[tuple[Tensor, Tensor]]:
    """Prepare all of ``data`` for evaluation: in order, normalised, not augmented.

    The bytes go to the device once, at this call; the result can be iterated again and again, so
    keep it for the whole run.

    Args:
        data: the images to evaluate.
        batch_size: samples in a batch; the last may be smaller. Large batches are faster.
        device: where batches are made.
        mean: the training images' mean, one float a channel over values scaled to 0..1.
        std: likewise.
        channels_last: as for ``DeviceLoader``.

    Returns:
        Batches ``(x, y)``: float32 of shape (B, channels, height, width) and int64 of shape (B,).

    Raises:
        InputError: a batch size below 1, an empty set, or ``mean`` and ``std`` that do not fit.
    """
    _check(data, batch_size, mean)
    return _EvaluationBatches(data, batch_size, torch.device(device), mean, std, channels_last)


class _EvaluationBatches:
    def __init__(
        self,
        data: ImageSet,
        batch_size: int,
        device: torch.device,
        mean: Sequence[float],
        std: Sequence[float],
        channels_last: bool,
    ) -> None:
        self._batch_size = batch_size
        self._channels_last = channels_last
        self._pixels = data.images.to(device).permute(0, 2, 3, 1).contiguous()
        self._labels = data.labels.to(device)
        self._normalise = Normalise(mean, std, data.images.shape[3], device)

    def __len__(self) -> int:
        return -(-len(self._labels) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, len(self._labels), self._batch_size):
            batch = slice(first, first + self._batch_size)
            x = _to_nchw(self._normalise(self._pixels[batch]), self._channels_last)
            yield x, self._labels[batch]


def _to_nchw(pixels: Tensor, channels_last: bool) -> Tensor:
    x = pixels.permute(0, 3, 1, 2)
    return x if channels_last else x.contiguous()


def _check(data: ImageSet, batch_size: int, mean: Sequence[float]) -> None:
    if batch_size < 1:
        raise InputError(f"expected a batch_size of at least 1, got {batch_size}: 128 is usual")
    if not len(data):
        raise InputError("expected at least one image, got an empty set: leave it out")
    channels = data.images.shape[1]
    if len(mean) != channels:
        raise InputError(
            f"expected a mean and a std for each of {channels} channels, got {len(mean)}: "
            "channel_statistics gives both from the training images"
        )
