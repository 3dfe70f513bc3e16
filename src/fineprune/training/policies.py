"""The policies that a recipe can name, and which settings decide how much each of them saves."""

import inspect
from typing import Any

from fineprune.pruning.policies.fine_pruning import start_and_prune
from fineprune.pruning.policies.registry import POLICIES
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.training.settings import TrainingSettings

POLICY_NAMES = tuple(POLICIES)


def follows_schedule(name: str) -> bool:
    """Return whether a policy saves as much as the recipe's schedule says."""
    return name in POLICIES and issubclass(POLICIES[name], ScheduledPolicy)


def takes_save(name: str) -> bool:
    """Return whether a policy can save the share that ``pruning.save`` says."""
    return name in POLICIES and "save" in inspect.signature(POLICIES[name]).parameters


def schedule_for_saving(training: TrainingSettings, save: float) -> dict[str, Any]:
    """Return the pruning settings of the schedule of ``FinePruning.for_saving``.

    Args:
        training: The training, whose milestones the schedule follows.
        save: The share of all sample-steps to skip, in (0, 1).

    Raises:
        InputError: ``save`` is out of range, or no schedule saves so much.
    """
    milestones = [milestone for milestone in training.milestones if milestone < training.epochs]
    start, prune = start_and_prune(training.epochs, save, milestones)
    return {
        "windows_per_interval": 1,
        "start": start,
        "prune": prune,
        "attenuation": 1.0,
        "block": 1,
        "count": 1,
    }
