"""Adaptive: the shorter schedule in one training, without the samples whose labels look wrong."""

import math
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, check_one_of, check_whole_number, warn_user
from fineprune.labels.ranking import Ranking
from fineprune.pruning.dropping_count import keep_least_counted
from fineprune.pruning.learning_rates import (
    Rates,
    are_steps,
    rates_of_epochs,
    rates_of_steps,
    relative_rates,
)
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import check_share
from fineprune.pruning.policies.policy import LossRecords, Policy
from fineprune.pruning.step_budget import rates_along_steps, smooth_weights, steps_of_epoch


class Adaptive(Policy):
    """Save a share of the optimizer steps, and skip the samples whose labels look wrong.

    The budget is ``(1 - save)`` of the steps of the full training. It is used exactly, and known
    before the start. The epochs are shortened so that the learning rate, as a function of the
    steps, falls as in ``fp.shorter``: as 1 - u^2 if it falls smoothly, and in proportion to it if
    it falls in steps. A shortened epoch chooses its samples at random, without repeats until all
    were chosen.

    From the epoch ``first_epoch`` on, samples are skipped whose score in the ranking of the labels
    (``fineprune.labels.ranking``) exceeds ``threshold``, except for the share ``returning`` of
    them, drawn anew in each epoch. The steps that this frees train the other samples in longer
    later epochs. The training loop must record logits and labels. Without them, no sample is
    skipped for its label, and a warning says so.

    Args:
        epochs: Number of training epochs.
        save: The share of the optimizer steps to save, in [0, 1).
        rates: The learning rate of each epoch: a sequence of ``epochs`` numbers, a function of the
            progress in epochs (0.0 to ``epochs``), or a torch scheduler that is stepped once per
            epoch. Only the ratios of the rates matter. For rates that change per step, see
            ``Pruner.set_rates``. By default, the rate is constant.
        threshold: The score above which a sample is skipped. A list of suspects begins at 0.
            Skipping needs more precision, since a skipped sample with a correct label is missed.
        first_epoch: The number of epochs that train before any sample is skipped for its label.
        returning: The share of the skipped samples that each epoch trains all the same.

    Raises:
        InputError: A value is out of range.
    """

    name: ClassVar[str] = "adaptive"
    _setting_names = ("epochs", "save", "rates", "threshold", "first_epoch", "returning")
    _array_names = ("_scores", "_chosen", "_trained")
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
        self._step_size = self._full_steps = self._budget = 0
        self.rates = self._weights = (1.0,) * self.epochs
        self._has_rates = rates is not None
        self._by_steps = False
        if rates is not None:
            self.set_rates(rates)
        self._forget(0)

    def _forget(self, num_samples: int) -> None:
        self._scores: npt.NDArray[np.float32] = np.full(num_samples, -np.inf, dtype=np.float32)
        self._chosen: npt.NDArray[np.bool_] = np.zeros(num_samples, dtype=np.bool_)
        self._trained: npt.NDArray[np.bool_] = np.zeros(num_samples, dtype=np.bool_)
        self._ranking: Ranking | None = None
        # How long each epoch was, as a share of a full one; None for one that was not trained.
        self._lengths: list[float | None] = [None] * self.epochs

    def bind(self, num_samples: int) -> None:
        """Allocate six bytes per sample."""
        super().bind(num_samples)
        self._forget(num_samples)

    def bind_steps(self, samples_per_step: int, steps_per_full_epoch: int) -> None:
        """Receive the size of an optimizer step, and compute the budget in steps.

        Raises:
            InputError: An epoch has no step, or one step per epoch is already more than the budget.
        """
        self._step_size = samples_per_step
        self._full_steps = steps_per_full_epoch
        full = self.epochs * steps_per_full_epoch
        self._budget = round((1 - self.save) * full)
        if self._budget < self.epochs or not full:
            raise InputError(
                f"expected at least one step of {samples_per_step} samples (batch x ranks x "
                f"accumulation) in each of {self.epochs} epochs, got {self._budget} steps with "
                f"save={self.save} of {self._num_samples} samples: save less, or set a smaller "
                f"batch_size"
            )

    @property
    def without_rates(self) -> str | None:
        """What a constant rate means for the training, and how to give the rates."""
        if self._has_rates or not self.save:
            return None
        return (
            "Adaptive was given no learning rates and takes them to be constant, so all epochs are "
            "shortened alike; if the rate falls, this costs more accuracy than to shorten the "
            "epochs with small rates: give rates=..., or call pruner.set_rates(scheduler) before "
            "the training"
        )

    def set_rates(self, rates: Rates, by: str = "epochs") -> None:
        """Receive the learning rates; see ``Pruner.set_rates``."""
        check_one_of("by", by, ("epochs", "steps"))
        self._by_steps = by == "steps"
        if self._by_steps:
            each = rates_of_steps(rates, self._budget)
            each = rates_along_steps(each, self.epochs, self._full_steps)
        else:
            each = rates_of_epochs(rates, self.epochs)
        self.rates = relative_rates(each)
        given = self._by_steps or are_steps(self.rates)
        self._weights = self.rates if given else smooth_weights(self.rates)
        self._has_rates = True

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of the whole training."""
        return self._budget

    def planned_numbers(self) -> list[int]:
        """Return how many samples each epoch keeps if none is skipped for its label."""
        used, numbers = 0, []
        for epoch in range(self.epochs):
            steps = self._steps(epoch, used, skipped=0)
            numbers.append(self._number_kept(steps))
            used += steps
        return numbers

    def num_kept(self, epoch: int) -> int | None:
        """Return None, because the number depends on the samples that are skipped."""
        return None

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Choose the samples of an epoch, which fill the steps that it is given."""
        skipped = self._skipped(epoch)
        number = self._number_kept(self._steps_now(epoch, len(skipped)))
        if number == self._num_samples:
            return EpochPlan.full(epoch, number)
        # Samples with a smaller number are preferred: those that return, those not yet chosen in
        # this round, those chosen already, and the others that are skipped.
        order = self._chosen.astype(np.uint8) + np.uint8(1)
        order[skipped] = 3
        order[rng.choice(skipped, self._returning(len(skipped), number), replace=False)] = 0
        return EpochPlan(epoch, torch.from_numpy(keep_least_counted(order, number, rng)))

    def observe(self, epoch: int, records: LossRecords) -> None:
        """Note which samples are trained."""
        self._trained[records.index] = True

    def observe_ranking(self, epoch: int, ranking: Ranking) -> None:
        """Take the scores, which are used once the epoch has ended."""
        self._ranking = ranking

    def end_epoch(self, epoch: int) -> None:
        """Charge the steps of the epoch, note which samples were chosen, and take the scores."""
        skipped = self._skipped(epoch)
        steps = self._steps_now(epoch, len(skipped))
        self._lengths[epoch] = steps / self._full_steps
        number = self._number_kept(steps)
        if number < self._num_samples:
            left = ~self._chosen
            left[skipped] = False
            if left.sum() <= number - self._returning(len(skipped), number):
                self._chosen &= self._trained  # All were chosen, and these again: a new round.
            else:
                self._chosen |= self._trained
        self._trained[:] = False
        ranking, self._ranking = self._ranking, None
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
        """Return what a state must agree on; not the rates of steps.

        These depend on the number of steps, and so on the number of ranks and the batch size, which
        may change when a training is resumed.
        """
        values = super().settings()
        return {**values, "rates": "of steps"} if self._by_steps else values

    def state_dict(self) -> dict[str, Any]:
        """Return the scores, the samples of this round, and the lengths of the epochs."""
        return {**super().state_dict(), "lengths": list(self._lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. If the size of a step has changed, shares of epochs are kept."""
        super().load_state_dict(state)
        self._lengths = list(state["lengths"])

    def steps_before(self, epoch: int) -> int:
        """Return the number of steps that the epochs before this one used.

        Epochs that were left out count as if they had been trained as planned.
        """
        used = 0
        for before, length in enumerate(self._lengths[:epoch]):
            if length is None:
                used += self._steps(before, used, skipped=0)
            else:
                used += round(length * self._full_steps)
        return used

    def _skipped(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the samples that an epoch skips for their labels, as far as the budget allows."""
        if epoch < self.first_epoch:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self._scores > self.threshold)

    def _steps_now(self, epoch: int, skipped: int) -> int:
        return self._steps(epoch, self.steps_before(epoch), skipped)

    def _steps(self, epoch: int, used: int, skipped: int) -> int:
        """Return the number of steps of an epoch, before which ``used`` steps were trained.

        It is the length that uses the budget up if as many samples are skipped in all epochs after
        it.
        """
        most = -(-self._available(skipped) // self._step_size)
        left = self._budget - used
        full = self._full_steps
        return steps_of_epoch(self._weights[epoch:], left, most=min(most, full), full=full)

    def _number_kept(self, steps: int) -> int:
        full = steps >= self._full_steps
        return self._num_samples if full else min(steps * self._step_size, self._num_samples)

    def _available(self, skipped: int) -> int:
        """Return how many samples an epoch has if it is shortened only by what is skipped."""
        return self._num_samples - skipped + round(self.returning * skipped)

    def _returning(self, skipped: int, number: int) -> int:
        """Return how many of the skipped samples an epoch of ``number`` samples trains.

        A shortened epoch has as large a share of them as one that is shortened only by what is
        skipped.
        """
        share = min(number / max(self._available(skipped), 1), 1)
        return round(share * round(self.returning * skipped))
