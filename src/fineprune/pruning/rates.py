"""Learning rates in the forms in which users have them: numbers, a function, or a scheduler."""

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from fineprune.errors import InputError, explaining

# A warm-up may end at this share of the largest rate.
_RISEN = 0.95

Rates = Callable[[float], float] | Sequence[float] | npt.NDArray[Any] | torch.Tensor | LRScheduler


def rates_of(rates: Rates, number: int, by: str = "epochs") -> list[float]:
    """Return the learning rate of each epoch, or of each optimizer step of a training.

    Args:
        rates: One number for each; a function of the progress in epochs, evaluated in the middle of
            each epoch, or of the number of steps taken; or a torch scheduler that is stepped once
            for each, of which a copy is stepped.
        number: Number of epochs or steps.
        by: "epochs" or "steps".

    Raises:
        InputError: The rates are not known in advance, or do not fit.
    """
    if isinstance(rates, LRScheduler):
        if isinstance(rates, OneCycleLR) and rates.total_steps > number:
            raise InputError(
                f"expected a OneCycleLR for {number} {by}, got one for {rates.total_steps} steps, "
                f"whose rate would not fall completely: make it with pruner.total_steps(), and "
                f"give it to pruner.set_rates(scheduler, by='steps')"
            )
        found = _stepped(rates, number)
    elif callable(rates):
        with explaining(
            "expected rates as a function of the progress, such as 0.5, cannot call it",
            (TypeError, LookupError),
            ": give a list of numbers",
        ):
            found = [rates(one + 0.5 if by == "epochs" else one) for one in range(number)]
    else:
        if isinstance(rates, str) or not isinstance(rates, Sequence | np.ndarray | torch.Tensor):
            raise InputError(
                f"expected rates as one number per epoch, a function, or a torch learning-rate "
                f"scheduler, got {type(rates).__name__}"
            )
        found = list(rates)
        if len(found) < number or (by == "epochs" and len(found) > number):
            raise InputError(
                f"expected one learning rate for each of {number} {by}, got {len(found)}: give as "
                f"many, or make the scheduler with pruner.total_steps()"
            )
    return _checked(found[:number])


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


def _steps_taken(scheduler: Any) -> int:
    """Return how often a scheduler was stepped; a ChainedScheduler counts in its parts alone."""
    if hasattr(scheduler, "last_epoch"):
        return int(scheduler.last_epoch)
    return max(map(_steps_taken, getattr(scheduler, "_schedulers", ())), default=0)


def _checked(rates: Sequence[float]) -> list[float]:
    try:
        listed = [float(rate) for rate in rates]
    except (TypeError, ValueError):
        raise InputError(f"expected learning rates as numbers, got {rates[0]!r}") from None
    if not all(math.isfinite(rate) and rate >= 0 for rate in listed) or not any(listed):
        raise InputError(f"expected learning rates of at least 0, one of them above 0, got {rates}")
    return listed


def _stand_in_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer for a scheduler, with the same groups but none of the parameters."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        given = {name: value for name, value in group.items() if name != "params"}
        # Schedulers step a rate that is a tensor in place.
        groups.append({**copy.deepcopy(given), "params": [torch.zeros(1)]})
    made = torch.optim.SGD(groups, lr=0.0)
    made.defaults.update(optimizer.defaults)  # Some schedulers take their largest rate from these.
    return made


def _stepped(scheduler: LRScheduler, number: int) -> list[float]:
    """Return the largest rate of all groups before each of so many steps of a scheduler's copy."""
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
    stand_in = _stand_in_of(scheduler.optimizer)
    copied = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
    rates: list[float] = []
    with warnings.catch_warnings():
        # The optimizer takes no steps, of which schedulers warn.
        warnings.simplefilter("ignore")
        for taken in range(number):
            try:
                if taken:
                    copied.step()
            except ValueError as error:  # OneCycleLR refuses a step too many.
                raise InputError(
                    f"expected a scheduler for {number} steps, got one that ends before: make it "
                    f"with pruner.total_steps(), or give by='steps' if it is stepped once per "
                    f"optimizer step"
                ) from error
            rates.append(max(float(group["lr"]) for group in stand_in.param_groups))
    return rates
