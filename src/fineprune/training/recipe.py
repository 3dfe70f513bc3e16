"""Recipes, which define a run completely. They are read from TOML and written as TOML.

All errors are found before anything is built: ``settings`` checks each section, and this module
checks that the sections fit together.
"""

import dataclasses
import difflib
import functools
import json
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.schedule import Schedule
from fineprune.training.learning_rate import rate_at
from fineprune.training.packaged_recipes import nearest_name, recipe_file
from fineprune.training.policies import make_policy, own_policy
from fineprune.training.settings import (
    DataSettings,
    NetworkSettings,
    PruningSettings,
    RunSettings,
    TrainingSettings,
)

# The settings that have no effect on what is learned: they say where and how a run is carried out.
# Digests tell whether the files in another place are the same. The limits of [distributed] are
# those that a run is resumed with after it has failed because one of them was too short.
_PLACES = {
    "data": ("dir", "download", "train", "test", "without", "workers", "broken_limit"),
    "network": ("weights",),
    "distributed": (
        "placement",
        "silence_seconds",
        "silence_factor",
        "startup_seconds",
        "link_seconds",
        "snapshot_every",
    ),
}

# What TOML calls the types of settings that have several values.
_KINDS: dict[Any, str] = {tuple: "list", dict: "table"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The complete description of a run; each section describes its own settings."""

    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    network: NetworkSettings = dataclasses.field(default_factory=NetworkSettings)
    training: TrainingSettings = dataclasses.field(default_factory=TrainingSettings)
    pruning: PruningSettings = dataclasses.field(
        default_factory=lambda: PruningSettings(policy="full")
    )
    distributed: Strategy = dataclasses.field(default_factory=Strategy)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        if not self.pruning.own:  # Only training runs the user's code.
            self.policy()  # Raises an error if the schedule is impossible.
        if self.distributed.served:
            self._check_served()
        if self.distributed.simulate and self.training.ema is not None:
            raise InputError(
                f"expected training.ema = none with distributed.simulate, got {self.training.ema}: "
                f"the weights of simulated workers are not averaged"
            )

    @property
    def accumulation(self) -> int:
        """The number of a process's batches whose mean gradient makes one optimizer step."""
        return self.training.accumulation * self.distributed.simulated_batches

    def _check_served(self) -> None:
        """Raise InputError if a setting is not supported with parameter servers."""
        for section, name, values, advice in (
            ("training", "accumulation", [1], "set training.batch_size and distributed.workers"),
            ("training", "drop_last", [False], "the last update averages the remaining samples"),
            ("training", "ema", [None], "the servers keep no moving average"),
            ("run", "checkpoint_steps", [0], "checkpoints are written between epochs"),
            ("run", "compile", ["off", "auto"], "workers do not compile the network"),
        ):
            given = getattr(getattr(self, section), name)
            if given not in values:
                wanted = "none" if values[0] is None else json.dumps(values[0])
                raise InputError(
                    f"expected {section}.{name} = {wanted} with distributed.strategy "
                    f"{self.distributed.strategy!r}, got {json.dumps(given)}: {advice}"
                )
        if self.run.device.partition(":")[2]:
            raise InputError(
                f"expected run.device without a number with distributed.strategy "
                f"{self.distributed.strategy!r}, got {self.run.device!r}: Ray assigns the GPUs"
            )

    def policy(self) -> Policy:
        """Make the policy that the pruning section describes.

        If it is the user's own, this runs the user's code.
        """
        pruning, epochs = self.pruning, self.training.epochs
        if pruning.own:
            return own_policy(pruning.policy, epochs, pruning.arguments or {})
        made: dict[str, Callable[[], Any]] = {
            "epochs": lambda: epochs,
            "schedule": self.schedule,
            "rates": lambda: functools.partial(rate_at, self.training),
        }
        return make_policy(pruning.policy, pruning.given(), made)

    def schedule(self) -> Schedule:
        """Make the schedule that the pruning section describes."""
        pruning = self.pruning
        names = ("attenuation", "block", "count", "attenuate")
        options: dict[str, Any] = {name: getattr(pruning, name) for name in names}
        if pruning.window is not None:
            assert isinstance(pruning.start, int)
            return Schedule(self.training.epochs, pruning.window, pruning.start, **options)
        return Schedule.from_milestones(
            self.training.epochs,
            [m for m in self.training.milestones if m < self.training.epochs],
            pruning.windows_per_interval or 1,
            start=pruning.start,
            **options,
        )

    def replaced(self, section: str, **values: Any) -> "Recipe":
        """Return a copy with some values of one section replaced."""
        changed = dataclasses.replace(getattr(self, section), **values)
        return dataclasses.replace(self, **{section: changed})

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the sections as dicts of TOML values, without the settings that are None."""
        return {
            section: {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in values.items()
                if value is not None
            }
            for section, values in dataclasses.asdict(self).items()
        }

    def to_toml(self) -> str:
        """Return the complete recipe as TOML."""
        lines: list[str] = []
        for section, values in self.as_dict().items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
            lines.append("")
        return "\n".join(lines)

    def method(self) -> dict[str, dict[str, Any]]:
        """Return the settings that have an effect on what is learned; see ``method_of``."""
        return method_of(self.as_dict())

    def differences(self, other: "Recipe") -> list[str]:
        """Return one phrase for each setting of ``method()`` in which two recipes differ."""
        return differences(self.method(), other.method())


def method_of(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings of a recipe that have an effect on what is learned.

    This is the definition of what may differ between runs. The other settings may change when a run
    is resumed, between the runs of a comparison, and between runs that a report compares. The
    sections are without the settings that are None.
    """
    method = {
        section: {k: v for k, v in values.items() if k not in _PLACES.get(section, ())}
        for section, values in sections.items()
    }
    method["run"] = {k: v for k, v in sections.get("run", {}).items() if k == "seed"}
    return method


def differences(
    one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]
) -> list[str]:
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
    except FileNotFoundError as error:
        near = nearest_name(path)
        raise InputError(
            f"expected a recipe file or a name that fineprune recipes lists, cannot read {path}: "
            f"{error.strerror}{'' if near is None else f'; did you mean {near}?'}"
        ) from error
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
    try:
        return read_recipe(file)
    except InputError as error:
        raise InputError(
            f"expected a recipe that this version of fineprune wrote in {file}, cannot read it: "
            f"{error} (restore the file, continue with the version that wrote it, or give another "
            f"--out)"
        ) from error


