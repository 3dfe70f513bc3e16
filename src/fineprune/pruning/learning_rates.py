"""Learning rates in the forms in which users have them: numbers, a function, or a scheduler."""

import copy
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, OneCycleLR, ReduceLROnPlateau

from fineprune.errors import InputError, explaining, warn_user

# Rates that differ by a smaller share are the same.
_SAME = 0.01

# A warm-up may end at this share of the largest rate.
_RISEN = 0.95

Rates = Callable[[float], float] | Sequence[float] | npt.NDArray[Any] | torch.Tensor | LRScheduler


def rates_of_epochs(rates: Rates, epochs: int) -> list[float]:
    """Return the learning rate of each epoch.

    Args:
        rates: One number per epoch; a function of the progress in epochs, evaluated in the middle
            of each epoch; or a torch scheduler that is stepped once per epoch.
        epochs: Number of training epochs.
    """
    if isinstance(rates, LRScheduler):
        if isinstance(rates, OneCycleLR) and rates.total_steps > epochs:
            raise InputError(
                f"expected a scheduler that is stepped once in each of {epochs} epochs, got "
                f"OneCycleLR with {rates.total_steps} steps: give one number per epoch, or "
                f"the scheduler to a pruner's set_rates(scheduler, by='steps')"
            )
        return _checked(_stepped(rates, epochs))
    if callable(rates):
        with explaining(
            "expected rates as a function of the progress in epochs, such as 0.5, cannot call it",
            (TypeError, LookupError),
            ": give a list of one number per epoch",
        ):
            found = [rates(epoch + 0.5) for epoch in range(epochs)]
        return _checked(found)
    given = _listed(rates)
    if len(given) != epochs:
        raise InputError(
            f"expected one learning rate for each of {epochs} epochs, got {len(given)}"
        )
    return _checked(given)


class FollowedScheduler:
    """Compares the rate of an optimizer with the one that its scheduler should have set.

    Copies of a policy follow the same two, which stay the user's alone; another process follows
    none.

    Args:
        scheduler: A scheduler that is stepped once per epoch, or once per optimizer step.
        by: Which of these it is, "epochs" or "steps".
        rates: The rate before each of its steps, from ``rates_of_epochs`` or ``rates_of_steps``.
        tolerance: The number of its steps by which it may be ahead or behind, since loops step
            schedulers at the beginning or at the end of an epoch, or in between.
    """

    def __init__(
        self, scheduler: LRScheduler, by: str, rates: Sequence[float], tolerance: int
    ) -> None:
        self._optimizer: weakref.ref[Optimizer] | None = weakref.ref(scheduler.optimizer)
        self._scheduler: weakref.ref[LRScheduler] | None = weakref.ref(scheduler)
        self._by = by
        self._rates = tuple(rates)
        self._base = _largest_base(scheduler)
        self._tolerance = tolerance

    def deviation(self, epochs: int, steps: int) -> str | None:
        """Return what is wrong with the rate after so many epochs and steps, and what to do.

        None if they agree, at the end of the training, and if the optimizer takes no steps, since
        the scheduler was made for its rates alone.
        """
        optimizer = None if self._optimizer is None else self._optimizer()
        scheduler = None if self._scheduler is None else self._scheduler()
        taken, other, other_by = steps, epochs, "epochs"
        if self._by == "epochs":
            taken, other, other_by = epochs, steps, "steps"
        if optimizer is None or not 0 < taken < len(self._rates):
            return None
        if not getattr(optimizer, "_opt_called", False):  # Schedulers of torch read this, too.
            return None
        # A rate that changes slowly, or returns, does not show that it is the other kind.
        count = _steps_taken(scheduler)
        if count > 1 and count in (other - 1, other) and abs(count - taken) > 1:
            return (
                f"the scheduler was stepped {count} times in {epochs} epochs of {steps} optimizer "
                f"steps, but given with by={self._by!r}: give set_rates(scheduler, by={other_by!r})"
            )
        rate = _largest_rate(optimizer)
        base = _largest_base(scheduler)
        # A loaded state may have another largest rate. The ratios count.
        factor = base / self._base if base and self._base else 1.0
        near = self._rates[max(taken - 1 - self._tolerance, 0) : taken + 1 + self._tolerance]
        if factor * min(near) * (1 - _SAME) <= rate <= factor * max(near) * (1 + _SAME):
            return None
        return (
            f"the learning rate was {rate:.3g}, but the given scheduler should have set it to "
            f"{factor * self._rates[taken - 1]:.3g}: call scheduler.step() once per epoch (with "
            f"set_rates(scheduler, by='steps'), once per optimizer step, and give Pruner "
            f"accumulation=... if gradients are accumulated), or give the policy the rates that "
            f"you use"
        )

    def __deepcopy__(self, memo: object) -> "FollowedScheduler":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_optimizer": None, "_scheduler": None}


