"""Ranked: skip the samples that another run ranks highest, from the first epoch on."""

import hashlib
import math
from typing import Any, ClassVar, Unpack

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, explaining, warn_user
from fineprune.labels.advice import doubt_of
from fineprune.labels.label_watch import LabelWatch
from fineprune.pruning.learning_rates import Rates
from fineprune.pruning.permutation import Permutation
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import Options
from fineprune.pruning.policies.budgeted import BudgetedPolicy
from fineprune.pruning.policies.policy import checked_prune, prune_count
from fineprune.pruning.random_streams import stream

Scores = npt.NDArray[np.float32]

# So many scores are not in the order of their size by chance.
_SURELY_SORTED = 20


class Ranked(BudgetedPolicy):
    """Save a given share of the optimizer steps, based on the scores of an earlier training.

    The samples with the highest scores are the suspects. They are skipped from the first epoch on,
    except for the share ``returning``: in each epoch, other suspects are trained until all had
    their turn, and proportionally fewer in an epoch that is shortened further. The rest of the
    budget is saved as in ``Adaptive``: epochs with a small learning rate are shortened, and choose
    among the other samples at random, without repeats until all were chosen. If there are more
    suspects than the budget skips, those with the smallest scores are trained.

    The number of samples of each epoch is known before the start. Nothing is learned or stored
    during training: the samples follow from the scores and the seed.

    Args:
        epochs: Number of training epochs.
        scores: The ``LabelWatch`` of another training, or a score per sample: numbers of shape
            (N,), larger for more suspicious samples, -inf for a sample about which nothing is
            known.
        save: The share of the optimizer steps to save, in [0, 1).
        rates: The learning rate of each epoch, as for ``Adaptive``. The default is a constant rate.
        suspects: The number of suspects: a share in [0, 1), or a whole number below N. The default
            is the number of suspects of the ``LabelWatch`` that are clear
            (``Ranking.to_skip_again``); with other scores, it is required. Samples of classes that
            the other training has not learned, or that are rare, do not count as suspects
            (``Ranking.to_skip``); to skip these, too, give ``watch.scores()``.
        returning: The share of the suspects that each epoch trains anyway.
        options: The options of every policy; see ``PlanOptions``. The steps of annealed epochs are
            part of the budget, so the other epochs are shortened more.

    Raises:
        InputError: A value is out of range, the scores are not numbers of shape (N,), or too many
            epochs are annealed to save that much.
    """

    name: ClassVar[str] = "ranked"

    def __init__(
        self,
        epochs: float,
        scores: Any,
        save: float = 0.35,
        rates: Rates | None = None,
        *,
        suspects: float | None = None,
        returning: float = 0.1,
        **options: Unpack[Options],
    ) -> None:
        self._numbers: list[int] = []
        super().__init__(epochs, save, rates, returning, **options)
        if isinstance(scores, LabelWatch):
            ranking = scores.ranking()
            if suspects is None and (doubt := doubt_of(ranking)):
                warn_user(doubt)
            to_skip = ranking.to_skip_again if suspects is None else ranking.to_skip
            kept = (ranking.scores > 0) & ~to_skip
            suspects = ranking.num_suspects if suspects is None else suspects
            if kept.any():
                number = prune_count(checked_prune(suspects, "suspects"), len(kept), "suspects")
                suspects = number - int(kept.cpu()[ranking.suspects()[0][:number]].sum())
            self.known_labels = scores.labels()
            scores = ranking.scores.masked_fill(kept, -math.inf).cpu()
        self._scores = _checked_scores(scores)
        if suspects is None:
            raise InputError(
                "expected suspects, the share of the samples to skip for their scores, got none: "
                "give the LabelWatch itself, which estimates this share, or scores in the order of "
                "the samples (watch.scores()) and suspects=..."
            )
        self._suspects = checked_prune(suspects, "suspects")
        # The samples from the smallest score to the largest, which are sorted when they are bound.
        self._order: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def set_rates(self, rates: Rates, by: str = "epochs") -> None:
        """Receive the learning rates; see ``Pruner.set_rates``."""
        super().set_rates(rates, by)
        self._numbers = []

    def bind(self, num_samples: int) -> None:
        """Receive the number of samples, and sort them by their scores.

        Raises:
            InputError: There is not one score for each sample, or all samples are suspects.
        """
        if len(self._scores) != num_samples:
            raise InputError(
                f"expected one score for each of {num_samples} samples, got {len(self._scores)}: "
                f"give the scores of a training on the same samples, and -inf for new ones"
            )
        prune_count(self._suspects, num_samples, "suspects")
        self._order = np.argsort(self._scores, kind="stable")
        super().bind(num_samples)

    def bind_steps(self, samples_per_step: int, steps_per_full_epoch: int) -> None:
        """Receive the size of an optimizer step, and compute the budget in steps."""
        super().bind_steps(samples_per_step, steps_per_full_epoch)
        self._numbers = []

    def planned_numbers(self) -> list[int]:
        """Return how many samples each epoch keeps."""
        if not self._numbers:
            self._numbers = self._planned(self.num_suspects())
        return list(self._numbers)

    def num_kept(self, epoch: int) -> int:
        """Return the number of samples that fill the steps of an epoch."""
        return self.planned_numbers()[epoch]

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Choose some suspects whose turn it is, and fill the epoch with the other samples."""
        assert num_kept is not None
        others, suspects = np.split(self._order, [self._num_samples - self.num_suspects()])
        # How many of the others and of the suspects the earlier epochs took from random orders.
        others_before, suspects_before = 0, 0
        for number in self.planned_numbers()[:epoch]:
            returning = self._number_returning(len(suspects), number)
            others_before += min(number - returning, len(others))
            suspects_before += returning
        returning = self._number_returning(len(suspects), num_kept)
        wanted = num_kept - returning
        back = self._in_turn(suspects, suspects_before, returning, "ranked-suspects")
        chosen = self._in_turn(others, others_before, min(wanted, len(others)), "ranked-others")
        missing = wanted - len(chosen)
        if missing:
            skipped = suspects[~np.isin(suspects, back)]
            chosen = np.concatenate([chosen, skipped[:missing]])
        return EpochPlan(epoch, torch.from_numpy(np.sort(np.concatenate([chosen, back]))))

    def suspicion(self) -> torch.Tensor:
        """Return the scores that were given, float32, shape (N,)."""
        return torch.from_numpy(self._scores.copy())

    def num_suspects(self) -> int:
        """Return the number of suspects."""
        return prune_count(self._suspects, len(self._scores), "suspects")

    def settings(self) -> dict[str, Any]:
        """Return the arguments and a digest of the scores, with which a state must agree."""
        return {
            **super().settings(),
            "suspects": self._suspects,
            "scores": hashlib.sha256(self._scores.tobytes()).hexdigest(),
        }

    def _in_turn(
        self, samples: npt.NDArray[np.int64], before: int, number: int, purpose: str
    ) -> npt.NDArray[np.int64]:
        """Return the next samples in a random order, which starts over at its end.

        ``before`` is how many were chosen before, and ``purpose`` names the order.
        """
        if number == len(samples):
            return samples
        order = Permutation(len(samples), stream(self._seed, 0, purpose))
        return samples[order.at((before + np.arange(number)) % len(samples))]


def _checked_scores(scores: Any) -> Scores:
    """Return the scores as float32, shape (N,), a copy."""
    given = scores.detach().cpu().numpy() if isinstance(scores, torch.Tensor) else scores
    advice = ": give a LabelWatch, or one number per sample in the order of the data set"
    with explaining("expected scores as numbers of shape (N,)", (TypeError, ValueError), advice):
        values: Scores = np.array(given, dtype=np.float32)
    if values.ndim != 1:
        raise InputError(f"expected scores of shape (N,), got shape {values.shape}")
    if np.isnan(values).any():
        raise InputError(
            f"expected scores without NaN, got {int(np.isnan(values).sum())} NaN: give -inf for a "
            f"sample about which nothing is known"
        )
    known = values[np.isfinite(values)]
    steps = np.diff(known)
    if (steps <= 0).all() and np.count_nonzero(steps) >= _SURELY_SORTED:  # Some may be equal.
        warn_user(
            "the scores fall from the first sample to the last, as those of watch.suspects() do: "
            "if they come from there, give watch.scores() instead, which are in the order of the "
            "samples",
        )
    return values
