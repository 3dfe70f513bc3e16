"""PruningSampler: turns the plan of an epoch into the indices of this rank, in a seeded order."""

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DistributedSampler

from fineprune.pruning.plan import EpochPlan

# Number of indices that are converted to Python integers at a time, so that no long list is needed.
_CHUNK = 4096


class PruningSampler(DistributedSampler[Any]):
    """Yields the samples of a plan; if nothing is skipped, exactly as ``DistributedSampler`` does.

    Trainers call ``set_epoch`` on that type and do not replace it. A ``Pruner`` makes it.

    Args:
        dataset: The data set, of which only the length is used.
        num_replicas, rank, seed, drop_last: As in ``DistributedSampler``.
        choose_epoch: Function that ``set_epoch`` calls with its argument.
        note_read: Function that is called when the order of the current epoch is asked for.

    Attributes:
        named: Whether an epoch was set, so that the state of a loader names none.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_replicas: int,
        rank: int,
        seed: int,
        drop_last: bool,
        choose_epoch: Callable[[int], None],
        note_read: Callable[[], None],
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed, drop_last=drop_last)
        self._choose_epoch = choose_epoch
        self._note_read = note_read
        self.named = False
        # ``Pruner`` calls ``follow``, which sets these, before anything else is called.
        self._plan: EpochPlan
        self._start: int
        self._chunk: Iterator[int]
        self._chunk_end: int

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the ``Pruner``. This may be called any number of times, in any order."""
        self._choose_epoch(epoch)

    def follow(self, plan: EpochPlan, start: int = 0) -> None:
        """Yield the samples of ``plan`` from now on. Only ``Pruner`` calls this method.

        ``start`` is how many samples in the order of all ranks together were trained already.
        """
        self._plan = plan
        self.epoch = plan.epoch
        self.num_samples = samples_per_rank(plan.number, self.num_replicas, self.drop_last)
        self.total_size = self.num_samples * self.num_replicas
        self._start = start
        self._chunk, self._chunk_end = iter(()), 0

    def order(self) -> torch.Tensor:
        """Return the indices that this rank trains in the epoch: int64, on the CPU.

        In a resumed epoch, these are the remaining ones at that point. Recording batches does not
        shorten the result.
        """
        self._note_read()
        order = self._shuffled()[self._start :]
        # After the number of ranks has changed, the rest may not divide: repeat a few samples.
        rest = -(-len(order) // self.num_replicas) * self.num_replicas
        return _fitted(order, rest)[self.rank :: self.num_replicas]

    def before_start(self) -> npt.NDArray[np.int64]:
        """Return the samples of all ranks that precede the first one after a resume."""
        if not self._start:
            return np.zeros(0, dtype=np.int64)
        return self._shuffled()[: self._start].numpy()

    def _shuffled(self) -> torch.Tensor:
        """Return the kept samples, and padding, in the order of all ranks together."""
        shuffle = torch.Generator()
        shuffle.manual_seed(self.seed + self.epoch)
        kept = self._plan.kept
        order = torch.randperm(len(kept), generator=shuffle, device="cpu")
        if kept[-1] >= len(kept):  # Otherwise, the kept samples are 0, 1, ... themselves.
            order = kept.index_select(0, order)
        return _fitted(order, self.total_size)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._chunks())

    def __len__(self) -> int:
        """Return the number of indices of this rank in the whole epoch, even after a resume."""
        return self.num_samples

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and how many indices this rank has yielded (``StatefulDataLoader``)."""
        # Counting what is left of the chunk is faster than counting every index that is yielded.
        yielded = self._chunk_end - operator.length_hint(self._chunk)
        return {"epoch": self.epoch, "yielded": self._start // self.num_replicas + yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a state, if it belongs to the current epoch or no epoch was set."""
        if not self.named:
            self.set_epoch(state["epoch"])
        if state["epoch"] == self.epoch:
            self.follow(self._plan, state["yielded"] * self.num_replicas)

    def _chunks(self) -> Iterator[Iterator[int]]:
        order = self.order()
        for begin in range(0, len(order), _CHUNK):
            indices = order[begin : begin + _CHUNK].tolist()
            self._chunk, self._chunk_end = iter(indices), begin + len(indices)
            yield self._chunk


def samples_per_rank(number: int, num_replicas: int, drop_last: bool) -> int:
    """Return how many of ``number`` samples each rank gets, as in ``DistributedSampler``."""
    return number // num_replicas if drop_last else -(-number // num_replicas)


def _fitted(order: torch.Tensor, length: int) -> torch.Tensor:
    if length <= len(order):
        return order[:length]
    return order[torch.from_numpy(np.arange(length) % len(order))]
