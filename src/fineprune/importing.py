"""Import what a recipe names as ``module:attribute``."""

import importlib
import os
import re
import sys
from typing import Any

from fineprune.errors import InputError

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_import_name(setting: str, name: str) -> None:
    """Raise InputError unless a setting has the form ``module:attribute``. Imports nothing."""
    if not _FORM.fullmatch(name):
        raise InputError(f"expected {setting} in the form module:attribute, got {name!r}")


def import_attribute(name: str) -> Any:
    """Import ``module:attribute``. This runs the module's code, so only training does it.

    Modules in the current directory are found, as with ``python -m``. An exception in the module's
    own code is passed on unchanged.
    """
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
