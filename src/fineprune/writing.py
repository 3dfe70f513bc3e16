"""Writes files atomically: there is always either the old file or the new one, never a part."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from fineprune.errors import InputError, RunError

# The end of the name of a file that is not written completely. It is ours, because such files are
# replaced.
TEMPORARY = ".fineprune.tmp"


class WriteError(RunError, OSError):
    """A file cannot be written, for example because the disk is full."""


def cannot_write(path: Path, error: OSError) -> WriteError:
    """Return the error to raise if a file cannot be written."""
    return WriteError(f"cannot write {path}: {error.strerror or error}")


def make_folder(folder: Path) -> None:
    """Make a folder for results, if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None


def temporary_of(path: Path) -> Path:
    """Return where a file is written before it replaces ``path``."""
    return path.with_name(path.name + TEMPORARY)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` if the block ends without an exception.

    After an exception, the old file is unchanged, and the temporary file is removed. A symbolic
    link stays one: what it points to is replaced.

    Raises:
        InputError: The path is that of a folder, a device or a pipe.
        WriteError: The file cannot be written.
    """
    check_is_file(path)
    target = Path(os.path.realpath(path))
    temporary = temporary_of(target)
    try:
        with temporary.open("wb") as file, _error_of_file():
            yield file
            flush(file)
        temporary.replace(target)
    except OSError as error:
        _remove(temporary)
        raise cannot_write(path, error) from None
    except BaseException:
        _remove(temporary)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write text in UTF-8, and replace a file at ``path`` atomically, as ``replacing`` does."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def flush(file: IO[Any]) -> None:
    """Write what is buffered of a file to the disk, if its file system can say when it is there."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise


def check_is_file(path: Path, expected: str = "a file to write") -> None:
    """Raise InputError if a path, through symbolic links, leads to anything but a file.

    Args:
        path: The path. Nothing is wrong if there is nothing. If the path cannot be used, for
            example because it is too long, this is said by what opens it.
        expected: What is expected, for the message.
    """
    with contextlib.suppress(OSError):
        if path.is_dir():
            raise InputError(f"expected {expected}, got the folder {path}: add a file name")
        # As root, replacing /dev/null would break other programs.
        if path.exists() and not path.is_file():
            raise InputError(
                f"expected {expected}, got {path}, which is a device or a pipe: give the name of a "
                f"file"
            )


@contextlib.contextmanager
def _error_of_file() -> Iterator[None]:
    """Raise the error of a file that ``torch.save`` writes in place of torch's own.

    While torch closes its archive, an error of its own can replace that of the file.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
