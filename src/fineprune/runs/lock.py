"""One writer per folder: an advisory lock that ends with the process that holds it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import filelock

from fineprune.errors import InputError

_NAME = ".lock"

# A process that was just killed may still be on its way out.
_PATIENCE_SECONDS = 1.0


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it is not there.

    The lock file stays in the folder, but the lock itself does not outlive its process, however
    that process ends. If nothing was written to a folder that was made here, it is removed again.

    Raises:
        InputError: Another process holds the lock, or the folder cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"expected a folder to write to, cannot make {folder}: {error.strerror}"
        ) from error
    file = folder / _NAME
    lock = filelock.FileLock(file, timeout=_PATIENCE_SECONDS)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise InputError(
            f"expected no other process that writes {folder}, but {_holder(file)} does: "
            f"wait until it has ended, or stop it"
        ) from None
    try:
        with contextlib.suppress(OSError):  # Windows lets nobody write a locked file
            file.write_text(str(os.getpid()))
        yield
    finally:
        if made and list(folder.iterdir()) == [file]:
            file.unlink()
            _remove_empty(made)
        lock.release()


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):  # another process has written to one
        for folder in folders:
            folder.rmdir()


def _holder(file: Path) -> str:
    try:
        number = file.read_text().strip()
    except OSError:
        number = ""
    return f"process {number}" if number.isdigit() else "one"
