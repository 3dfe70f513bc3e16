"""ShardedSampler: yields the samples of a rank's share, in chunks and without an array of all."""

import itertools
import operator
from collections.abc import Callable, Iterator

from torch.utils.data import Sampler

from fineprune.pruning.epoch_cycle import EpochCycle
from fineprune.pruning.sharded.share import Indices, Share

# Number of indices that are computed and converted to Python integers at a time.
_CHUNK = 4096


class ShardedSampler(Sampler[int]):
    """Yields the samples that this rank trains, in a seeded order that changes in each epoch.

    ``ShardedPruner`` creates it.

    Args:
        cycle: The state of the current epoch, in which the sampler notes that it was read.
        choose_epoch: Function that ``set_epoch`` calls with its argument.
        num_replicas: Number of ranks.
    """

    def __init__(
        self, cycle: EpochCycle[Share], choose_epoch: Callable[[int], None], num_replicas: int
    ) -> None:
        self._cycle = cycle
        self._num_replicas = num_replicas
        self._choose_epoch = choose_epoch
        self._share: Share  # ``ShardedPruner`` calls ``follow`` before anything else is called.
        self._start = 0
        self._chunk: Iterator[int] = iter(())
        self._chunk_end = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the ``ShardedPruner``. Every rank must call it."""
        self._choose_epoch(epoch)

    def follow(self, share: Share, start: int = 0) -> None:
        """Yield the samples of ``share`` from now on. Only ``ShardedPruner`` calls this method."""
        self._share = share
        self._start = start
        self._chunk, self._chunk_end = iter(()), start

    def leading(self, number: int) -> Indices:
        """Return the first samples that this rank has yet to train, at most ``number`` of them."""
        return self._share.indices(self._start, min(self._start + number, len(self)))

    @property
    def start(self) -> int:
        """How many samples of all ranks precede its first one in the epoch."""
        return self._start * self._num_replicas

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._chunks())

    def __len__(self) -> int:
        """Return the number of indices of this rank in the whole epoch, even after a resume."""
        return self._share.number

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and how many indices this rank has yielded (``StatefulDataLoader``)."""
        yielded = self._chunk_end - operator.length_hint(self._chunk)
        return {"epoch": self._share.epoch, "yielded": yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a state, if it belongs to the current epoch."""
        if state["epoch"] == self._share.epoch:
            self.follow(self._share, state["yielded"])

    def _chunks(self) -> Iterator[Iterator[int]]:
        self._cycle.read_sampler()
        share, length = self._share, len(self)
        for begin in range(self._start, length, _CHUNK):
            self._chunk_end = min(begin + _CHUNK, length)
            self._chunk = iter(share.indices(begin, self._chunk_end).tolist())
            yield self._chunk