def _steps_taken(scheduler: Any) -> int:
    """Return how often a scheduler was stepped; a ChainedScheduler counts in its parts alone."""
    if hasattr(scheduler, "last_epoch"):
        return int(scheduler.last_epoch)
    return max(map(_steps_taken, getattr(scheduler, "_schedulers", ())), default=0)


def _largest_base(scheduler: Any) -> float | None:
    """Return the largest rate that a scheduler multiplies; None if it has no such rates."""
    return max(map(float, getattr(scheduler, "base_lrs", ())), default=None)


def _largest_rate(optimizer: Optimizer) -> float:
    return max(float(group["lr"]) for group in optimizer.param_groups)


def rates_of_steps(rates: Rates, steps: int, unpruned: int = 0) -> list[float]:
    """Return the learning rate of each optimizer step of a training.

    Args:
        rates: At least one number per step; a function of the number of steps taken; or a scheduler
            of torch that is stepped once per optimizer step.
        steps: Number of optimizer steps in the training.
        unpruned: Number of its optimizer steps without pruning. If it is given, a scheduler that is
            made for it gives rise to a warning.
    """
    if isinstance(rates, LRScheduler):
        if isinstance(rates, OneCycleLR) and rates.total_steps > steps:
            raise InputError(
                f"expected a OneCycleLR for {steps} steps, got one for {rates.total_steps}, whose "
                f"rate would not fall completely: make it with pruner.total_steps()"
            )
        # Where a falling rate ends is known only from what comes after.
        found = _stepped(rates, steps, unpruned + 2 * (unpruned // 20) + 2)
        _warn_of_later_end(found, steps, unpruned, rates)
        return _checked(found[:steps])
    if callable(rates):
        return _checked([rates(step) for step in range(steps)])
    given = _listed(rates)
    if len(given) < steps:
        raise InputError(
            f"expected one learning rate for each of {steps} steps, got {len(given)}: make the "
            f"scheduler with pruner.total_steps()"
        )
    return _checked(given[:steps])


def _warn_of_later_end(
    rates: list[float], steps: int, unpruned: int, scheduler: LRScheduler
) -> None:
    """Warn if rates fall to their end only where the training without pruning ends."""
    kind = type(scheduler).__name__
    if are_steps(rates):
        falls = [step for step, (a, b) in enumerate(itertools.pairwise(rates), 1) if a != b]
        if isinstance(scheduler, MultiStepLR):
            late = [step for step in falls if steps < step < unpruned]
        else:  # One that falls at regular distances has no end.
            ends = len(set(np.diff(falls))) > 1 and falls[-1] <= unpruned
            late = [step for step in falls if step > steps] if ends else []
        if late:
            warn_user(
                f"expected a scheduler for {steps} steps, got {kind} whose rate changes again "
                f"after {late[0]}, when the training has ended: make it with pruner.total_steps(), "
                f"not with the {unpruned} steps without pruning"
            )
        return
    peak = max(rates[:steps])
    fall = rates[rates.index(peak) :]
    least = max(min(fall), 0.0)
    length = next((step for step, rate in enumerate(fall) if rate <= least + 1e-4 * peak), 0)
    end = len(rates) - len(fall) + length
    falls_to_its_end = end > steps and fall[:length] == sorted(fall[:length], reverse=True)
    if not falls_to_its_end or abs(end - unpruned) > unpruned // 20:
        return
    last = rates[steps]
    if last > max(0.05 * peak, 2 * least):
        warn_user(
            f"expected a scheduler for {steps} steps, got {kind} for about the {unpruned} without "
            f"pruning, so the training ends at {last / peak:.0%} of the largest rate: make it with "
            f"pruner.total_steps()"
        )


def relative_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Return learning rates relative to the largest one, and 1 for those before it.

    While the rate rises (warm-up), a small rate is no reason to skip samples. The warm-up ends with
    the first peak that is nearly the largest one: those of a periodic schedule are not quite equal.
    """
    largest = max(rates)
    peak = next(epoch for epoch, rate in enumerate(rates) if rate >= _RISEN * largest)
    while peak + 1 < len(rates) and rates[peak + 1] > rates[peak]:
        peak += 1
    return tuple(1.0 if epoch < peak else rate / largest for epoch, rate in enumerate(rates))


def are_steps(rates: Sequence[float]) -> bool:
    """Return whether rates fall in steps, with at least two epochs per step on average."""
    return 2 * len(list(itertools.groupby(rates))) <= len(rates)


def _listed(rates: object) -> list[float]:
    if isinstance(rates, str) or not isinstance(rates, Sequence | np.ndarray | torch.Tensor):
        raise InputError(
            f"expected rates as one number per epoch, a function, or a torch learning-rate "
            f"scheduler, got {type(rates).__name__}"
        )
    return list(rates)


def _checked(rates: Sequence[float]) -> list[float]:
    try:
        listed = [float(rate) for rate in rates]
    except (TypeError, ValueError):
        raise InputError(
            f"expected learning rates as numbers, got {rates[0]!r}: give one number per epoch, a "
            f"function of the progress in epochs, or a torch learning-rate scheduler"
        ) from None
    if not all(math.isfinite(rate) and rate >= 0 for rate in listed) or not any(listed):
        raise InputError(f"expected learning rates of at least 0, one of them above 0, got {rates}")
    return listed


def stand_in_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer for a scheduler, with the same groups but none of the parameters."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        given = {name: value for name, value in group.items() if name != "params"}
        # Schedulers step a rate that is a tensor in place.
        groups.append({**copy.deepcopy(given), "params": [torch.zeros(1)]})
    made = torch.optim.SGD(groups, lr=0.0)
    made.defaults.update(optimizer.defaults)  # Some schedulers take their largest rate from these.
    return made


def _stepped(scheduler: LRScheduler, number: int, most: int = 0) -> list[float]:
    """Return the rate before each of so many steps of a scheduler, or of up to ``most`` if it can.

    A copy is stepped whose optimizer has the same groups and no parameters of the user's. The rate
    is the largest of all groups.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InputError(
            "expected learning rates that are known in advance, got ReduceLROnPlateau: give the "
            "rates that you expect, as one number per epoch"
        )
    taken = _steps_taken(scheduler)
    if taken > 0:
        raise InputError(
            f"expected a scheduler that was not stepped yet, since the rates of the whole training "
            f"are needed, got one after {taken} steps: give it before the training and before its "
            f"state is loaded, or give numbers"
        )
    stand_in = stand_in_of(scheduler.optimizer)
    copied = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
    rates = [_largest_rate(stand_in)]
    with warnings.catch_warnings():
        # The optimizer takes no steps, of which schedulers warn.
        warnings.simplefilter("ignore")
        while len(rates) < max(number, most):
            try:
                copied.step()
                rates.append(_largest_rate(stand_in))
            except Exception as error:
                if len(rates) >= number:
                    break
                if not isinstance(error, ValueError):
                    raise
                raise InputError(  # OneCycleLR refuses a step too many.
                    f"expected a scheduler for {number} steps, got one that ends before: make it "
                    f"with pruner.total_steps(), or give by='steps' if it is stepped once per "
                    f"optimizer step"
                ) from error
    return rates
