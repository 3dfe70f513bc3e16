"""BudgetedPolicy: the common part of all policies that save an exact share of the steps.

The steps are saved where the learning rate is small, and where there are samples to skip.
"""

from typing import Any, Unpack

from fineprune.errors import InputError, check_one_of
from fineprune.pruning.learning_rates import (
    Rates,
    are_steps,
    rates_of_epochs,
    rates_of_steps,
    relative_rates,
)
from fineprune.pruning.plan_options import Options, check_share
from fineprune.pruning.policies.even_saving import check_save
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.step_budget import rates_along_steps, smooth_weights, steps_of_epoch


class BudgetedPolicy(Policy):
    """A policy that distributes a fixed number of optimizer steps over the epochs.

    The smaller the learning rate of an epoch, the fewer samples it keeps (``step_budget``). As far
    as the budget allows, it leaves out the samples that the policy skips for another reason, except
    for the share ``returning`` of them. The other arguments are those of ``Adaptive``.
    """

    _setting_names = ("epochs", "save", "rates", "returning")

    def __init__(
        self,
        epochs: float,
        save: float,
        rates: Rates | None,
        returning: float,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(epochs, **options)
        self.save = check_share("save", save, "[0, 1)")
        self.returning = check_share("returning", returning)
        if save:
            check_save(save, self.epochs - self._annealed, self.epochs)
        self._step_size = self._full_steps = self._budget = 0
        self.rates = self._weights = (1.0,) * self.epochs
        self._has_rates = rates is not None
        self._by_steps = False
        if rates is not None:
            self.set_rates(rates)

    @property
    def without_rates(self) -> str | None:
        """What a constant rate means for the training, and how to give the rates."""
        if self._has_rates or not self.save:
            return None
        return (
            f"{type(self).__name__} was given no learning rates and takes them to be constant, so "
            f"all epochs are shortened alike; if the rate falls, this costs more accuracy than to "
            f"shorten the epochs with small rates: give rates=..., or call "
            f"pruner.set_rates(scheduler) before the training"
        )

    def set_rates(self, rates: Rates, by: str = "epochs") -> None:
        """Receive the learning rates; see ``Pruner.set_rates``."""
        check_one_of("by", by, ("epochs", "steps"))
        self._by_steps = by == "steps"
        if self._by_steps:
            each = rates_of_steps(rates, self._budget)
            found = rates_along_steps(each, self.epochs, self._full_steps)
            self.rates = self._weights = relative_rates(found)
        else:
            self.rates = relative_rates(rates_of_epochs(rates, self.epochs))
            self._weights = self.rates if are_steps(self.rates) else smooth_weights(self.rates)
        self._has_rates = True

    def settings(self) -> dict[str, Any]:
        """Return what a state must agree on; not the rates of steps.

        These depend on the number of steps, and so on the number of ranks and the batch size, which
        may change when a training is resumed.
        """
        values = super().settings()
        return {**values, "rates": "of steps"} if self._by_steps else values

    def bind_steps(self, samples_per_step: int, steps_per_full_epoch: int) -> None:
        """Receive the size of an optimizer step, and compute the budget in steps.

        Raises:
            InputError: An epoch has no step, or one step per epoch is already more than the budget.
        """
        if not steps_per_full_epoch:
            raise InputError(
                f"expected at least one step of {samples_per_step} samples (batch x ranks x "
                f"accumulation) per epoch, got {self._num_samples} samples with drop_last: set a "
                f"smaller batch_size, or drop_last=False"
            )
        self._step_size = samples_per_step
        self._full_steps = steps_per_full_epoch
        full = self.epochs * steps_per_full_epoch
        shortened = self.epochs - self._annealed
        least = self._annealed * steps_per_full_epoch + shortened
        self._budget = round((1 - self.save) * full)
        if self._budget < least:
            raise InputError(
                f"expected save of at most {1 - least / full:.3g} with one step of "
                f"{samples_per_step} samples (batch x ranks x accumulation) in each epoch, got "
                f"{self.save}: save less, or set a smaller batch_size or anneal"
            )

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of the whole training."""
        return self._budget

    def _most_available(self, skipped: int) -> int:
        """Return how many samples an epoch has if it is shortened only by what is skipped."""
        return self._num_samples - skipped + round(self.returning * skipped)

    def _number_returning(self, skipped: int, number: int) -> int:
        """Return how many of the skipped samples an epoch of ``number`` samples trains.

        A shortened epoch has as large a share of them as one that is shortened only by what is
        skipped. The last epochs are the shortest ones: if all of the share returned there, up to a
        third of their samples had wrong labels.
        """
        share = min(number / max(self._most_available(skipped), 1), 1)
        return round(share * round(self.returning * skipped))

    def _planned(self, skipped: int) -> list[int]:
        """Return how many samples each epoch keeps if each has this many samples to skip."""
        numbers, used = [], 0
        for epoch in range(self.epochs):
            steps = self._steps(epoch, used, skipped)
            numbers.append(self._number_kept(steps))
            used += steps
        return numbers

    def _steps(self, epoch: int, used: int, skipped: int) -> int:
        """Return the number of steps of an epoch.

        Args:
            epoch: The epoch, from 0.
            used: The number of steps of all earlier epochs.
            skipped: The number of samples to skip in this and all later epochs, as far as the
                budget allows it.
        """
        if self.anneals(epoch):
            return self._full_steps
        return steps_of_epoch(
            self._weights[epoch : self.epochs - self._annealed],
            self._budget - used - self._annealed * self._full_steps,
            most=min(-(-self._most_available(skipped) // self._step_size), self._full_steps),
            full=self._full_steps,
        )

    def _number_kept(self, steps: int) -> int:
        if steps >= self._full_steps:
            return self._num_samples
        return min(steps * self._step_size, self._num_samples)
