"""Recipes, which define a run completely, as TOML.

``settings`` describes and checks each section, and this module that the sections fit together.
"""

import dataclasses
import functools
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.pruning.schedule import Schedule
from fineprune.training.convert import check_known, converted
from fineprune.training.learning_rate import rate_at
from fineprune.training.packaged_recipes import recipe_file
from fineprune.training.policies import (
    PruningSettings,
    make_policy,
    pruning_settings,
    with_policy,
)
from fineprune.training.settings import (
    DataSettings,
    NetworkSettings,
    RunSettings,
    TrainingSettings,
)

Sections = Mapping[str, Mapping[str, Any]]

# The settings that have no effect on what is learned: they say where and how a run is carried out.
# Digests tell whether the files in another place are the same. The limits of [distributed] are
# those that a run is resumed with after it has failed because one of them was too short.
_PLACES = {
    "data": ("dir", "download", "train", "test", "without", "workers", "broken_limit"),
    "network": ("weights",),
    "distributed": ("placement", "silence_seconds", "snapshot_every"),
}

# What is allowed with simulated workers, and with parameter servers.
_WITHOUT_AVERAGE: dict[str, tuple[Any, ...]] = {"training.ema": (None,)}
_SERVED = _WITHOUT_AVERAGE | {
    "training.accumulation": (1,),
    "training.drop_last": (False,),
    "run.checkpoint_steps": (0,),
    "run.compile": ("off", "auto"),
}

