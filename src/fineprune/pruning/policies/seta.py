"""SeTa: train groups of samples with similar losses, from easy to hard, again and again."""

from typing import ClassVar, Unpack

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import check_whole_number
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import Options, annealed_epochs, check_share
from fineprune.pruning.policies.last_losses import LastLosses

# k-means in one dimension converges in fewer rounds, unless the last moves are tiny.
_ROUNDS = 100


class SeTa(LastLosses):
    """SeTa (Zhou, Gao and Wang, "Scale Efficient Training for Large Datasets", CVPR 2025).

    Each epoch first drops the share ``prune`` of all samples at random. The others are clustered by
    their last losses (k-means) into ``groups`` groups, sorted from easy to hard. The epoch trains
    the groups inside a window, which contains the share ``width`` of the groups. The window moves
    from the easiest to the hardest groups, one group per epoch, and then starts over. The first
    epoch and the last ones (``final``) train all groups. Losses are not weighted.

    The number of samples depends on the losses and is rounded up to whole optimizer steps with
    other random samples. (Here, samples without a loss belong to the hardest group; the authors'
    code clusters before a sample has a loss.)

    Args:
        epochs: Number of training epochs.
        prune: The share of the samples, in [0, 1), that is dropped at random.
        groups: The number of groups.
        width: The share of the groups, in (0, 1], that the window contains.
        final: The share of the epochs, in [0, 1], that train all groups, at the end of the
            training.
        options: The options of every policy; see ``PlanOptions``.

    Raises:
        InputError: A value is out of range.
    """

    name: ClassVar[str] = "seta"
    _setting_names = ("epochs", "prune", "groups", "width", "final")

    def __init__(
        self,
        epochs: float,
        prune: float = 0.1,
        *,
        groups: int = 10,
        width: float = 0.5,
        final: float = 0.125,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(epochs, **options)
        self.prune = check_share("prune", prune, "[0, 1)")
        self.width = check_share("width", width, "(0, 1]")
        self.groups = check_whole_number("groups", groups, 1)
        self.final = check_share("final", final)

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep a random part of the samples whose groups are inside the window."""
        total = len(self.losses)
        order = rng.permutation(total)
        drawn, rest = np.split(order, [total - int(self.prune * total)])
        inside = self._in_window(epoch, self.losses[drawn])
        chosen = np.concatenate([drawn[inside], drawn[~inside], rest])
        kept = np.sort(chosen[: self._whole_steps(int(np.count_nonzero(inside)))])
        return EpochPlan(epoch, torch.from_numpy(kept))

    def _in_window(self, epoch: int, losses: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        """Return which of some losses belong to the groups that the epoch trains."""
        if epoch == 0 or epoch >= self.epochs - annealed_epochs(self.final, self.epochs):
            return np.ones(len(losses), dtype=np.bool_)
        size = max(round(self.width * self.groups), 1)
        first = epoch % (self.groups - size + 1)
        group = clusters(losses, self.groups)
        inside: npt.NDArray[np.bool_] = (group >= first) & (group < first + size)
        return inside


def clusters(losses: npt.NDArray[np.float32], number: int) -> npt.NDArray[np.int64]:
    """Return the cluster of each loss by k-means, from 0 for the smallest ones; int64, shape (n,).

    The centres begin at evenly spaced ranks. A loss that is NaN belongs to the last cluster.
    """
    known = np.sort(losses[~np.isnan(losses)].astype(np.float64))
    if not len(known):
        return np.full(len(losses), number - 1, dtype=np.int64)
    sums = np.concatenate([[0.0], np.cumsum(known)])
    centres = known[(np.arange(number) * 2 + 1) * len(known) // (2 * number)]
    for _ in range(_ROUNDS):
        ends = np.searchsorted(known, (centres[1:] + centres[:-1]) / 2)
        bounds = np.concatenate([[0], ends, [len(known)]])
        sizes = np.diff(bounds)
        means = np.diff(sums[bounds]) / np.maximum(sizes, 1)
        means = np.where(sizes > 0, means, centres)  # An empty cluster stays where it is.
        if np.array_equal(means, centres):
            break
        centres = means
    limits = (centres[1:] + centres[:-1]) / 2
    return np.searchsorted(limits, losses, side="right").astype(np.int64)  # NaN comes last.
