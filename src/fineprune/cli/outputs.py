"""Check at the start, before hours of training, that the results can be written."""

import os
from pathlib import Path

from fineprune.errors import InputError


def check_file(option: str, path: Path) -> None:
    """Raise InputError unless a file can be written at ``path``. Its folders may be missing."""
    if _is_dir(path):
        raise InputError(f"expected {option} to be a file, got the folder {path}: add a file name")
    _check_above(option, path, path.parent)


def check_folder(option: str, path: Path) -> None:
    """Raise InputError unless files can be written to the folder ``path``. It may be missing."""
    _check_above(option, path, path)


def _check_above(option: str, path: Path, folder: Path) -> None:
    there = next(part for part in (folder, *folder.parents, Path()) if _exists(part))
    if not _is_dir(there):
        raise InputError(
            f"expected {option} to be in a folder, got {path}, but {there} is a file: give another "
            f"path"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(
            f"expected {option} to be in a folder that can be written, got {path}, but {there} is "
            f"read-only: give another path"
        )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, for example
        return False


def _is_dir(path: Path) -> bool:
    return _exists(path) and path.is_dir()
