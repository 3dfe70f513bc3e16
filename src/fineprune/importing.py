"""Import what a recipe names as ``module:attribute``."""

import importlib
import os
import sys
from typing import Any

from fineprune.errors import InputError


def import_attribute(name: str) -> Any:
    """Import ``module:attribute``: this runs the module's code, so only training does it.

    Raises:
        InputError: the module or the attribute is not there.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a module beside the recipe's caller, as `python -m` has
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"expected {name!r} to name module:attribute: {error}") from error
