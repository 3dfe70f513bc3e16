"""The user's own code that a recipe names: which version of it a run began with."""

import contextlib
import hashlib
import importlib.util
import os
import sys
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from fineprune.errors import InputError
from fineprune.training.recipe import Recipe


def code_digest(recipe: Recipe) -> str | None:
    """Return the SHA-256 digest of the source files of a recipe's own data, network and policy.

    These are the files of the named modules, and of the modules and packages beside them that they
    import. Nothing is imported. None if the recipe names no code of the user.
    """
    sections = (
        (recipe.data.own, recipe.data.name),
        (recipe.network.own, recipe.network.name),
        (recipe.pruning.own, recipe.pruning.policy),
    )
    modules = {name.partition(":")[0].partition(".")[0] for own, name in sections if own}
    if not modules:
        return None
    digest = hashlib.sha256()
    for file in sorted(file for module in modules for file in _sources(module)):
        digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def check_code(recipe: Recipe, begun: str | None) -> None:
    """Raise InputError if a recipe's own code is not that with this digest."""
    if code_digest(recipe) != begun:
        raise InputError(
            "expected the code of the recipe's own data, network and policy as when the run began, "
            "got another version: restore the files, or train into a new folder with run.code=none"
        )


def _sources(module: str) -> set[Path]:
    """Return the file of a top-level module or those of a package, and what is beside and used."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(module)
    folders = (spec and spec.submodule_search_locations) or ()
    files = {file for folder in folders for file in Path(folder).rglob("*.py")}
    if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
        files.add(Path(spec.origin))
    for file in tuple(files):
        beside = ModuleFinder([str(file.parent)])
        with contextlib.suppress(SyntaxError):  # Importing it will say so.
            beside.run_script(str(file))
        found: Any = beside.modules.values()
        files |= {Path(one.__file__) for one in found if one.__file__}
    return files
