"""Import and call what a recipe names as ``module:attribute``."""

import contextlib
import importlib
import inspect
import os
import re
import sys
from typing import Any

from fineprune.errors import InputError, explaining

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_import_name(setting: str, name: str) -> None:
    """Raise InputError unless a setting has the form ``module:attribute``. Imports nothing."""
    if not _FORM.fullmatch(name):
        raise InputError(f"expected {setting} in the form module:attribute, got {name!r}")


def call_attribute(name: str, makes: str, /, *args: Any, **values: Any) -> Any:
    """Import ``module:attribute``, call it with arguments, and return what it returns.

    Modules in the current directory are found, as with ``python -m``. An exception in the user's
    own code is passed on unchanged. ``makes`` says what it makes, for error messages.
    """
    make = imported(name)
    if not callable(make):
        raise InputError(
            f"expected {name!r} to be a class or a function, got {type(make).__name__}"
        )
    if inspect.isabstract(make):
        lacks = ", ".join(sorted(make.__abstractmethods__))
        raise InputError(
            f"expected {name!r} to have all methods of its base class, got one without {lacks}: "
            f"implement them"
        )
    called = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in values.items())])
    expected = f"expected {name!r} to make {makes} when called with ({called})"
    # A callable written in C tells nothing about its arguments, which is a ValueError.
    with explaining(expected, TypeError), contextlib.suppress(ValueError):
        inspect.signature(make).bind(*args, **values)
    return make(*args, **values)


def imported(name: str) -> Any:
    """Import the module of ``module:attribute``, and return the attribute."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but does not find something that it imports
        raise InputError(
            f"expected {name!r} to name module:attribute, but there is no module {error.name!r} "
            f"in {os.getcwd()} or among the installed packages"
        ) from error
    if not hasattr(module, attribute):
        raise InputError(
            f"expected {name!r} to name module:attribute, but {module.__file__} has no attribute "
            f"{attribute!r}"
        )
    return getattr(module, attribute)
