"""SelectiveBackprop: train the samples with large losses more often."""

from typing import ClassVar, Unpack

import numpy as np
import torch

from fineprune.errors import InputError
from fineprune.pruning.lowest import lowest
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import Options
from fineprune.pruning.policies.even_saving import EvenSaving
from fineprune.pruning.policies.last_losses import LastLosses


class SelectiveBackprop(EvenSaving, LastLosses):
    """Selective-Backprop with the losses of earlier epochs (Jiang et al., "Accelerating Deep
    Learning by Focusing on the Biggest Losers", 2019, where this form is called StaleSB).

    The published form computes the loss of every sample before it chooses the samples to
    backpropagate. Here, the last known loss decides, so a skipped sample costs nothing. The
    probability of keeping a sample is proportional to a power of its percentile among the losses of
    all samples; a sample without a loss has the highest percentile. The losses are not reweighted,
    so hard samples count more than in the whole data set.

    By default, the epochs from half to nine tenths of the training skip samples, as in MosaicML's
    Composer.

    Args:
        epochs: Number of training epochs.
        save: The share of the sample-steps of the whole training to save, in (0, 1), to within half
            an optimizer step.
        power: The power of the percentile, at least 0. With 0, the choice is random.
        begin: The share of the training, in [0, 1), before which all samples are trained.
        end: The share of the training, in (begin, 1], after which all samples are trained.
        options: The options of every policy; see ``PlanOptions``.

    Raises:
        InputError: A value is out of range, or the epochs between ``begin`` and ``end`` that are
            not annealed are too few to save that much.
    """

    name: ClassVar[str] = "selective-backprop"
    _setting_names = ("epochs", "save", "power", "begin", "end")

    def __init__(
        self,
        epochs: float,
        save: float = 0.2,
        *,
        power: float = 1.0,
        begin: float = 0.5,
        end: float = 0.9,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(epochs, **options)
        if not 0 <= begin < end <= 1:
            raise InputError(f"expected 0 <= begin < end <= 1, got begin={begin} and end={end}")
        if not 0 <= power < np.inf:
            raise InputError(f"expected power of at least 0, got {power!r}")
        self._set_save(save, round(begin * self.epochs), round(end * self.epochs))
        self.power = float(power)
        self.begin, self.end = float(begin), float(end)

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Draw samples without replacement; samples with larger losses are more probable."""
        assert num_kept is not None
        total = len(self.losses)
        # A sample without a loss, which is NaN, comes last.
        percentiles = np.searchsorted(np.sort(self.losses), self.losses, side="right") / total
        # The smallest of exponential variables with these rates are such a draw.
        keys = rng.exponential(size=total) / percentiles**self.power
        return EpochPlan(epoch, torch.from_numpy(np.sort(lowest(keys, num_kept, rng))))
