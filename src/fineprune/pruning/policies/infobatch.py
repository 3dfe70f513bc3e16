"""InfoBatch: skip some of the samples whose loss is below the mean, and weight the others up."""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, check_flag, check_share
from fineprune.labels.ranking import Ranking
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.even_lengths import checked_save, even_lengths, shortened_epochs
from fineprune.pruning.policies.policy import Losses, Marks, Policy, Training

_PRUNE = 0.5


class InfoBatch(Policy):
    """InfoBatch (Qin et al., "InfoBatch: Lossless Training Speed Up by Unbiased Dynamic Data
    Pruning", ICLR 2024).

    The samples whose last loss is below the mean of all last losses form the group that may be
    skipped; samples without a finite loss belong to the other group. The published form skips each
    sample of the first group with probability ``prune``, and multiplies the losses of the kept ones
    by ``1 / (1 - prune)``. How much this saves depends on the losses.

    With ``save``, the whole training saves this share of the sample-steps, to within half an
    optimizer step. Each epoch that is not annealed skips random samples of the first group and, if
    it is too small, of the other, and weights the kept samples of a group by the inverse of the
    share that is kept.

    Args:
        epochs: Number of training epochs.
        prune: The probability, in [0, 1), with which a sample of the first group is skipped.
            Without ``save``, the default is 0.5.
        save: The share of the sample-steps to save, in (0, 1), instead of ``prune``.
        anneal: The share of the epochs, in [0, 1], at the end of the training, that train all
            samples.
        rescale: Whether the losses are multiplied by the weights.

    Attributes:
        losses: The last loss of each sample, NaN if it was not finite; float32, shape (N,).

    Raises:
        InputError: A value is out of range, both ``prune`` and ``save`` are given, or too many
            epochs are annealed to save that much.
    """

    name: ClassVar[str] = "infobatch"
    setting_names: ClassVar[tuple[str, ...]] = ("epochs", "prune", "save", "anneal", "rescale")
    array_names: ClassVar[tuple[str, ...]] = ("losses",)
    needs_losses: bool = True

    def __init__(
        self,
        epochs: float,
        prune: float | None = None,
        *,
        save: float | None = None,
        anneal: float = 0.125,
        rescale: bool = True,
    ) -> None:
        super().__init__(epochs)
        if prune is not None and save is not None:
            raise InputError(f"expected either prune or save, got prune={prune} and save={save}")
        if save is None:
            prune = check_share("prune", _PRUNE if prune is None else prune, "[0, 1)")
        self.prune = prune
        self._shortened = shortened_epochs(0, self.epochs, anneal)
        self.anneal, self.rescale = float(anneal), check_flag("rescale", rescale)
        self.save = None if save is None else checked_save(save, self._shortened, self.epochs)

    def begin(self, training: Training) -> None:
        """Allocate the losses; raise InputError if the steps are too large to save that much."""
        super().begin(training)
        self._lengths: list[int] | None = None
        if self.save is not None:
            self._lengths = even_lengths(self.save, self._shortened, self.epochs, training)
        self.losses: npt.NDArray[np.float32] = np.full(training.num_samples, np.nan, np.float32)

    def lengths(self) -> list[int] | None:
        """Return how many samples each epoch keeps; None without ``save``: it depends on data."""
        return self._lengths

    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> EpochPlan:
        """Skip samples of the first group at random, and weight the kept ones."""
        total = self._num_samples
        if epoch not in self._shortened:
            return EpochPlan.full(epoch, total)
        below = below_mean(self._scores(epoch, rng))
        first, second = np.flatnonzero(below), np.flatnonzero(~below)
        if number is None:
            assert self.prune is not None
            skipped = first[rng.random(len(first)) < self.prune]
            weights = np.where(below, 1 / (1 - self.prune), 1.0)
        else:
            of_first = min(total - number, len(first))
            weights, chosen = np.ones(total), []
            for group, left_out in ((first, of_first), (second, total - number - of_first)):
                chosen.append(rng.choice(group, left_out, replace=False, shuffle=False))
                if left_out < len(group):
                    weights[group] = len(group) / (len(group) - left_out)
            skipped = np.concatenate(chosen)
        kept = np.delete(np.arange(total), skipped)
        weighted = self.rescale and not (weights == 1).all()
        return EpochPlan(
            epoch,
            torch.from_numpy(kept),
            torch.from_numpy(weights.astype(np.float32)) if weighted else None,
        )

    def learn(
        self, epoch: int, losses: Losses | None, above_mean: Marks | None, ranking: Ranking | None
    ) -> None:
        """Remember the last loss of each trained sample."""
        assert losses is not None
        trained = ~np.isnan(losses)
        self.losses[trained] = losses[trained]
        self.losses[np.isinf(self.losses)] = np.nan

    def _scores(self, epoch: int, rng: np.random.Generator) -> npt.NDArray[np.floating[Any]]:
        """Return what is compared with its mean, shape (N,), NaN if unknown: the last losses."""
        return self.losses


def below_mean(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    """Return which scores are below the mean of all that are not NaN, bool, shape (N,)."""
    known = scores[~np.isnan(scores)]
    if not len(known):
        return np.zeros(len(scores), dtype=np.bool_)
    below: npt.NDArray[np.bool_] = scores < known.mean(dtype=np.float64)
    return below
