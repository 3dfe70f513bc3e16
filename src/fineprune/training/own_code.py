"""The user's own code that a recipe names: which version of it a run began with."""

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

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
    names = [name for own, name in sections if own]
    if not names:
        return None
    files: set[Path] = set()
    for name in names:
        for file in _sources(name.partition(":")[0].partition(".")[0]):
            _add(file, files)
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def check_code(recipe: Recipe, begun: str | None) -> None:
    """Raise InputError if a recipe's own code is not that with this digest."""
    if code_digest(recipe) != begun:
        raise InputError(
            "expected the code of the recipe's own data, network and policy as when the run began, "
            "got another version: restore the files, or train into a new folder with run.code=none"
        )


def _sources(module: str) -> Iterator[Path]:
    """Yield the files of a top-level module, or of all modules of a package."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(module)
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from Path(folder).rglob("*.py")
    if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
        yield Path(spec.origin)


def _add(file: Path, files: set[Path]) -> None:
    """Add a file, and those beside it that it imports."""
    if file in files:
        return
    files.add(file)
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # Importing it will say so.
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            beside = file.parent / name.partition(".")[0]
            for other in (beside.with_suffix(".py"), *beside.rglob("*.py")):
                if other.is_file():
                    _add(other, files)
