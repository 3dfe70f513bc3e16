"""Kakurenbo: hide samples that the network has learned with confidence."""

import math
from typing import ClassVar, Unpack

import numpy as np
import torch

from fineprune.errors import InputError
from fineprune.pruning.lowest import lowest
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import Options
from fineprune.pruning.policies.last_losses import LastLosses
from fineprune.pruning.policies.policy import checked_prune, prune_count

# The factor of the largest number of hidden samples, and the percentage of the epochs from which on
# it holds. These are the authors' values for ImageNet.
_FACTORS = ((0, 1.0), (30, 0.8), (60, 0.6), (80, 0.4))


class Kakurenbo(LastLosses):
    """KAKURENBO (Nguyen et al., "KAKURENBO: Adaptively Hiding Samples in Deep Neural Network
    Training", NeurIPS 2023).

    Each epoch hides the samples with the lowest losses, at most ``prune`` of all samples, and only
    samples that are predicted correctly with at least the given confidence. At the end of the
    epoch, the losses of the hidden samples are computed again: see ``Pruner.to_rescore``. From 30,
    60 and 80 % of the epochs on, this limit is multiplied by 0.8, 0.6 and 0.4.

    The confidence of a correct prediction is ``exp(-loss)``, so the losses must be cross-entropies
    without label smoothing. The number of hidden samples is reduced so that an epoch trains whole
    optimizer steps.

    After the warm-up, the authors multiply the learning rate by 1 / (1 - F), where F is the largest
    share that the epoch may hide, even if it hides fewer samples (``adjust_learning_rate`` in their
    code). Here, ``rescale``, which is on by default, multiplies the losses by this factor in every
    epoch but the first. With ``keep_per_class`` or ``max_skips``, the factor is N / (number kept).

    Args:
        epochs: Number of training epochs.
        prune: The largest share of the samples to hide, in [0, 1), or the largest number as an int.
        confidence: The smallest probability of its class with which a sample may be hidden, in
            (0.5, 1]. At 0.5 or below, the prediction could be wrong.
        options: The options of every policy; see ``PlanOptions``.

    Raises:
        InputError: A value is out of range.
    """

    name: ClassVar[str] = "kakurenbo"
    _setting_names = ("epochs", "prune", "confidence")
    rescores: bool = True

    def __init__(
        self,
        epochs: float,
        prune: float = 0.3,
        *,
        confidence: float = 0.7,
        **options: Unpack[Options],
    ) -> None:
        given: Options = {"rescale": True, **options}
        super().__init__(epochs, **given)
        if not 0.5 < confidence <= 1:
            raise InputError(
                f"expected confidence as a probability in (0.5, 1], got {confidence!r}"
            )
        self.prune = checked_prune(prune)
        self.confidence = float(confidence)

    def bind(self, num_samples: int) -> None:
        """Allocate the losses.

        Raises:
            InputError: ``prune`` would leave no sample.
        """
        super().bind(num_samples)
        prune_count(self.prune, num_samples)

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Hide the samples with the lowest losses, if they are predicted with confidence."""
        total = len(self.losses)
        confident = int((self.losses <= -math.log(self.confidence)).sum())  # NaN is not.
        hidden = total - self._whole_steps(total - min(self._most(epoch), confident))
        losses = np.where(np.isnan(self.losses), np.inf, self.losses)
        kept = np.delete(np.arange(total), lowest(losses, hidden, rng))
        weights = None
        if self.plan_options.rescale and epoch:
            factor = total / (total - self._most(epoch))
            weights = torch.from_numpy(np.full(total, factor, np.float32))
        return EpochPlan(epoch, torch.from_numpy(kept), weights)

    def _most(self, epoch: int) -> int:
        """Return the largest number of samples that the epoch may hide."""
        factor = next(f for start, f in reversed(_FACTORS) if 100 * epoch >= start * self.epochs)
        # The small addend prevents 0.8 * 0.3 * 100 from losing a sample.
        return int(factor * prune_count(self.prune, len(self.losses)) + 1e-9)
