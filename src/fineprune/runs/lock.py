"""An advisory lock that allows one writer per folder and ends with the process that holds it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import filelock

from fineprune.errors import InputError, explaining, first_line

# The file that is locked by the process that writes to the folder.
LOCK = ".lock"

# A process that has just been killed may need a moment to end.
_TIMEOUT_SECONDS = 1.0


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if it does not exist.

    The lock ends with the process, even if the process is killed; the lock file stays in the
    folder. If this function created the folder and nothing was written to it, the folder is
    removed again.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    with explaining(f"expected a folder to write to, cannot create {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK
    number = _number(file)
    if number and not number.isdigit():
        raise InputError(
            f"expected no file {LOCK} of another program in {folder}, got one: give another "
            f"folder, or remove the file"
        )
    # Whoever shares the folder through a group needs the lock, too, whatever the umask.
    lock = filelock.FileLock(file, timeout=_TIMEOUT_SECONDS, mode=0o664)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise InputError(
            f"expected no other process that writes to {folder}, got {_holder(file)}: wait until "
            f"it has ended, or stop it"
        ) from None
    except OSError as error:
        raise InputError(
            f"expected a folder to write to, cannot lock {file}: {error.strerror}: give another "
            f"folder, or make this file writable"
        ) from error
    try:
        # Where the filesystem has no locks, the file is the lock: it says whose it is already, and
        # is found to be that of a dead process only if it stays as it is.
        if not isinstance(lock, filelock.SoftFileLock):
            with contextlib.suppress(OSError):  # On Windows, a locked file cannot be written.
                file.write_text(str(os.getpid()))
        yield
    finally:
        with contextlib.suppress(OSError):  # It may have been moved or written to.
            if created and list(folder.iterdir()) == [file]:
                file.unlink()
                for path in created:
                    path.rmdir()
        lock.release()


def _holder(file: Path) -> str:
    """Describe the process that holds the lock, by its number if the file can be read."""
    number = _number(file)
    return f"process {number}" if number.isdigit() else "a process whose number is unknown"


def _number(file: Path) -> str:
    """Return the number of the process in the file, which more lines may follow, or ""."""
    try:
        return first_line(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
