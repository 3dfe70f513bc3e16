"""Adaptive: the shorter schedule in one training, without the samples whose labels look wrong."""

import math
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, check_one_of, check_share, check_whole_number, warn_user
from fineprune.labels.ranking import Ranking
from fineprune.pruning.dropping_count import keep_least_counted
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.policy import Losses, Marks, Policy, Training
from fineprune.pruning.policies.step_budget import StepBudget
from fineprune.pruning.rates import Rates


class Adaptive(Policy):
    """Save a share of the optimizer steps, and skip the samples whose labels look wrong.

    The budget, ``(1 - save)`` of the steps of the full training, is used exactly. The epochs are
    shortened so that the learning rate, as a function of the steps, falls as in ``fp.shorter``
    (``step_budget.py``). A shortened epoch chooses its samples at random, without repeats until all
    were chosen.

    From the epoch ``first_epoch`` on, samples are skipped whose score in the ranking of the labels
    (``fineprune.labels.ranking``) exceeds ``threshold``, except for the share ``returning`` of
    them, drawn anew in each epoch. The steps that this frees train the other samples in longer
    later epochs. The training loop must record logits and labels. Without them, no sample is
    skipped for its label, and a warning says so.

    Args:
        epochs: Number of training epochs.
        save: The share of the optimizer steps to save, in [0, 1).
        rates: The learning rate of each epoch: numbers, a function of the progress in epochs, or a
            torch scheduler that is stepped once per epoch. Only their ratios matter. For rates that
            change per step, see ``Pruner.set_rates``. By default, the rate is constant.
        threshold: The score above which a sample is skipped. A list of suspects begins at 0.
            Skipping needs more precision, since a skipped sample with a correct label is missed.
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
        self._budget = StepBudget(self.epochs, self.save)
        if rates is not None:
            self.set_rates(rates)

    def begin(self, training: Training) -> None:
        """Compute the budget in steps, and allocate five bytes per sample."""
        super().begin(training)
        self._budget.begin(training)
        self._scores: npt.NDArray[np.float32] = np.full(self._num_samples, -np.inf, np.float32)
        # The samples that were chosen in this round.
        self._chosen: npt.NDArray[np.bool_] = np.zeros(self._num_samples, dtype=np.bool_)

    @property
    def without_rates(self) -> str | None:
        """What a constant rate means for the training, and how to give the rates."""
        if self._budget.has_rates or not self.save:
            return None
        return (
            "Adaptive was given no learning rates and takes them to be constant, so all epochs are "
            "shortened alike: give rates=..., or call pruner.set_rates(scheduler) before the "
            "training"
        )

    def set_rates(self, rates: Rates, by: str = "epochs") -> None:
        """Receive the learning rates; see ``Pruner.set_rates``."""
        check_one_of("by", by, ("epochs", "steps"))
        self._budget.set_rates(rates, by)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each epoch, relative to the largest one."""
        return self._budget.rates

    def steps_before(self, epoch: int) -> int:
        """Return the number of steps that the epochs before this one used, or were to use."""
        return self._budget.used_before(epoch)

    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> EpochPlan:
        """Choose the samples of an epoch, which fill the steps that it is given."""
        skipped = self._skipped(epoch)
        number = self._number(self._steps(epoch, len(skipped)))
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
        self._budget.charge(epoch, steps)
        number = self._number(steps)
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
        elif epoch + 1 == self.first_epoch < self.epochs and not self._is_ranked:
            warn_user(
                "Adaptive has seen no logits, so it skips no sample for its label, and only "
                "shortens the epochs: call pruner.record(index, losses, logits, labels), or take "
                "fp.shorter if there are none"
            )

    @property
    def _is_ranked(self) -> bool:
        return bool((self._scores > -np.inf).any())

    def suspicion(self) -> torch.Tensor | None:
        """Return the score of each label, float32, shape (N,); None without logits."""
        return torch.from_numpy(self._scores.copy()) if self._is_ranked else None

    def num_suspects(self) -> int | None:
        """Return the number of samples with a score above 0; None without logits."""
        return int((self._scores > 0).sum()) if self._is_ranked else None

    def settings(self) -> dict[str, Any]:
        """Return what a state must agree on."""
        return {**super().settings(), "rates": self._budget.settings()}

    def state_dict(self) -> dict[str, Any]:
        """Return the scores, the samples of this round, and the lengths of the epochs."""
        return {**super().state_dict(), "lengths": list(self._budget.lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. If the size of a step has changed, shares of epochs are kept."""
        super().load_state_dict(state)
        self._budget.lengths = list(state["lengths"])

    def _skipped(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the samples that an epoch skips for their labels, as far as the budget allows."""
        if epoch < self.first_epoch:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self._scores > self.threshold)

    def _steps(self, epoch: int, skipped: int) -> int:
        return self._budget.steps(epoch, self._available(skipped))

    def _number(self, steps: int) -> int:
        return min(self._budget.samples(steps), self._num_samples)

    def _available(self, skipped: int) -> int:
        """Return how many samples an epoch has if it is shortened only by what is skipped."""
        return self._num_samples - skipped + round(self.returning * skipped)

    def _returning(self, skipped: int, number: int) -> int:
        """Return how many of the skipped samples an epoch of ``number`` samples trains.

        Their share is that of an epoch that is shortened only by what is skipped.
        """
        share = min(number / max(self._available(skipped), 1), 1)
        return round(share * round(self.returning * skipped))
