"""GroupedByLength: the order of a ``PruningSampler``, with samples of similar length together."""

from collections.abc import Iterator, Sequence

from torch.utils.data import Sampler

from fineprune.pruning.sampler import PruningSampler

# As in ``transformers``: so many steps are sorted by length together.
_STEPS = 50


class GroupedByLength(Sampler[int]):
    """Sorts parts of a pruning sampler's order by length, so that batches need less padding.

    The order depends on the seed, the epoch and the plan only, so that a resumed run has the same.

    Args:
        sampler: The sampler of a pruner with one replica.
        lengths: The length of each sample of the data set.
        step_size: Number of samples per optimizer step of all ranks.
    """

    def __init__(self, sampler: PruningSampler, lengths: Sequence[int], step_size: int) -> None:
        self._sampler = sampler
        self._lengths = lengths
        self._step_size = step_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the pruner."""
        self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        # At least four parts, so that short epochs are still shuffled.
        steps = max(1, min(_STEPS, len(self) // (4 * self._step_size)))
        size = steps * self._step_size
        order = self._sampler.order().tolist()
        for begin in range(0, len(order), size):
            part = order[begin : begin + size]
            yield from sorted(part, key=self._lengths.__getitem__, reverse=True)
