"""StreamLoader: makes exactly as many batches of a pruned stream as the pruner expects."""

import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, default_collate

from fineprune.errors import warn_user
from fineprune.pruning.indexed import IndexedCollate
from fineprune.pruning.loader import check_options
from fineprune.pruning.random_streams import stream

if TYPE_CHECKING:  # It imports this module.
    from fineprune.streams.pruned_stream import PrunedStream

# What ``DataLoader`` takes but a pruned stream must not change, and why.
_REFUSED = {
    "shuffle": "the stream shuffles its shards, and its samples with shuffle_buffer",
    "sampler": "the pruner chooses the samples",
    "batch_sampler": "the pruner chooses the samples",
    "batch_size": "it is that of the pruner",
    "drop_last": "it is that of the pruner",
    "pin_memory": "batches are made in this process: pin their tensors in collate_fn",
}

# The share of an epoch's samples that may be left out without a warning.
_MOST_MISSED = 0.05


class StreamLoader:
    """An iterable over the batches of the pruner's current epoch; ``PrunedStream.loader`` makes it.

    After a state of the pruner was loaded within an epoch, it yields the rest of this epoch, if the
    numbers of workers and ranks are the same. The arguments are those of ``PrunedStream.loader``.
    """

    def __init__(
        self,
        stream: "PrunedStream",
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        check_options(options, _REFUSED)
        stream.check_shards(num_workers)
        if not isinstance(collate_fn, IndexedCollate):
            collate_fn = IndexedCollate(collate_fn or default_collate)
        self._stream = stream
        self._collate = collate_fn
        self._num_workers = num_workers
        self._warned = False
        # Without a generator, each pass would draw from the user's random numbers.
        self._generator = torch.Generator()
        defaults: dict[str, Any] = {"generator": self._generator}
        if num_workers:
            # Workers send single samples. All of them together prepare two batches in advance.
            ahead = math.ceil(2 * (stream.pruner.shape.batch_size or 1) / num_workers)
            defaults |= {"persistent_workers": True, "prefetch_factor": ahead}
        self._samples: DataLoader[Any] = DataLoader(
            stream,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=packed if num_workers else _unchanged,
            **{**defaults, **options},
        )

    def __len__(self) -> int:
        """Return the number of batches of the whole current epoch, even after a resume."""
        pruner = self._stream.pruner
        return pruner.batches(pruner.plan.epoch)

    def __iter__(self) -> Iterator[Any]:
        """Begin or continue the pruner's current epoch, after the batches that were recorded."""
        pruner = self._stream.pruner
        plan, position = pruner.plan, pruner.position
        trained = position.samples if position.epoch == plan.epoch else 0
        this = self._stream.shared_plan.publish(plan.epoch, plan.kept, trained, self._num_workers)
        # Random numbers that decoding draws differ between epochs, ranks and workers.
        sampler = pruner.sampler
        pruner.order_settings |= {
            "num_workers": self._num_workers,
            "num_replicas": sampler.num_replicas,
            "shuffle_buffer": self._stream.shuffle_buffer,
        }
        chance = stream(sampler.seed, plan.epoch, f"decode on rank {sampler.rank}")
        self._generator.manual_seed(int(chance.integers(2**63)))
        self._warn_of_missed(plan.epoch, plan.number, sampler.num_replicas)
        return self._batches(this, iter(self._samples))

    def _warn_of_missed(self, epoch: int, kept: int, ranks: int) -> None:
        missed = 0 if self._warned or ranks == 1 else self._stream.coverage().missed
        if missed > _MOST_MISSED * kept:
            self._warned = True
            warn_user(
                f"no rank trains {missed} of the {kept} samples that epoch {epoch} keeps, since "
                f"the ranks have unequal shards: write shards of equal size, and make their number "
                f"a multiple of the {ranks} ranks or much larger"
            )

    def _batches(self, this: int, samples: Iterator[Any]) -> Iterator[Any]:
        shape = self._stream.pruner.shape
        batch: list[Any] = []
        for sample in samples:
            if self._stream.shared_plan.current.number != this:
                raise RuntimeError(
                    "expected one iteration over the stream at a time, but another one has begun"
                )
            batch.append(pickle.loads(sample) if self._num_workers else sample)
            if len(batch) == shape.batch_size:
                yield self._collate(batch)
                batch = []
        if batch and not shape.drop_last:
            yield self._collate(batch)


class _Pickler(pickle.Pickler):
    """Pickles the usual tensors as NumPy arrays, since that of torch takes much longer."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        try:
            return torch.from_numpy, (value.numpy(),)
        except (TypeError, RuntimeError):  # NumPy has no bfloat16 and no sparse arrays.
            return NotImplemented


def packed(sample: Any) -> bytes:
    """Return a sample, which can be pickled, as the bytes that a loader process sends.

    Torch sends each tensor in a file of its own, which is slow for single samples, a thousand of
    which exceed the usual limit of open files.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(sample)
    return file.getvalue()


def _unchanged(sample: Any) -> Any:
    """Return a sample as it is. ``DataLoader`` would otherwise turn its index into a list."""
    return sample
