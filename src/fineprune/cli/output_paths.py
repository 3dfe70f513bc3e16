"""Check at the start, before hours of training, that results can be written and replace nothing."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fineprune.errors import InputError
from fineprune.writing import check_is_file


def check_file(option: str, path: Path, inputs: Iterable[Path] = ()) -> None:
    """Raise InputError unless a file can be written at ``path``. Its folders may be missing.

    Args:
        option: The option with the path.
        path: The file. It may exist, but must not be an input, nor a result of a run.
        inputs: The files that the command reads.
    """
    check_is_file(path, f"{option} to be a file")
    _check_above(option, path, path.parent)
    there = os.path.exists(path)  # Also if it cannot be looked up: Path.exists would raise.
    target = Path(os.path.realpath(path))
    for source in inputs:
        if _same(path, source) or (there and target.is_relative_to(os.path.realpath(source))):
            raise InputError(
                f"expected {option} not to be the input {source}, got {path}: give another name"
            )
    from fineprune.runs.files import is_run_file

    if is_run_file(path) and there:
        raise InputError(
            f"expected {option} not to be a file of a run, got {path}: give another name"
        )


def check_folder(path: Path) -> None:
    """Raise InputError unless files can be written to the folder ``--out``. It may be missing."""
    _check_above("--out", path, path)


def inputs_of(*recipes: Mapping[str, Any]) -> list[Path]:
    """Return the files of data and weights that recipes, given as their sections, name."""
    settings = ("data", "labels"), ("data", "train"), ("data", "test"), ("network", "weights")
    named = (recipe.get(section, {}).get(key) for recipe in recipes for section, key in settings)
    return [Path(name) for name in named if isinstance(name, str)]


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _check_above(option: str, path: Path, folder: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"expected {option} to be a path in UTF-8, got {str(path)!r}") from error
    there = next(part for part in (folder, *folder.parents, Path()) if os.path.exists(part))
    if not there.is_dir():
        raise InputError(
            f"expected {option} to be in a folder, got {path}, but {there} is a file: give another "
            f"path"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(
            f"expected {option} to be in a folder that can be written, got {path}, but {there} is "
            f"read-only: give another path"
        )
