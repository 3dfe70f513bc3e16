"""The policies that a recipe can name, and their arguments and defaults, from their signatures.

A user's own policy is named as ``module:Class``.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fineprune.errors import InputError
from fineprune.importing import call_attribute
from fineprune.pruning.policies.fine_pruning import start_and_prune
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.policies.registry import POLICIES
from fineprune.pruning.policies.scheduled import ScheduledPolicy

POLICY_NAMES = tuple(POLICIES)

# Arguments that are not settings of the pruning section, but are made from other sections.
_MADE = ("epochs", "schedule", "rates")

# The settings that may stand beside a policy that has no use for them, so that one recipe can be
# trained with several policies.
_SHARED = ("save", "prune", "tolerance", "threshold", "first_epoch", "returning")

# The settings of several policies, which all others refuse.
OF_SOME = ("anneal", "rescale")


@functools.cache
def arguments_of(name: str) -> Mapping[str, Any]:
    """Return the arguments of a policy that are settings, with the defaults of its signature.

    The default is None if there is none.
    """
    return {
        key: None if parameter.default is parameter.empty else parameter.default
        for key, parameter in inspect.signature(POLICIES[name]).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and key not in _MADE
    }


@functools.cache
def defaults_of(name: str) -> Mapping[str, Any]:
    """Return the settings of a policy that have a default, with their defaults."""
    values = {key: value for key, value in arguments_of(name).items() if value is not None}
    if name == "infobatch":
        policy: Any = POLICIES[name](epochs=100)
        values["prune"] = policy.prune
    return values


# The settings that one policy has and all others would ignore, each with this policy.
ONLY_WITH = {
    key: name
    for name in POLICY_NAMES
    for key in arguments_of(name)
    if key not in (*_SHARED, *OF_SOME)
}


def make_policy(
    name: str, settings: Mapping[str, Any], made: Mapping[str, Callable[[], Any]]
) -> Policy:
    """Make the policy with this name.

    Args:
        settings: The settings of the pruning section that are set, by name; those that are no
            arguments of the policy are not used.
        made: Returns an argument that is no setting of this section: the number of epochs, the
            schedule or the learning rates.
    """
    takes = inspect.signature(POLICIES[name]).parameters
    values = {key: settings[key] for key in arguments_of(name) if key in settings}
    values |= {key: make() for key, make in made.items() if key in takes}
    return POLICIES[name](**values)


def own_policy(name: str, epochs: int, arguments: Mapping[str, Any]) -> Policy:
    """Import a class and make a policy of it. An exception in the class is passed on unchanged.

    The class (or a function that returns a policy) gets the number of epochs and the arguments.
    """
    policy = call_attribute(name, "a policy", epochs, **arguments)
    if not isinstance(policy, Policy):
        raise InputError(
            f"expected {name!r} to make a fineprune.Policy, got {type(policy).__name__}"
        )
    if policy.epochs != epochs:
        raise InputError(
            f"expected {name!r} to make a policy for {epochs} epochs, got {policy.epochs}: let its "
            f"property epochs return the first argument"
        )
    return policy


def follows_schedule(name: str) -> bool:
    """Return whether a policy saves as much as the recipe's schedule says."""
    return name in POLICIES and issubclass(POLICIES[name], ScheduledPolicy)


def takes_save(name: str) -> bool:
    """Return whether a policy can save the share that ``pruning.save`` says."""
    return name in POLICIES and "save" in arguments_of(name)


def schedule_for_saving(epochs: int, milestones: Sequence[int], save: float) -> dict[str, Any]:
    """Return the pruning settings of the schedule of ``FinePruning.for_saving``."""
    start, prune = start_and_prune(epochs, save, [m for m in milestones if m < epochs])
    return {
        "windows_per_interval": 1,
        "start": start,
        "prune": prune,
        "attenuation": 1.0,
        "block": 1,
        "count": 1,
    }