# With 0.9 and two workers, a network that reaches 92 % reached 9 to 35 %.
_TOO_MUCH = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The complete description of a run; each section describes its own settings."""

    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    network: NetworkSettings = dataclasses.field(default_factory=NetworkSettings)
    training: TrainingSettings = dataclasses.field(default_factory=TrainingSettings)
    pruning: PruningSettings = dataclasses.field(default_factory=PruningSettings)
    distributed: Strategy = dataclasses.field(default_factory=Strategy)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        # What a policy sets by itself is added, so that the recipe is complete. Only training runs
        # the user's code.
        if not self.pruning.own and (prune := getattr(self.policy(), "prune", None)):
            complete = pruning_settings({"prune": prune, **self.pruning.section()})
            object.__setattr__(self, "pruning", complete)  # It is frozen for users.
        self._check_distributed()

    @property
    def accumulation(self) -> int:
        """The number of a process's batches whose mean gradient makes one optimizer step."""
        return self.training.accumulation * self.distributed.simulated_batches

    @property
    def stale_momentum(self) -> str | None:
        """Say that a momentum and stale gradients do not fit together; None if they may."""
        strategy = self.distributed
        groups = strategy.simulated_groups if strategy.simulate else strategy.groups
        stale = strategy.simulate or (strategy.served and not strategy.synchronous)
        used = self.training.momentum or 0.0  # It is unset for optimizers without one.
        if not stale or groups < 2 or used < _TOO_MUCH:
            return None
        return (
            f"a momentum of {used:g} with {groups} asynchronous workers: stale gradients add to "
            f"it, and the training may not learn; set training.momentum below {_TOO_MUCH:g}, or "
            f"use the optimizer of the recipe strategies (rmsprop-tf without momentum)"
        )

    def _check_distributed(self) -> None:
        """Raise InputError if a setting is not supported with servers or simulated workers."""
        strategy = self.distributed
        kind, limits = "distributed.simulate", _WITHOUT_AVERAGE if strategy.simulate else {}
        if strategy.served:
            kind, limits = f"distributed.strategy {strategy.strategy!r}", _SERVED
            if self.run.device.partition(":")[2]:
                raise InputError(
                    f"expected run.device without a number with {kind}, got {self.run.device!r}: "
                    f"Ray assigns the GPUs"
                )
        for name, allowed in limits.items():
            section, _, key = name.partition(".")
            given = getattr(getattr(self, section), key)
            if given not in allowed:
                wanted = "none" if allowed[0] is None else json.dumps(allowed[0])
                raise InputError(
                    f"expected {name} = {wanted} with {kind}, got {json.dumps(given)}: set it"
                )

    def policy(self) -> Policy:
        """Make the policy that the pruning section describes; the user's own runs their code."""
        return make_policy(
            self.pruning,
            epochs=self.training.epochs,
            milestones=self.training.milestones,
            rates=functools.partial(rate_at, self.training),
        )

    def schedule(self) -> Schedule | None:
        """Return the schedule that the policy follows; None without one."""
        policy = None if self.pruning.own else self.policy()
        return policy.schedule if isinstance(policy, ScheduledPolicy) else None

    def replaced(self, section: str, **values: Any) -> "Recipe":
        """Return a copy with some values of one section replaced."""
        current = getattr(self, section)
        if isinstance(current, PruningSettings):
            return dataclasses.replace(self, pruning=current.replaced(**values))
        return dataclasses.replace(self, **{section: dataclasses.replace(current, **values)})

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the sections as dicts of TOML values, without the settings that are None."""
        sections = {name: dataclasses.asdict(getattr(self, name)) for name in _KINDS}
        sections["pruning"] = self.pruning.section()
        return {
            field.name: {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in sections[field.name].items()
                if value is not None
            }
            for field in dataclasses.fields(self)
        }

    def to_toml(self) -> str:
        """Return the complete recipe as TOML."""
        return tomli_w.dumps(self.as_dict())

    def method(self) -> dict[str, dict[str, Any]]:
        """Return the settings that have an effect on what is learned.

        The others may change when a run is resumed, and between the runs that are compared.
        """
        method = {
            section: {k: v for k, v in values.items() if k not in _PLACES.get(section, ())}
            for section, values in self.as_dict().items()
        }
        return {**method, "run": {"seed": self.run.seed}}

    def differences(self, other: "Recipe") -> list[str]:
        """Return one phrase for each setting of ``method()`` in which two recipes differ."""
        return differences(self.method(), other.method())

    def changes_to(self, other: "Recipe") -> dict[str, dict[str, Any]]:
        """Return the settings that another recipe has instead of these, None for unset ones.

        The pruning section is given as a whole: one policy's arguments mean nothing to another.
        """
        changes, mine = {}, self.as_dict()
        for section, theirs in other.as_dict().items():
            own = mine[section]
            if section != "pruning":
                names = [key for key in {**own, **theirs} if own.get(key) != theirs.get(key)]
                changes[section] = {key: theirs.get(key) for key in names}
            elif own != theirs:
                changes[section] = theirs
        return {section: values for section, values in changes.items() if values}

    def changed(self, changes: Sections) -> "Recipe":
        """Return the recipe that ``changes_to`` has compared with this one."""
        own = self.as_dict()
        if "pruning" in changes:
            own["pruning"] = {}
        return make_recipe({name: {**own[name], **changes.get(name, {})} for name in own})


# The sections that are dataclasses of their own settings.
_KINDS: dict[str, type[Any]] = {
    "data": DataSettings,
    "network": NetworkSettings,
    "training": TrainingSettings,
    "distributed": Strategy,
    "run": RunSettings,
}


def differences(one: Sections, other: Sections) -> list[str]:
    """Return one phrase for each setting in which two mappings of sections differ."""
    phrases = []
    for section in dict.fromkeys([*one, *other]):
        first, second = one.get(section, {}), other.get(section, {})
        phrases += [
            f"{section}.{key} is {json.dumps(first.get(key))} and {json.dumps(second.get(key))}"
            for key in dict.fromkeys([*first, *second])
            if first.get(key) != second.get(key)
        ]
    return phrases


def read_recipe(path: Path, changes: Iterable[str] = ()) -> Recipe:
    """Read a recipe from TOML.

    Args:
        path: The TOML file, or the name of a packaged recipe, such as ``quick``.
        changes: Settings as ``section.key=value``, which replace those of the file.
    """
    try:
        sections = tomllib.loads(recipe_file(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"expected a recipe file, cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"expected TOML in {path}, cannot parse it: {error}") from error
    if not sections:
        raise InputError(
            f"expected the settings of a recipe in {path}, got none: start from a recipe that "
            f"'fineprune recipes NAME' prints"
        )
    return make_recipe(sections, changes)


def read_written_recipe(file: Path) -> Recipe:
    """Read the recipe in the folder of a run or a comparison, which this package wrote."""
    advice = " (restore the file, continue with the version that wrote it, or give another --out)"
    try:
        return read_recipe(file)
    except InputError as error:
        raise InputError(
            f"expected a recipe that this version of fineprune wrote in {file}, cannot read it: "
            f"{error}{advice}"
        ) from error


def make_recipe(sections: Mapping[str, Any], changes: Iterable[str] = ()) -> Recipe:
    """Make a recipe from the settings of each section, and changes as for ``read_recipe``.

    A change of the policy drops the arguments of the other one; see ``with_policy``.
    """
    merged: dict[str, dict[str, Any]] = {}
    for section, values in sections.items():
        if not isinstance(values, Mapping):
            raise InputError(
                f"expected [{section}] to be a section with keys, got {section} = {values!r}"
            )
        merged[section] = dict(values)
    of_pruning: dict[str, Any] = {}
    for section, key, value in map(_parsed, changes):
        if section == "pruning":
            of_pruning[key] = None if value == "none" else value
        else:
            merged.setdefault(section, {})[key] = value
    for section in merged:
        check_known("section", section, [*_KINDS, "pruning"])
    pruning = pruning_settings(with_policy(merged.pop("pruning", {}), of_pruning))
    made = {name: converted(name, _KINDS[name], values) for name, values in merged.items()}
    return Recipe(pruning=pruning, **made)


def _parsed(change: str) -> tuple[str, str, Any]:
    """Return the section, the key and the value of a change."""
    name, separator, text = change.partition("=")
    section, _, key = name.strip().partition(".")
    if not separator or not section or not key:
        raise InputError(f"expected section.key=value, such as training.epochs=20, got {change!r}")
    try:
        return section, key, tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return section, key, text.strip()  # A text may be given without quotes.
