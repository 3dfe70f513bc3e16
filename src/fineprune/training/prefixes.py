"""Prefixes of parameter names, with which a recipe names parts of a network.

A prefix consists of whole parts of a name: ``layer1`` covers ``layer1.0.conv1.weight``, but not
``layer10.weight``.
"""

import difflib
from collections.abc import Iterable, Sequence

from fineprune.errors import InputError


def covers(prefix: str, name: str) -> bool:
    """Return whether a prefix covers the name of a parameter or a module."""
    return name == prefix or name.startswith(f"{prefix}.")


def check_prefixes(setting: str, prefixes: Iterable[str], names: Sequence[str]) -> None:
    """Check that each prefix covers a parameter."""
    known = list(dict.fromkeys(start for name in names for start in _starts(name)))
    for prefix in prefixes:
        if prefix not in known:
            near = difflib.get_close_matches(prefix, known, n=1, cutoff=0.0)[0]
            raise InputError(
                f"expected {setting} to name parameters of the network by their first parts, got "
                f"{prefix!r}: did you mean {near!r}?"
            )


def _starts(name: str) -> list[str]:
    """Return all prefixes of a name, from the shortest one to the name itself."""
    parts = name.split(".")
    return [".".join(parts[:number]) for number in range(1, len(parts) + 1)]
