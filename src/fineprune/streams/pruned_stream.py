"""PrunedStream: the kept samples of a stream, each with its number.

In each worker, the steps are: read a shard, number its samples and check their keys, leave out what
the plan skips, shuffle, leave out what was trained before an interruption, and decode the rest.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from fineprune.errors import InputError, check_whole_number
from fineprune.pruning.indexed import IndexedItem
from fineprune.pruning.pruner import Pruner
from fineprune.pruning.random_streams import stream
from fineprune.pruning.sampler import samples_per_rank
from fineprune.streams.key_index import KeyIndex
from fineprune.streams.shard_assignment import Assignment, Coverage, assignment, coverage
from fineprune.streams.shared_plan import SharedPlan
from fineprune.streams.stream_loader import StreamLoader

_T = TypeVar("_T")

# What ``read`` yields: a key and the sample as it is stored.
_Stored = tuple[str | int, Any]

# Number of places in a shuffle buffer that are drawn at a time, because one by one takes longer.
_DRAWS = 1024


def shuffled(items: Iterable[_T], size: int, rng: np.random.Generator) -> Iterator[_T]:
    """Yield the items in another order, or in the same one if the buffer has the size 0.

    The buffer is filled first. From then on, each new item takes the place of one that is chosen at
    random and yielded.
    """
    if not size:
        yield from items
        return
    buffer: list[_T] = []
    draws: list[int] = []
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
            continue
        if not draws:
            draws = rng.integers(size, size=_DRAWS).tolist()
        place = draws.pop()
        replaced, buffer[place] = buffer[place], item
        yield replaced
    for place in rng.permutation(len(buffer)).tolist():
        yield buffer[place]


class PrunedStream(IterableDataset[tuple[int, Any]]):
    """A stream of shards; each epoch yields the samples that the pruner's plan keeps.

    Iterate over ``loader`` in a loop over ``pruner.epochs()``. Each worker yields items ``(number,
    sample)``, as ``Indexed`` does.

    Args:
        pruner: A pruner of ``len(index)`` samples, with a batch size: ``Pruner(len(index), ...)``.
        index: The samples of each shard.
        read: A function that opens a shard and yields ``(key, raw)`` for each sample in stored
            order, where ``raw`` should be cheap to make, such as undecoded bytes. It runs in the
            workers. Its result is closed when no longer needed, if it has a method ``close``.
        decode: A function that turns ``raw`` into a sample. It is called only for samples that are
            trained. By default, ``raw`` is the sample.
        shuffle_buffer: Number of samples, not yet decoded, among which each worker shuffles. With
            0, the samples of a shard stay in stored order; only the shards are shuffled.

    Raises:
        InputError: There is no index; the pruner is not a ``Pruner``; or it has another number of
            samples or no batch size.
    """

    def __init__(
        self,
        pruner: Pruner,
        index: KeyIndex,
        read: Callable[[str], Iterable[_Stored]],
        *,
        decode: Callable[[Any], Any] | None = None,
        shuffle_buffer: int = 0,
    ) -> None:
        if not isinstance(index, KeyIndex):
            raise InputError(
                f"expected a KeyIndex, got {type(index).__name__}: without one, the number of "
                f"samples is unknown, and losses cannot be assigned to them (hashes of keys "
                f"collide, and samples would share their counts): make one with KeyIndex.scan"
            )
        if not isinstance(pruner, Pruner):
            raise InputError(
                f"expected a Pruner, got {type(pruner).__name__}: a stream deals whole shards to "
                f"the ranks, differently in each epoch"
            )
        if pruner.num_samples != len(index):
            raise InputError(
                f"expected a pruner of the {len(index)} samples in the index, got one of "
                f"{pruner.num_samples}: make Pruner(len(index), ...)"
            )
        if pruner.shape.batch_size is None:
            raise InputError("expected a batch size, got none: make Pruner(..., batch_size=...)")
        check_whole_number("shuffle_buffer", shuffle_buffer, 0)
        pruner.order_settings = {"KeyIndex": index.numbering()}
        self.index = index
        self.shuffle_buffer = shuffle_buffer
        self.shared_plan = SharedPlan(len(index))
        self._pruner: Pruner | None = pruner
        self._read = read
        self._decode = decode
        self._seed = pruner.sampler.seed
        self._rank, self._ranks = pruner.sampler.rank, pruner.sampler.num_replicas
        self._drop_last = pruner.sampler.drop_last

    def __getstate__(self) -> dict[str, Any]:
        """Return what loader processes need, which is everything but the pruner."""
        return {**self.__dict__, "_pruner": None}

    @property
    def pruner(self) -> Pruner:
        """The pruner, which loader processes do not have."""
        assert self._pruner is not None
        return self._pruner

    def loader(self, **options: Any) -> StreamLoader:
        """Return an iterable over the batches ``(index, batch)`` of each epoch.

        Keep it in a variable, so that its workers persist from epoch to epoch.

        Args:
            options: Keyword arguments of ``DataLoader``. The ``num_workers`` processes read and
                decode; batches are made in this process, so that an epoch has exactly
                ``pruner.batches(epoch)`` of them. ``collate_fn`` is as for ``Pruner.loader``.

        Raises:
            InputError: There are fewer shards than workers of all ranks, or an option would undo
                the pruning.
        """
        return StreamLoader(self, **options)

    def coverage(self) -> Coverage:
        """Return how many kept samples unequal shards leave out and repeat on all ranks together.

        This is of the epoch that began last. Batches that ``drop_last`` drops are not counted.
        """
        kept = self._kept_per_shard()
        return coverage(kept, self._order(), self._ranks, self._each(sum(kept)))

    def check_shards(self, num_workers: int) -> None:
        """Raise InputError if there are fewer shards than workers of all ranks."""
        check_whole_number("num_workers", num_workers, 0)
        needed = self._ranks * max(num_workers, 1)
        if len(self.index.shards) < needed:
            raise InputError(
                f"expected at least {needed} shards, one for each worker of each rank "
                f"({self._ranks} x {max(num_workers, 1)}), got {len(self.index.shards)}: use fewer "
                f"workers, or write the samples to more shards"
            )

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        worker = get_worker_info()
        begun = self.shared_plan.current
        number, workers = (0, 0) if worker is None else (worker.id, worker.num_workers)
        if not begun.number or begun.workers != workers:
            raise InputError(
                "expected iteration over PrunedStream.loader(), which knows what the epoch keeps "
                "and what was trained, got another loader: use PrunedStream.loader(), and save the "
                "state of the pruner (a StatefulDataLoader would skip trained samples a second "
                "time)"
            )
        return self._samples(number, max(workers, 1))

    def _samples(self, worker: int, workers: int) -> Iterator[tuple[int, Any]]:
        kept = self._kept_per_shard()
        own = assignment(
            kept,
            self._order(),
            rank=self._rank,
            ranks=self._ranks,
            worker=worker,
            workers=workers,
            each=self._each(sum(kept)),
            trained=self.shared_plan.current.trained,
        )
        done = own.begin
        while done < own.end:
            # A worker that has fewer samples than it has to yield reads its shards again.
            begin = done % own.kept
            stored = self._stored(own, kept, begin)
            if own.kept - begin > own.end - done:
                stored = itertools.islice(stored, own.end - done)
            for index, raw in stored:
                yield IndexedItem((index, self._decoded(index, raw)))
                done += 1

    def _decoded(self, index: int, raw: Any) -> Any:
        try:
            return raw if self._decode is None else self._decode(raw)
        except Exception as error:
            shard = int(np.searchsorted(self.index.firsts, index, "right")) - 1
            place = index - int(self.index.firsts[shard])
            error.add_note(f"in the sample at place {place} of shard {self.index.shards[shard]!r}")
            raise

    def _stored(self, own: Assignment, kept: list[int], begin: int) -> Iterator[tuple[int, Any]]:
        """Yield what a worker reads in one pass over its shards, from the sample ``begin`` on."""
        shards = own.shards
        if not self.shuffle_buffer:
            while begin >= kept[shards[0]]:  # Shards that were trained are not opened.
                begin -= kept[shards[0]]
                shards = shards[1:]
        samples = itertools.chain.from_iterable(map(self._of_shard, shards))
        # Every worker has shards of its own, and with them an order of its own.
        purpose = f"shuffle buffer {own.shards[0]}"
        rng = stream(self._seed, self.shared_plan.current.epoch, purpose)
        return itertools.islice(shuffled(samples, self.shuffle_buffer, rng), begin, None)

    def _of_shard(self, shard: int) -> Iterator[tuple[int, Any]]:
        """Read a shard until its last kept sample, check the keys, and yield what is kept."""
        first, end = self.index.firsts[shard : shard + 2].tolist()
        kept = self.shared_plan.mask[first:end].tobytes()
        last = kept.rindex(1)
        expected = self.index.expected(shard)
        found = self.index.found
        samples: Iterable[_Stored] = ()
        place = -1
        try:
            samples = self._read(self.index.shards[shard])
            for place, (key, raw) in enumerate(samples):
                if place == len(expected) or found(shard, key) != expected[place]:
                    raise self.index.refusal(shard, place, key)
                if kept[place]:
                    yield first + place, raw
                if place == last and place < len(expected) - 1:
                    return
            if place < last:
                raise self.index.refusal(shard, place + 1, None)
        except Exception as error:
            if not isinstance(error, InputError):
                error.add_note(f"in shard {self.index.shards[shard]!r}, after {place + 1} samples")
            raise
        finally:
            close = getattr(samples, "close", None)
            if close is not None:
                close()

    def _kept_per_shard(self) -> list[int]:
        mask, firsts = self.shared_plan.mask, self.index.firsts.tolist()
        return [int(np.count_nonzero(mask[a:b])) for a, b in itertools.pairwise(firsts)]

    def _order(self) -> list[int]:
        """Return all shards in the order of the epoch."""
        rng = stream(self._seed, self.shared_plan.current.epoch, "shards")
        order: list[int] = rng.permutation(len(self.index.shards)).tolist()
        return order

    def _each(self, kept: int) -> int:
        """Return how many samples each rank trains in an epoch that keeps ``kept``."""
        return samples_per_rank(kept, self._ranks, self._drop_last)
