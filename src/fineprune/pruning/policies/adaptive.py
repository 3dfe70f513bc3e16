"""Adaptive: the shorter schedule in one training, without the samples whose labels look wrong."""

import math
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, check_share, check_whole_number, warn_user
from fineprune.labels.ranking import Ranking
from fineprune.pruning.dropping_count import keep_least_counted
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.policy import Losses, Marks, Policy, Training
from fineprune.pruning.policies.step_budget import StepBudget
from fineprune.pruning.rates import Rates


class Adaptive(Policy):
    """Save a share of the optimizer steps, and skip the samples whose labels look wrong.

    The budget, ``(1 - save)`` of the steps of the full training, is used exactly. The epochs are
    shortened so that the learning rate, as a function of the steps, falls as in ``fp.shorter``. A
    shortened epoch chooses its samples at random, without repeats until all were chosen.

    From ``first_epoch`` on, samples whose score in the ranking of the labels exceeds ``threshold``
    are skipped, except for the share ``returning`` of them, drawn anew in each epoch. The steps
    that this frees lengthen later epochs. The loop must record logits and labels; without them, no
    sample is skipped for its label, and a warning says so.

    Args:
        epochs: Number of training epochs.
        save: The share of the optimizer steps to save, in [0, 1).
        rates: The learning rate of each epoch: numbers, a function of the progress in epochs, or a
            torch scheduler that is stepped once per epoch; by default, a constant. Only the ratios
            matter. For rates that change per step, see ``Pruner.set_rates``.
        threshold: The score above which a sample is skipped. A list of suspects begins at 0, but
            a skipped sample with a correct label is missed, so skipping needs more precision.
        first_epoch: The number of epochs that train before any sample is skipped for its label.
        returning: The share of the skipped samples that each epoch trains all the same.

    Raises:
        InputError: A value is out of range.
    """

    name: ClassVar[str] = "adaptive"
    setting_names = ("epochs", "save", "threshold", "first_epoch", "returning")
    array_names = ("_scores", "_chosen")
    needs_losses: bool = True  # They tell which samples were trained.
    needs_ranking: bool = True

    def __init__(
        self,
        epochs: float,
        save: float = 0.35,
        rates: Rates | None = None,
        *,
        threshold: float = 0.7,
        first_epoch: int = 5,
        returning: float = 0.1,
    ) -> None:
        super().__init__(epochs)
        self.save = check_share("save", save, "[0, 1)")
        given: Any = threshold  # A number of Python or of NumPy.
        if not (isinstance(given, Real) and 0 <= float(given) < math.inf):
            raise InputError(f"expected threshold as a score of at least 0, got {threshold!r}")
        self.threshold = float(threshold)
        self.first_epoch = check_whole_number("first_epoch", first_epoch, 1)
        self.returning = check_share("returning", returning)
        self.budget: StepBudget = StepBudget(self.epochs, self.save)
        if rates is not None:
            self.budget.set_rates(rates)

    def begin(self, training: Training) -> None:
        """Compute the budget in steps, and allocate five bytes per sample."""
        super().begin(training)
        self.budget.begin(training)
        self._scores: npt.NDArray[np.float32] = np.full(self._num_samples, -np.inf, np.float32)
        # The samples that were chosen in this round.
        self._chosen: npt.NDArray[np.bool_] = np.zeros(self._num_samples, dtype=np.bool_)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each epoch, relative to the largest one."""
        return self.budget.rates

    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> EpochPlan:
        """Choose the samples of an epoch, which fill the steps that it is given."""
        skipped = self._skipped(epoch)
        number = self.budget.samples(self._steps(epoch, len(skipped)))
        if number == self._num_samples:
            return EpochPlan.full(epoch, number)
        # Samples with a smaller number are preferred: those that return, those not yet chosen in
        # this round, those chosen already, and the others that are skipped.
        order = self._chosen.astype(np.uint8) + np.uint8(1)
        order[skipped] = 3
        order[rng.choice(skipped, self._returning(len(skipped), number), replace=False)] = 0
        return EpochPlan(epoch, torch.from_numpy(keep_least_counted(order, number, rng)))

    def learn(
        self, epoch: int, losses: Losses | None, above_mean: Marks | None, ranking: Ranking | None
    ) -> None:
        """Charge the steps of the epoch, note which samples were trained, and take the scores."""
        assert losses is not None
        skipped = self._skipped(epoch)
        steps = self._steps(epoch, len(skipped))
        self.budget.charge(epoch, steps)
        number = self.budget.samples(steps)
        if number < self._num_samples:
            left = ~self._chosen
            left[skipped] = False
            trained = ~np.isnan(losses)
            if left.sum() <= number - self._returning(len(skipped), number):
                self._chosen &= trained  # All were chosen, and these again: a new round.
            else:
                self._chosen |= trained
        if ranking is not None:
            self._scores = ranking.scores.float().cpu().numpy().copy()
        elif epoch + 1 == self.first_epoch < self.epochs and np.isneginf(self._scores).all():
            warn_user(
                "Adaptive has seen no logits, so it skips no sample for its label, and only "
                "shortens the epochs: call pruner.record(index, losses, logits, labels), or take "
                "fp.shorter if there are none"
            )

    def settings(self) -> dict[str, Any]:
        """Return what a state must agree on."""
        return {**super().settings(), "rates": self.budget.settings()}

    def state_dict(self) -> dict[str, Any]:
        """Return the scores, the samples of this round, and the lengths of the epochs."""
        return {**super().state_dict(), "lengths": list(self.budget.lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. If the size of a step has changed, shares of epochs are kept."""
        super().load_state_dict(state)
        self.budget.lengths = list(state["lengths"])

    def _skipped(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the samples that an epoch skips for their labels, as far as the budget allows."""
        if epoch < self.first_epoch:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self._scores > self.threshold)

    def _steps(self, epoch: int, skipped: int) -> int:
        return self.budget.steps(epoch, self._available(skipped))

    def _available(self, skipped: int) -> int:
        """Return how many samples an epoch has if it is shortened only by what is skipped."""
        return self._num_samples - skipped + round(self.returning * skipped)

    def _returning(self, skipped: int, number: int) -> int:
        """Return how many of the skipped samples an epoch of ``number`` samples trains.

        Their share is that of an epoch that is shortened only by what is skipped.
        """
        share = min(number / max(self._available(skipped), 1), 1)
        return round(share * round(self.returning * skipped))
