"""The pruning section of a recipe: a policy, whose signature says what the section may contain.

A user's own policy is named as ``module:Class``.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from fineprune.errors import InputError, check_one_of
from fineprune.importing import call_attribute, check_import_name
from fineprune.pruning.policies.fine_pruning import start_and_prune
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.policies.registry import POLICIES
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.pruning.schedule import Schedule
from fineprune.training.convert import check_plain, converted

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


@dataclasses.dataclass(frozen=True)
class PruningSettings:
    """Which samples are skipped, and in which epochs (Algorithms 1 and 2 of Li et al., NPC 2018).

    In TOML, the arguments of the policy's constructor stand beside its name. A policy with a
    schedule has those of ``Schedule`` too: either all windows have the same length (``window``,
    with ``start`` in epochs), or they are made from the learning rate's milestones
    (``windows_per_interval``, with ``start`` as a fraction of each window).

    Attributes:
        policy: One of ``POLICY_NAMES``, or ``module:Class``, a user-defined policy, which is called
            with the number of epochs and the arguments.
        arguments: The arguments: numbers, texts, booleans, and lists and tables of them.
    """

    policy: str = "full"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str):
            raise InputError(f"expected pruning.policy to be a text, got {self.policy!r}")
        if self.own:
            check_import_name("pruning.policy", self.policy)
            check_plain("pruning", self.arguments)
        else:
            check_one_of("pruning.policy", self.policy, POLICY_NAMES)
            complete = _complete_arguments(self.policy, self.arguments)
            object.__setattr__(self, "arguments", complete)  # It is frozen for its users.

    @property
    def own(self) -> bool:
        """Whether the policy is the user's own. Making it runs the user's code."""
        return ":" in self.policy

    def section(self) -> dict[str, Any]:
        """Return the section as in TOML."""
        return {"policy": self.policy, **self.arguments}

    def replaced(self, **values: Any) -> "PruningSettings":
        """Return a copy with some arguments replaced, or with another policy.

        Another policy keeps only what says how much is skipped; see ``with_policy``.
        """
        return pruning_settings(with_policy(self.section(), values))


def pruning_settings(section: Mapping[str, Any]) -> PruningSettings:
    """Return the settings of a section as in TOML. None stands for a setting that is unset."""
    values = {key: value for key, value in section.items() if value is not None}
    return PruningSettings(values.pop("policy", "full"), values)


def with_policy(section: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with some values replaced, of which ``policy`` may be one.

    Of the arguments of another policy, those stay that say how much is skipped: the schedule with
    ``prune``, or ``save``. All others belong to one policy, even if two call them the same.
    """
    before = {"policy": "full", **section}
    policies = [before.pop("policy")]
    policies.append(values.get("policy", policies[0]))
    if policies[0] != policies[1]:
        kept: tuple[str, ...] = ()
        if all(isinstance(name, str) and follows_schedule(name) for name in policies):
            kept = ("prune", *(key for make in _SCHEDULES.values() for key in _arguments(make)))
        elif all(isinstance(name, str) and takes_save(name) for name in policies):
            kept = ("save",)
        before = {key: value for key, value in before.items() if key in kept}
    return before | {**values, "policy": policies[1]}


def make_policy(
    settings: PruningSettings,
    *,
    epochs: int,
    milestones: Sequence[int],
    rates: Callable[[float], float],
) -> Policy:
    """Make the policy that a pruning section describes; the user's own runs the user's code.

    Args:
        settings: The section.
        epochs: The number of epochs.
        milestones: The epochs, counted from 1, after which the learning rate falls.
        rates: The learning rate as a function of the progress in epochs.
    """
    if settings.own:
        return _own_policy(settings.policy, epochs, settings.arguments)
    made, values = POLICIES[settings.policy], dict(settings.arguments)
    if follows_schedule(settings.policy):
        make = next(make for kind, make in _SCHEDULES.items() if kind in values)
        of_schedule = {key: values.pop(key) for key in _arguments(make) if key in values}
        if make is not Schedule:
            of_schedule["milestones"] = [m for m in milestones if m < epochs]
        values["schedule"] = make(epochs=epochs, **of_schedule)
    given: dict[str, Any] = {"epochs": epochs, "rates": rates}
    takes = inspect.signature(made).parameters
    return made(**values, **{key: value for key, value in given.items() if key in takes})


def schedule_for_saving(epochs: int, milestones: Sequence[int], save: float) -> dict[str, Any]:
    """Return the pruning settings of the schedule of ``FinePruning.for_saving``."""
    start, prune = start_and_prune(epochs, save, [m for m in milestones if m < epochs])
    return {"windows_per_interval": 1, "start": start, "prune": prune}


def _own_policy(name: str, epochs: int, arguments: Mapping[str, Any]) -> Policy:
    """Call the user's class, or function that returns a policy."""
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


def _complete_arguments(policy: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a policy with the defaults of its signature, and check their types."""
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
        values = {k: v for k, v in values.items() if k == schedule or k not in _SCHEDULES}
    try:
        made = converted("pruning", _section_of(policy, schedule), values)
    except InputError as error:
        raise InputError(f"{error} (with pruning.policy = {policy!r})") from None
    # A default is an attribute of the class.
    found = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    return {key: value for key, value in found.items() if value is not None}


def _arguments(make: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each argument that a recipe may set."""
    hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    parameters = inspect.signature(make).parameters.items()
    return {name: (hints[name], given.default) for name, given in parameters if name not in _MADE}


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