def make_recipe(sections: Mapping[str, Any], changes: Iterable[str] = ()) -> Recipe:
    """Make a recipe from the settings of each section, and changes as for ``read_recipe``."""
    merged = {key: dict(_section(key, value)) for key, value in sections.items()}
    for change in changes:
        name, separator, text = change.partition("=")
        section, _, key = name.strip().partition(".")
        if not separator or not section or not key:
            raise InputError(f"expected --set section.key=value, got {change!r}")
        merged.setdefault(section, {})[key] = _parse(text.strip())
    kinds = get_type_hints(Recipe)
    given = convert_sections(kinds, merged)
    return Recipe(**{section: kinds[section](**values) for section, values in given.items()})


def convert_sections(
    kinds: Mapping[str, Any], sections: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Check the keys of sections of TOML, and convert the values to the types of their fields.

    ``kinds`` holds the dataclass of each section that is known.
    """
    converted: dict[str, dict[str, Any]] = {}
    for section, values in sections.items():
        _check_known("section", section, kinds)
        hints = get_type_hints(kinds[section])
        converted[section] = {}
        for key, value in _section(section, values).items():
            _check_known(f"key in [{section}]", key, hints)
            converted[section][key] = _convert(f"{section}.{key}", hints[key], value)
    return converted


def _section(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"expected [{key}] to be a section with keys, got {key} = {value!r}")
    return value


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{_toml(key)} = {_toml(entry)}" for key, entry in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # In JSON and TOML, numbers, booleans and strings look the same, except for one character that
    # TOML requires to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # A string may be given without quotes.


def _check_known(kind: str, given: str, known: Mapping[str, Any]) -> None:
    if given not in known:
        near = difflib.get_close_matches(given, known, n=1, cutoff=0.0)
        raise InputError(f"expected a known {kind}, got {given!r}: did you mean {near[0]!r}?")


def _convert(name: str, hint: Any, value: Any) -> Any:
    """Convert a TOML value to the type of its field; an integer may be given for a float.

    The text "none" unsets a setting that may be unset, which TOML has no value for.
    """
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value == "none" and types.NoneType in options:
        return None
    for option in options:
        if get_origin(option) is tuple and isinstance(value, list):
            return tuple(_convert(name, get_args(option)[0], entry) for entry in value)
        if get_origin(option) is dict and isinstance(value, dict):
            return value
        if isinstance(option, type) and type(value) is option:
            if isinstance(value, str):
                _check_text(name, value)
            return value
    if float in options and type(value) is int:
        return float(value)
    kinds = " or ".join(
        _KINDS.get(get_origin(option)) or option.__name__
        for option in options
        if option is not type(None)
    )
    raise InputError(f"expected {name} to be {kinds}, got {value!r}")


def _check_text(name: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"expected {name} to be text in UTF-8, got {value!r}") from error
