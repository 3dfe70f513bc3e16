"""The options that every policy takes, and how they are applied to a plan.

A policy chooses samples by its own rule. The options then say which epochs train all samples, and
whether the losses are weighted.
"""

import math
import operator
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any, TypedDict

import numpy as np
import torch

from fineprune.errors import InputError
from fineprune.pruning.plan import EpochPlan


class Options(TypedDict, total=False):
    """The keyword arguments of a policy that become its ``PlanOptions``."""

    anneal: float
    rescale: bool


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of a policy. By default, all of them are off.

    Attributes:
        anneal: The share of the epochs, in [0, 1], that train all samples, at the end of the
            training.
        rescale: Whether the losses are weighted so that the expected weighted sum over the kept
            samples is the sum over all samples. The mean weight is then above one, which raises the
            effective learning rate.

    Raises:
        InputError: A value is out of range.
    """

    anneal: float = 0.0
    rescale: bool = False

    def __post_init__(self) -> None:
        check_share("anneal", self.anneal)
        if not isinstance(self.rescale, bool):
            raise InputError(f"expected rescale as True or False, got {self.rescale!r}")

    def settings(self) -> dict[str, Any] | None:
        """Return the options, which a saved state must match; None if all are off."""
        return None if self == PlanOptions() else asdict(self)


NAMES = tuple(field.name for field in fields(PlanOptions))


def check_share(name: str, value: object, interval: str = "[0, 1]") -> float:
    """Return ``value`` as a float.

    Args:
        name: What the value is called.
        value: What was given.
        interval: Whether 0 and 1 are allowed; one of "[0, 1]", "[0, 1)", "(0, 1]" and "(0, 1)".

    Raises:
        InputError: It is no number in the interval.
    """
    share = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    above = operator.le if interval.startswith("[") else operator.lt
    below = operator.le if interval.endswith("]") else operator.lt
    if not (above(0, share) and below(share, 1)):
        raise InputError(f"expected {name} as a share in {interval}, got {value!r}")
    return share


def rescaled(plan: EpochPlan, num_samples: int) -> EpochPlan:
    """Return a plan with weights, if it has none, whose sum over the kept samples is N."""
    if plan.weights is not None or plan.number == num_samples:
        return plan
    weights = np.full(num_samples, num_samples / plan.number, np.float32)
    return EpochPlan(plan.epoch, plan.kept, torch.from_numpy(weights))
