"""A user's own policy, which a recipe names as ``module:Class``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fineprune.errors import InputError
from fineprune.importing import call_attribute
from fineprune.pruning.plan_options import Options
from fineprune.pruning.policies.policy import Policy


def own_policy(name: str, epochs: int, arguments: Mapping[str, Any], options: Options) -> Policy:
    """Import a class and make a policy of it. An exception in the class is passed on unchanged.

    Args:
        name: The name of the class (or of a function that returns a policy), as ``module:Class``.
        epochs: The number of epochs, the first argument of the class.
        arguments: The keyword arguments of the class.
        options: The options that the recipe sets. They replace those of the policy.
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
    policy.plan_options = dataclasses.replace(policy.plan_options, **options)
    return policy
