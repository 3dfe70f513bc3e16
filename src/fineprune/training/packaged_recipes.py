"""The recipes that come with the package, which have names such as ``quick`` or ``paper/lenet``."""

import difflib
import itertools
import re
from pathlib import Path

import fineprune
from fineprune.errors import InputError


def packaged_recipes() -> dict[str, Path]:
    """Return the files of the recipes that come with the package, by their names, sorted."""
    package = Path(fineprune.__file__).parent
    folder = package / "recipes"
    if not folder.is_dir():  # In a clone, from which the package is installed as editable.
        folder = package.parents[1] / "recipes"
    files = sorted(folder.rglob("*.toml"))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def recipe_file(given: Path) -> Path:
    """Return the file of a recipe: the given one if it exists, or else the packaged one.

    A file with the name of a packaged recipe comes first, but not a folder, such as one with data.

    Raises:
        InputError: There is neither.
    """
    if given.is_file():
        return given
    names = packaged_recipes()
    file = names.get(given.as_posix(), given)
    if not file.exists():
        # The folder may be missing: ``lenet`` means ``paper/lenet``.
        by_end = {Path(name).name: name for name in reversed(names)}
        by_end |= {name: name for name in names}
        wanted = given.with_suffix("").as_posix().removeprefix("recipes/")
        near = difflib.get_close_matches(wanted, by_end, n=1)
        raise InputError(
            f"expected a recipe file or a name that fineprune recipes lists, cannot read {given}: "
            f"No such file or directory{f'; did you mean {by_end[near[0]]}?' if near else ''}"
        )
    return file


def about(text: str) -> str:
    """Return the first sentence of the comment at the head of a recipe."""
    head = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.lstrip("# ") for line in head)
    return re.split(r"(?<=[.?])\s+(?=[A-Z])", comment)[0].removesuffix(".")
