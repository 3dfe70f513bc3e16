"""The policies that a recipe can name, and which settings decide how much each of them saves."""

import inspect

from fineprune.pruning.policies.registry import POLICIES
from fineprune.pruning.policies.scheduled import ScheduledPolicy

POLICY_NAMES = tuple(POLICIES)


def follows_schedule(name: str) -> bool:
    """Return whether a policy saves as much as the recipe's schedule says."""
    return name in POLICIES and issubclass(POLICIES[name], ScheduledPolicy)


def takes_save(name: str) -> bool:
    """Return whether a policy can save the share that ``pruning.save`` says."""
    return name in POLICIES and "save" in inspect.signature(POLICIES[name]).parameters
