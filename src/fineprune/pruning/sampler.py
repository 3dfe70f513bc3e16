"""PruningSampler: an epoch's plan becomes this rank's indices, in a seeded order."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from fineprune.pruning.plan import EpochPlan

# Indices turned into Python integers at once, so that an epoch of any length needs no long list.
_CHUNK = 4096


class PruningSampler(DistributedSampler[Any]):
    """Yields the plan's samples; with nothing skipped, exactly as ``DistributedSampler`` does.

    A ``DistributedSampler`` by type, because trainers call ``set_epoch`` on that type and leave
    it in place. Made by ``Pruner``.

    Args:
        dataset: the data set, for its length.
        num_replicas, rank, seed, drop_last: as in ``DistributedSampler``.
        choose_epoch: called with each epoch that ``set_epoch`` gets.
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
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed, drop_last=drop_last)
        self._choose_epoch = choose_epoch
        self._plan = EpochPlan(0, torch.empty(0, dtype=torch.int64))
        self._start = 0
        self._yielded = 0
        self._epoch_was_set = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, through the ``Pruner``; any number of times, in any order."""
        self._epoch_was_set = True
        self._choose_epoch(epoch)

    def follow(self, plan: EpochPlan, start: int = 0) -> None:
        """Take up a plan, from the global position ``start`` in its order on (``Pruner`` calls)."""
        self._plan = plan
        self.epoch = plan.epoch
        self.num_samples = samples_per_rank(len(plan.kept), self.num_replicas, self.drop_last)
        self.total_size = self.num_samples * self.num_replicas
        self._start = start
        self._yielded = 0

    def order(self) -> torch.Tensor:
        """Return this rank's indices still to come in the epoch: int64, on the CPU."""
        shuffle = torch.Generator()
        shuffle.manual_seed(self.seed + self.epoch)
        kept = self._plan.kept
        order = torch.randperm(len(kept), generator=shuffle)
        if len(kept) < len(self.dataset):  # type: ignore[arg-type]  # a full plan is 0..N-1 itself
            order = kept[order]
        order = _fitted(order, self.total_size)[self._start :]
        # After a resume on another number of ranks the rest may not divide: repeat a few.
        rest = -(-len(order) // self.num_replicas) * self.num_replicas
        return _fitted(order, rest)[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        order = self.order()
        self._yielded = 0
        for begin in range(0, len(order), _CHUNK):
            for index in order[begin : begin + _CHUNK].tolist():
                self._yielded += 1
                yield index

    def __len__(self) -> int:
        """Return this rank's number of indices in the whole epoch, also after a resume."""
        return self.num_samples

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and this rank's indices handed out in it (``StatefulDataLoader``)."""
        return {"epoch": self.epoch, "yielded": self._start // self.num_replicas + self._yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a state stopped, if it is of the epoch that was set."""
        if not self._epoch_was_set:
            self.set_epoch(state["epoch"])
        if state["epoch"] == self.epoch:
            self._start = state["yielded"] * self.num_replicas


def samples_per_rank(number: int, num_replicas: int, drop_last: bool) -> int:
    """Return how many of ``number`` samples each rank gets, as ``DistributedSampler`` counts."""
    return number // num_replicas if drop_last else -(-number // num_replicas)


def _fitted(order: torch.Tensor, length: int) -> torch.Tensor:
    if length <= len(order):
        return order[:length]
    return order[torch.arange(length) % len(order)]
