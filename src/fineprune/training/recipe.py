"""Recipes: everything that defines a run, read from TOML and written as TOML.

Settings that do not fit together fail here, wrong ones in ``settings``: before anything is built.
"""

import dataclasses
import difflib
import json
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.policies.registry import POLICIES
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.pruning.schedule import Schedule
from fineprune.training.settings import (
    DataSettings,
    NetworkSettings,
    PruningSettings,
    RunSettings,
    TrainingSettings,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run: data, network, training, pruning, how it is spread and how it is run."""

    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    network: NetworkSettings = dataclasses.field(default_factory=NetworkSettings)
    training: TrainingSettings = dataclasses.field(default_factory=TrainingSettings)
    pruning: PruningSettings = dataclasses.field(
        default_factory=lambda: PruningSettings(policy="full")
    )
    distributed: Strategy = dataclasses.field(default_factory=Strategy)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        self.policy()  # a schedule that cannot be fails here
        if self.distributed.served:
            self._check_served()

    def _check_served(self) -> None:
        """Raise InputError where the recipe asks for what parameter servers do not do."""
        for section, name, usual, instead in (
            ("training", "accumulation", 1, "set training.batch_size and distributed.workers"),
            ("training", "drop_last", False, "the last update averages what is left"),
            ("run", "checkpoint_steps", 0, "checkpoints are made between epochs"),
        ):
            given = getattr(getattr(self, section), name)
            if given != usual:
                raise InputError(
                    f"expected {section}.{name} = {json.dumps(usual)} with distributed.strategy "
                    f"{self.distributed.strategy!r}, got {json.dumps(given)}: {instead}"
                )
        if self.run.compile == "on":
            raise InputError(
                f'expected run.compile = "off" with distributed.strategy '
                f'{self.distributed.strategy!r}, got "on": workers train the network as it is'
            )
        if self.run.device.partition(":")[2]:
            raise InputError(
                f"expected run.device without a number with distributed.strategy "
                f"{self.distributed.strategy!r}, got {self.run.device!r}: a worker is given its GPU"
            )

    def policy(self) -> Policy:
        """Make the policy that the pruning section describes."""
        policy = POLICIES[self.pruning.policy]
        if not issubclass(policy, ScheduledPolicy):
            return policy(self.training.epochs)
        settings = {name: getattr(self.pruning, name) for name in policy.recipe_settings}
        return policy(self.schedule(), **settings)

    def schedule(self) -> Schedule:
        """Make the schedule that the pruning section describes."""
        given = self.pruning
        rest: dict[str, Any] = {
            "attenuation": given.attenuation,
            "block": given.block,
            "count": given.count,
            "attenuate": given.attenuate,
        }
        if given.window is not None:
            assert isinstance(given.start, int)
            return Schedule(self.training.epochs, given.window, given.start, **rest)
        return Schedule.from_milestones(
            self.training.epochs,
            [m for m in self.training.milestones if m < self.training.epochs],
            given.windows_per_interval or 1,
            start=given.start,
            **rest,
        )

    def replaced(self, section: str, **values: Any) -> "Recipe":
        """Return a copy with some values of one section replaced."""
        changed = dataclasses.replace(getattr(self, section), **values)
        return dataclasses.replace(self, **{section: changed})

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the sections as plain dicts of what TOML can hold; values of None left out."""
        return {
            section: {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in values.items()
                if value is not None
            }
            for section, values in dataclasses.asdict(self).items()
        }

    def to_toml(self) -> str:
        """Write the recipe as TOML, complete."""
        lines: list[str] = []
        for section, values in self.as_dict().items():
            lines.append(f"[{section}]")
            # JSON's strings, numbers, booleans and lists of them are TOML's too.
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
            lines.append("")
        return "\n".join(lines)


def read_recipe(path: Path, changes: Iterable[str] = ()) -> Recipe:
    """Read a recipe from TOML.

    Args:
        path: the file.
        changes: ``section.key=value`` each, applied over the file's values.

    Raises:
        InputError: the file is not there, not TOML, or holds a wrong key or value.
    """
    try:
        text = path.read_text(encoding="utf-8")
        sections = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"expected a recipe file, cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"expected TOML in {path}: {error}") from error
    return make_recipe(sections, changes)


def make_recipe(sections: Mapping[str, Any], changes: Iterable[str] = ()) -> Recipe:
    """Make a recipe from nested mappings, with ``section.key=value`` changes over them.

    Raises:
        InputError: a key is not known (the nearest one is named) or a value is wrong.
    """
    merged = {key: dict(_section(key, value)) for key, value in sections.items()}
    for change in changes:
        name, separator, text = change.partition("=")
        section, dot, key = name.strip().partition(".")
        if not separator or not dot:
            raise InputError(f"expected --set section.key=value, got {change!r}")
        merged.setdefault(section, {})[key] = _parsed(text.strip())
    hints = get_type_hints(Recipe)
    made: dict[str, Any] = {}
    for section, values in merged.items():
        _known("section", section, hints)
        made[section] = _make_section(section, hints[section], values)
    return Recipe(**made)


def _section(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"expected [{key}] to be a section with keys, got {key} = {value!r}")
    return value


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string


def _make_section(section: str, settings: Any, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(settings)
    converted: dict[str, Any] = {}
    for key, value in values.items():
        _known(f"key in [{section}]", key, hints)
        converted[key] = _converted(f"{section}.{key}", hints[key], value)
    return settings(**converted)


def _known(kind: str, given: str, known: Mapping[str, Any]) -> None:
    if given not in known:
        near = difflib.get_close_matches(given, known, n=1, cutoff=0.0)
        raise InputError(f"expected a known {kind}, got {given!r}: did you mean {near[0]!r}?")


def _converted(name: str, hint: Any, value: Any) -> Any:
    """Check a value against a field's type; whole numbers pass where a float is expected."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        if get_origin(option) is tuple and isinstance(value, list):
            return tuple(_converted(name, get_args(option)[0], entry) for entry in value)
        if isinstance(option, type) and type(value) is option:
            return value
    if float in options and type(value) is int:
        return float(value)
    kinds = " or ".join(
        "list" if get_origin(option) is tuple else option.__name__
        for option in options
        if option is not type(None)
    )
    raise InputError(f"expected {name} to be {kinds}, got {value!r}")
