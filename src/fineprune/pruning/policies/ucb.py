"""UCB: train the samples whose loss is high or uncertain."""

from typing import ClassVar, Unpack

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, check_whole_number
from fineprune.pruning.lowest import lowest
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import Options, check_share
from fineprune.pruning.policies.even_saving import EvenSaving
from fineprune.pruning.policies.policy import LossRecords
from fineprune.pruning.random_streams import stream

_LARGEST = float(np.finfo(np.float32).max)


class UCB(EvenSaving):
    """Upper confidence bounds (Raju et al., "Accelerating Deep Learning with Dynamic Data Pruning",
    2021).

    Each sample has a running mean and a running variance of its losses. Its score is
    ``mean + exploration * variance``, and the samples with the highest scores are trained. A
    skipped sample keeps its score. The first ``period`` epochs train all samples, to learn their
    scores.

    The share ``epsilon`` of the trained samples is chosen at random among the samples without a
    high score. With ``exploration=0``, this is what the paper calls epsilon-greedy.

    Args:
        epochs: Number of training epochs.
        save: The share of the sample-steps of the whole training to save, in (0, 1), to within half
            an optimizer step.
        smoothing: The share of the old value in each running mean and variance, in [0, 1).
        exploration: The factor of the variance, at least 0.
        period: Number of epochs for which a choice of samples is kept.
        epsilon: The share of the trained samples, in [0, 1], that is chosen at random.
        options: The options of every policy; see ``PlanOptions``.

    Raises:
        InputError: A value is out of range.
    """

    name: ClassVar[str] = "ucb"
    _setting_names = ("epochs", "save", "smoothing", "exploration", "period", "epsilon")
    _array_names = ("_mean", "_variance", "_scores", "_new")
    needs_losses: bool = True

    def __init__(
        self,
        epochs: float,
        save: float = 0.35,
        *,
        smoothing: float = 0.8,
        exploration: float = 1.0,
        period: int = 1,
        epsilon: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(epochs, **options)
        self.period = check_whole_number("period", period, 1)
        self.smoothing = check_share("smoothing", smoothing)
        self.epsilon = check_share("epsilon", epsilon)
        if smoothing == 1:
            raise InputError("expected smoothing below 1, since 1 would ignore all losses, got 1")
        if not 0 <= exploration < np.inf:
            raise InputError(f"expected exploration of at least 0, got {exploration!r}")
        self._set_save(save, self.period)
        self.exploration = float(exploration)
        self._new: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self._mean, self._variance, self._scores = self._new, self._new, self._new

    def bind(self, num_samples: int) -> None:
        """Allocate four float32 per sample."""
        super().bind(num_samples)
        self._new = np.full(num_samples, np.nan, dtype=np.float32)
        self._mean = np.full(num_samples, np.nan, dtype=np.float32)
        self._variance = np.zeros(num_samples, dtype=np.float32)
        self._scores = np.full(num_samples, np.inf, dtype=np.float32)

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep the samples with the highest scores; those without a loss come first."""
        assert num_kept is not None
        # The same choice among equal scores in each epoch of a period.
        ties = stream(self._seed, epoch // self.period, "ucb")
        at_random = int(self.epsilon * num_kept)
        kept = np.zeros(len(self._scores), dtype=np.bool_)
        kept[lowest(-self._scores, num_kept - at_random, ties)] = True
        if at_random:
            others = np.flatnonzero(~kept)
            kept[ties.choice(others, at_random, replace=False, shuffle=False)] = True
        return EpochPlan(epoch, torch.from_numpy(np.flatnonzero(kept)))

    def observe(self, epoch: int, records: LossRecords) -> None:
        """Remember the losses of the epoch, the last one if a sample was trained twice."""
        finite = np.isfinite(records.losses)
        self._new[records.index[finite]] = records.losses[finite]

    def end_epoch(self, epoch: int) -> None:
        """Add the losses of the epoch to the running means and variances."""
        seen = np.flatnonzero(~np.isnan(self._new))
        # Not in float32, in which the square of a large loss would overflow.
        new = self._new[seen].astype(np.float64)
        mean = self._mean[seen].astype(np.float64)
        old = np.where(np.isnan(mean), new, mean)  # The first loss is the mean, with variance zero.
        share = self.smoothing
        self._mean[seen] = share * old + (1 - share) * new
        variance = share * self._variance[seen] + (1 - share) * (new - old) ** 2
        self._variance[seen] = np.minimum(variance, _LARGEST)
        self._new[seen] = np.nan
        if (epoch + 1) % self.period == 0:
            known = np.flatnonzero(~np.isnan(self._mean))
            bound = self._mean[known] + self.exploration * self._variance[known].astype(np.float64)
            self._scores[known] = np.minimum(bound, _LARGEST)
