"""InfoBatch: skip some of the samples whose loss is below the mean, and weight the others up."""

from typing import ClassVar, Unpack

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import Options, check_share
from fineprune.pruning.policies.even_saving import EvenSaving
from fineprune.pruning.policies.last_losses import LastLosses

_PRUNE = 0.5
_ANNEAL = 0.125


class InfoBatch(EvenSaving, LastLosses):
    """InfoBatch (Qin et al., "InfoBatch: Lossless Training Speed Up by Unbiased Dynamic Data
    Pruning", ICLR 2024).

    The samples whose last loss is below the mean of all last losses form the group that may be
    skipped. Samples without a finite loss belong to the other group. The published form skips each
    sample of the first group with probability ``prune``, and multiplies the losses of the kept ones
    by ``1 / (1 - prune)``. The number of kept samples then depends on the losses.

    With ``save``, the numbers are known before the start: the whole training saves this share of
    the sample-steps, to within half an optimizer step. Each epoch that is not annealed skips random
    samples of the first group and, if that group is too small, of the other group. The weight of a
    sample is the inverse of the probability with which its group is kept.

    Args:
        epochs: Number of training epochs.
        prune: The probability, in [0, 1), with which a sample of the first group is skipped.
            Without ``save``, the default is 0.5.
        save: The share of the sample-steps of the whole training to save, in (0, 1), instead of
            ``prune``.
        options: The options of every policy; see ``PlanOptions``. By default, ``anneal`` is 0.125
            and ``rescale`` is true. ``rescale=False`` turns the weights off.

    Raises:
        InputError: A value is out of range, both ``prune`` and ``save`` are given, or too many
            epochs are annealed to save that much.
    """

    name: ClassVar[str] = "infobatch"
    _setting_names: ClassVar[tuple[str, ...]] = ("epochs", "prune", "save")

    def __init__(
        self,
        epochs: float,
        prune: float | None = None,
        *,
        save: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        given: Options = {"anneal": _ANNEAL, "rescale": True, **options}
        super().__init__(epochs, **given)
        if prune is not None and save is not None:
            raise InputError(f"expected either prune or save, got prune={prune} and save={save}")
        if save is None and prune is None:
            prune = _PRUNE
        self.prune = None if prune is None else check_share("prune", prune, "[0, 1)")
        self._set_save(save)

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Skip samples of the first group at random, and weight the kept ones."""
        total = len(self.losses)
        below = below_mean(self._scores(epoch, rng))
        first, second = np.flatnonzero(below), np.flatnonzero(~below)
        if num_kept is None:
            assert self.prune is not None
            skipped = first[rng.random(len(first)) < self.prune]
            weights = np.where(below, 1 / (1 - self.prune), 1.0)
        else:
            of_first = min(total - num_kept, len(first))
            weights, chosen = np.ones(total), []
            for group, number in ((first, of_first), (second, total - num_kept - of_first)):
                chosen.append(rng.choice(group, number, replace=False, shuffle=False))
                if number < len(group):
                    weights[group] = len(group) / (len(group) - number)
            skipped = np.concatenate(chosen)
        kept = np.delete(np.arange(total), skipped)
        weighted = self.plan_options.rescale and not (weights == 1).all()
        return EpochPlan(
            epoch,
            torch.from_numpy(kept),
            torch.from_numpy(weights.astype(np.float32)) if weighted else None,
        )

    def _scores(self, epoch: int, rng: np.random.Generator) -> npt.NDArray[np.floating]:
        """Return what is compared with its mean, shape (N,), NaN if unknown: the last losses."""
        return self.losses


def below_mean(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    """Return which scores are below the mean of all that are known, bool, shape (N,).

    A score that is NaN is unknown, and not below the mean.
    """
    known = scores[~np.isnan(scores)]
    if not len(known):
        return np.zeros(len(scores), dtype=np.bool_)
    below: npt.NDArray[np.bool_] = scores < known.mean(dtype=np.float64)
    return below
