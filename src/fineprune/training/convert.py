"""Converts what a TOML file or a command line gives to a dataclass, and says what is wrong with it.

The annotations of the dataclass are the only description of its types and ranges, which msgspec
checks. This module adds names, given values and remedies to its messages.
"""

import dataclasses
import difflib
import json
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from fineprune.errors import InputError, check_one_of

# The ranges of settings.
Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

# What the user's own code, named as ``module:attribute``, is called as a choice.
OWN = "user-defined"

# The settings that only some choices of another setting have, each with its name, and with its
# default by these choices.
OnlyWith = Mapping[str, tuple[str, Mapping[str, Any]]]

_Section = TypeVar("_Section")

_TYPES = {
    "array": "a list",
    "object": "a table",
    "str": "a text",
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
}
_LIMITS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]*)`(?: (?P<sign>>=|<=|>|<) (?P<limit>\S+))?")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def converted(section: str, kind: type[_Section], values: Mapping[str, Any]) -> _Section:
    """Return a section as a dataclass.

    An integer may be given for a float. The text "none" unsets a setting that may be unset, which
    TOML has no value for.

    Args:
        section: The name of the section, for messages.
        kind: The dataclass, whose annotations say what is allowed.
        values: The settings as TOML has them.

    Raises:
        InputError: A key is not known, a value has a wrong type or is out of range, or a setting
            without a default is missing.
    """
    hints = get_type_hints(kind, include_extras=True)
    given = {}
    for key, value in values.items():
        check_known(f"key in [{section}]", key, hints)
        check_plain(f"{section}.{key}", value)
        unset = value == "none" and types.NoneType in get_args(hints[key])
        given[key] = None if unset else value
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InputError):  # One of the dataclass's own checks.
            raise error.__cause__ from None
        raise _explained(section, hints, given, str(error)) from None


def complete(section: str, settings: Any, only_with: OnlyWith) -> None:
    """Set the defaults of settings that only some choices have, and refuse them with others.

    Args:
        section: The name of the section, for messages.
        settings: The section as a dataclass, which is frozen for its users.
        only_with: The settings.
    """
    unset = {field.name: field.default for field in dataclasses.fields(settings)}
    for name, (other, defaults) in only_with.items():
        value, choice = getattr(settings, name), getattr(settings, other)
        kind = OWN if ":" in choice else choice
        if kind in defaults:
            if value is None:
                object.__setattr__(settings, name, defaults[kind])
        elif value != unset[name] and value != []:  # An empty list of TOML is an empty tuple.
            none = "none" if unset[name] is None else json.dumps(unset[name])
            raise InputError(
                f"expected {section}.{name} with {section}.{other} = {' or '.join(defaults)} only, "
                f"got {json.dumps(value)} with {choice!r}: set {section}.{name} = {none}"
            )


def check_known(what: str, given: str, known: Iterable[str]) -> None:
    """Raise InputError unless a name is known, naming a known one that is near."""
    names = list(known)
    if given not in names:
        near = difflib.get_close_matches(given, names, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names) or 'no keys'}"
        raise InputError(f"expected a known {what}, got {given!r}: {advice}")


def check_plain(name: str, value: Any) -> None:
    """Raise InputError unless a value can be written as TOML and as JSON."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            check_plain(f"{name}.{key}", entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            check_plain(name, entry)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"expected {name} to be a finite number, got {value}")
    elif isinstance(value, str) and value.encode("utf-8", "ignore").decode() != value:
        raise InputError(f"expected {name} to be text in UTF-8, got {value!r}")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise InputError(
            f"expected {name} to be a number, a text, a boolean, a list or a table, got {value!r}"
        )


def _explained(
    section: str, hints: Mapping[str, Any], values: Mapping[str, Any], message: str
) -> InputError:
    """Return the error that says in the project's words what msgspec says in its own."""
    if missing := _MISSING.match(message):
        return InputError(f"expected {section}.{missing[1]}, got none: set it")
    place = message.rpartition(" - at `$.")[2].removesuffix("`")
    key = re.split(r"[.\[]", place)[0]
    name, value = f"{section}.{place}", values.get(key)
    try:
        for choices in _parts(hints.get(key), Literal):
            check_one_of(name, str(value), get_args(choices))
    except InputError as error:
        return error
    expected = _EXPECTED.match(message)
    if expected is None:
        return InputError(f"expected {name} to be correct, got {value!r}: {message}")
    if expected["sign"]:
        what = f"{_LIMITS[expected['sign']]} {expected['limit'].removesuffix('.0')}"
        for meta in _parts(hints.get(key), Meta):
            if meta.ge is not None and meta.le is not None:
                what = f"in [{meta.ge}, {meta.le}]"
    else:
        kinds = [_TYPES.get(one, one) for one in expected["kinds"].split(" | ") if one != "null"]
        what = " or ".join(k for k in kinds if k != "a whole number" or "a number" not in kinds)
    return InputError(f"expected {name} to be {what}, got {value!r}")


def _parts(hint: Any, kind: Any) -> Iterator[Any]:
    """Yield each ``Meta`` or ``Literal`` in a type."""
    if get_origin(hint) is kind or (kind is Meta and isinstance(hint, Meta)):
        yield hint
    for part in get_args(hint):
        yield from _parts(part, kind)
