"""Share: the samples that one rank trains in one epoch, in their order."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fineprune.pruning.permutation import Permutation

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Share:
    """The samples that one rank trains in one epoch, computed position by position.

    Attributes:
        epoch: The epoch, counted from 0.
        owned: The samples that the rank owns.
        kept: Those that it keeps, as offsets from the first sample that it owns, sorted; int32. It
            is None if all of them are kept.
        received: Samples of other ranks that this rank trains; int64.
        order: The order of the kept and the received samples.
        number: Number of samples that the rank trains. If there are more samples in the order, the
            last ones are left out; if there are fewer, the first ones are repeated.
    """

    epoch: int
    owned: range
    kept: npt.NDArray[np.int32] | None
    received: Indices
    order: Permutation
    number: int

    def indices(self, begin: int, end: int) -> Indices:
        """Return the samples at the positions from ``begin`` to ``end - 1`` of the order."""
        positions = np.arange(begin, end)
        if end > self.order.length:
            positions %= self.order.length
        places = self.order.at(positions)
        if self.kept is None:
            return places + self.owned.start
        if not len(self.received):
            return self.kept[places].astype(np.int64) + self.owned.start
        is_own = places < len(self.kept)
        samples = np.empty(len(places), dtype=np.int64)
        samples[is_own] = self.kept[places[is_own]]
        samples[is_own] += self.owned.start
        samples[~is_own] = self.received[places[~is_own] - len(self.kept)]
        return samples

    def includes(self, index: Indices) -> npt.NDArray[np.bool_]:
        """Return which of the samples, shape (n,), the rank trains in this epoch."""
        own = (index >= self.owned.start) & (index < self.owned.stop)
        if self.kept is not None and len(self.kept):
            offsets = index - self.owned.start
            places = np.searchsorted(self.kept, offsets)
            own &= self.kept[np.minimum(places, len(self.kept) - 1)] == offsets
        elif self.kept is not None:
            own[:] = False
        return own | np.isin(index, self.received)


def owned_samples(num_samples: int, num_ranks: int, rank: int) -> range:
    """Return the samples that a rank owns: a contiguous part of 0..N-1.

    The parts of any two ranks differ in length by at most one.
    """
    return range(rank * num_samples // num_ranks, (rank + 1) * num_samples // num_ranks)
