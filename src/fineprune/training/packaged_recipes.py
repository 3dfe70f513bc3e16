"""The recipes that come with the package, which have names such as ``quick`` or ``paper/lenet``."""

import difflib
import itertools
import re
from pathlib import Path

import fineprune


def packaged_recipes() -> dict[str, Path]:
    """Return the files of the recipes that come with the package, by their names, sorted."""
    package = Path(fineprune.__file__).parent
    folder = package / "recipes"
    if not folder.is_dir():  # In a clone, from which the package is installed as editable.
        folder = package.parents[1] / "recipes"
    files = sorted(folder.rglob("*.toml"))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def recipe_file(given: Path) -> Path:
    """Return the file of a recipe: the given one, which is no folder, or else the packaged one."""
    return given if given.is_file() else packaged_recipes().get(given.as_posix(), given)


def nearest_name(given: Path) -> str | None:
    """Return the name of the packaged recipe that a path without a file may mean.

    The folder may be missing: ``lenet`` means ``paper/lenet``.
    """
    names = packaged_recipes()
    by_end = {name: name for name in names} | {Path(name).name: name for name in reversed(names)}
    wanted = given.with_suffix("").as_posix().removeprefix("recipes/")
    return next((by_end[end] for end in difflib.get_close_matches(wanted, by_end, n=1)), None)


def about(text: str) -> str:
    """Return the first sentence of the comment at the head of a recipe."""
    head = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.lstrip("# ") for line in head)
    return re.split(r"(?<=[.?])\s+(?=[A-Z])", comment)[0].removesuffix(".")
