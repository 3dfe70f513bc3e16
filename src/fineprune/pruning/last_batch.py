"""LastBatch: where the batch that a rank recorded last lies in the order of the epoch.

It tells what a resumed epoch has to train, where the number of recorded samples does not: samples
may have been left out of their batches, such as files that cannot be read.
"""

from typing import Any

import numpy as np
import torch

from fineprune.pruning.epoch_cycle import Progress
from fineprune.pruning.loop_checks import LoopChecks


class LastBatch:
    """The last recorded batch of one rank.

    Args:
        checks, sampler: Those of the ``Pruner``.
    """

    def __init__(self, checks: LoopChecks, sampler: Any) -> None:
        self._checks = checks
        self._cycle = checks.cycle
        self._shape = checks.shape
        self._sampler = sampler
        self._index: torch.Tensor | None = None
        self._before = 0  # Number of batches of the epoch that precede the sampler's first one.

    def begin_after(self, batches: int) -> None:
        """Note that the sampler begins behind so many batches of the epoch."""
        self._before = batches

    def note(self, index: torch.Tensor) -> None:
        """Note the indices of a batch, shape (B,), which is now the last one."""
        self._index = index

    def completes(self, progress: Progress) -> bool:
        """Return whether nothing is left to train of an epoch behind its last recorded batch."""
        # With drop_last, an incomplete last batch is left out.
        batch = self._shape.samples_per_batch or 1
        least = batch if self._shape.drop_last else 1
        if progress.left < least:
            return True
        # To find samples that were left out takes long, so it is done only after the last batch, or
        # the one after it, since a stop may have divided a batch.
        beyond = progress.batches * batch - (progress.planned - least)
        if not 0 < beyond <= 2 * batch:
            return False
        return progress.planned - self.samples_loaded(progress) < least

    def samples_loaded(self, progress: Progress) -> int:
        """Return how many samples of the order of all ranks end with the last recorded batch.

        These are the recorded ones and those that were left out of their batches. Where the batch
        lies in the order tells whether there are some, or batches were recorded in parts.
        """
        recorded, batch, last = progress.samples, self._shape.samples_per_batch, self._index
        if batch is None or last is None or not self._cycle.sampler_read:
            return recorded
        ranks = self._shape.num_replicas
        number, start = progress.batches - self._before, self._sampler.start
        loaded: int = min(start + number * batch, progress.planned)
        # With half as many or fewer, batches are recorded in parts, or are smaller ones.
        if recorded >= loaded or 2 * (recorded - start) <= number * batch:
            return recorded
        size, own = batch // ranks, (recorded - start) // ranks
        indices = last.cpu().numpy()
        order = self._sampler.leading(number * size)
        block = order[(number - 1) * size :]
        if self._checks.sharded and loaded == progress.planned:
            # A framework fills the last batches with the first samples.
            block = np.concatenate([block, order[:size]])
        if not np.isin(indices, block).all():
            return recorded
        places = (number - 1) * size + np.flatnonzero(np.isin(block, indices))
        # Without a gap, the batches have several sizes, or only the end of the last one is missing.
        # (If a framework shards the batches, a rank has only a part of each place in the order.)
        whole = places[-1] == own - 1 and places[-1] - places[0] == len(indices) - 1
        if whole and not self._checks.sharded:
            return recorded
        # The first batch may also be a smaller one, or a part.
        return loaded if number > 1 or places[-1] >= own else recorded

    def samples_to_repeat(self, progress: Progress) -> int:
        """Return how many of its samples a resumed epoch would train again.

        They come later in the order than the ones that count, so the loop has another order.

        Args:
            progress: The epoch, with ``samples_loaded`` as the number of its samples.
        """
        cycle, checks = self._cycle, self._checks
        # A loop that names its epochs by ``set_epoch`` skips trained batches by itself.
        if self._index is None or not (cycle.driven and cycle.sampler_read) or checks.observes:
            return 0
        # A framework that shards the batches may give these places of the order to another rank.
        if checks.sharded or progress.batches == self._before:
            return 0
        number = (progress.samples - self._sampler.start) // self._shape.num_replicas
        behind = np.zeros(checks.num_samples, bool)
        behind[self._sampler.leading(number)] = True
        index = self._index.cpu().numpy()
        index = index[(index >= 0) & (index < len(behind))]  # Others must not stop a save.
        return int((~behind[index]).sum())
