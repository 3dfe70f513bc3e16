"""The policies that a recipe can name. Their signatures say what ``[pruning]`` may contain.

A user's own policy is named as ``module:Class``.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from fineprune.errors import InputError
from fineprune.importing import call_attribute
from fineprune.pruning.policies.fine_pruning import start_and_prune
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.policies.registry import POLICIES
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.pruning.schedule import Schedule
from fineprune.training.convert import converted

POLICY_NAMES = tuple(POLICIES)

# Arguments that are made from other sections of a recipe.
_MADE = ("epochs", "milestones", "schedule", "rates")

# The two ways to describe a schedule, by the setting that only one of them has.
_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "window": Schedule,
    "windows_per_interval": Schedule.from_milestones,
}


def follows_schedule(name: str) -> bool:
    """Return whether a policy saves as much as the recipe's schedule says."""
    return name in POLICIES and issubclass(POLICIES[name], ScheduledPolicy)


def takes_save(name: str) -> bool:
    """Return whether a policy can save the share that ``pruning.save`` says."""
    return name in POLICIES and "save" in inspect.signature(POLICIES[name]).parameters


def complete_arguments(policy: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a policy with the defaults of its signature, and check their types.

    Args:
        policy: The name of a policy of fineprune.
        values: The keys of the pruning section, without ``policy``.

    Raises:
        InputError: The policy has no such argument, one has a wrong type, or one is missing.
    """
    schedule = None
    if follows_schedule(policy):
        chosen = [name for name in _SCHEDULES if values.get(name, "none") != "none"]
        if len(chosen) != 1:
            raise InputError(
                f"expected either pruning.window (epochs) or pruning.windows_per_interval with "
                f"pruning.policy = {policy!r}, got {' and '.join(chosen) or 'neither'}: set one of "
                f"them"
            )
        schedule = chosen[0]
        other = next(name for name in _SCHEDULES if name != schedule)
        values = {key: value for key, value in values.items() if key != other}
    try:
        made = converted("pruning", _section_of(policy, schedule), values)
    except InputError as error:
        raise InputError(f"{error} (with pruning.policy = {policy!r})") from None
    # A default is an attribute of the class.
    found = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    return {key: value for key, value in found.items() if value is not None}


def make_policy(
    name: str,
    arguments: Mapping[str, Any],
    *,
    epochs: int,
    milestones: Sequence[int],
    rates: Callable[[float], float],
) -> Policy:
    """Make a policy of fineprune.

    Args:
        name: The name of the policy.
        arguments: What ``complete_arguments`` returned.
        epochs: The number of epochs.
        milestones: The epochs, counted from 1, after which the learning rate falls.
        rates: The learning rate as a function of the progress in epochs.
    """
    values = dict(arguments)
    if follows_schedule(name):
        kind = "window" if "window" in values else "windows_per_interval"
        names = [key for key in _arguments(_SCHEDULES[kind]) if key in values]
        of_schedule = {key: values.pop(key) for key in names}
        if kind == "windows_per_interval":
            of_schedule["milestones"] = [m for m in milestones if m < epochs]
        values["schedule"] = _SCHEDULES[kind](epochs=epochs, **of_schedule)
    made = {"epochs": epochs, "rates": rates}
    takes = inspect.signature(POLICIES[name]).parameters
    values |= {key: value for key, value in made.items() if key in takes}
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


def carried_over(policy: str, arguments: Mapping[str, Any], other: str) -> dict[str, Any]:
    """Return the arguments that stay when another policy takes the place of a recipe's.

    These say how much is skipped: the schedule with ``prune``, or ``save``. All others belong to
    one policy, even if another has an argument of the same name.
    """
    if policy == other:
        return dict(arguments)
    names: set[str] = set()
    if follows_schedule(policy) and follows_schedule(other):
        names = {"prune", *(key for make in _SCHEDULES.values() for key in _arguments(make))}
    elif takes_save(policy) and takes_save(other):
        names = {"save"}
    return {key: value for key, value in arguments.items() if key in names}


def schedule_for_saving(epochs: int, milestones: Sequence[int], save: float) -> dict[str, Any]:
    """Return the pruning settings of the schedule of ``FinePruning.for_saving``."""
    start, prune = start_and_prune(epochs, save, [m for m in milestones if m < epochs])
    return {"windows_per_interval": 1, "start": start, "prune": prune}


def _arguments(make: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each argument that a recipe may set."""
    hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    found: dict[str, tuple[Any, Any]] = {}
    for name, parameter in inspect.signature(make).parameters.items():
        if name not in _MADE:
            found[name] = (hints[name], parameter.default)
    return found


@functools.cache
def _section_of(policy: str, schedule: str | None) -> type[Any]:
    """Return a dataclass with the settings of a policy, and of one way to describe a schedule."""
    arguments = _arguments(POLICIES[policy])
    if schedule is not None:
        arguments |= _arguments(_SCHEDULES[schedule])
        if schedule == "window":
            arguments["start"] = (arguments["start"][0], 0)
    fields: list[Any] = []
    for name, (hint, default) in arguments.items():
        # A number of samples may stand for a share, so an integer stays one.
        kind = hint | int if hint is float or float in get_args(hint) else hint
        if default is inspect.Parameter.empty:
            fields.append((name, kind))
        else:
            kind = kind | None if default is None else kind
            fields.append((name, kind, dataclasses.field(default=default)))
    return dataclasses.make_dataclass("Pruning", fields, kw_only=True)
