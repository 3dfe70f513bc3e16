"""An advisory lock that allows one writer per folder and ends with the process that holds it."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import filelock

from fineprune.errors import InputError, RunError, explaining, reason_of

# The file that is locked by the process that writes to the folder.
LOCK = ".lock"

# A process that has just been killed may need a moment to end.
_TIMEOUT_SECONDS = 1.0

# What a file system without locks answers. filelock knows ENOSYS.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)

# The folders that this process has locked, and which file it has locked there.
_held: dict[Path, tuple[int, int]] = {}


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if it does not exist.

    The lock ends with the process, even if this is killed; its file stays, and is itself the lock
    on a file system without locks. A new folder to which nothing was written is removed again.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    with explaining(f"expected a folder to write to, cannot create {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK
    if (lines := _lines(file)) and not lines[0].isdigit():
        raise InputError(
            f"expected no file {LOCK} of another program in {folder}, got one: give another "
            f"folder, or remove the file"
        )
    lock = _acquired(file)
    try:
        # If the file is the lock, it says whose it is already.
        if not isinstance(lock, filelock.SoftFileLock):
            with contextlib.suppress(OSError):  # On Windows, a locked file cannot be written.
                file.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        _held[folder] = _identity(file)
        yield
    finally:
        own = _held.pop(folder, None)
        with contextlib.suppress(OSError):  # It may have been moved or written to.
            if created and own == _identity(file) and list(folder.iterdir()) == [file]:
                file.unlink()
                for path in created:
                    path.rmdir()
        lock.release()


def check_locked(folder: Path) -> None:
    """Raise RunError if a folder that this process has locked was renamed or replaced since."""
    held = _held.get(folder)
    with contextlib.suppress(OSError):
        if held is None or _identity(folder / LOCK) == held:
            return
    raise RunError(
        f"{folder} was renamed, removed or replaced while this process wrote to it, so it stops: "
        f"resume where the folder is now"
    )


def _acquired(file: Path) -> filelock.BaseFileLock:
    """Lock a file, or make it the lock if its file system has none."""
    there = file.exists()
    # Whoever shares the folder through a group needs the lock, too, whatever the umask.
    lock: filelock.BaseFileLock = filelock.FileLock(file, timeout=_TIMEOUT_SECONDS, mode=0o664)
    try:
        try:
            lock.acquire()
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if not there:
                file.unlink(missing_ok=True)  # It would be taken for the lock of another process.
            lock = filelock.SoftFileLock(file, timeout=_TIMEOUT_SECONDS, mode=0o664)
            lock.acquire()
    except filelock.Timeout:
        raise InputError(
            f"expected no other process that writes to {file.parent}, got {_holder(file)}: wait "
            f"until it has ended, or stop it; if it runs no more, remove {file}"
        ) from None
    except OSError as error:
        raise InputError(
            f"expected a folder to write to, cannot lock {file}: {reason_of(error)}: give another "
            f"folder"
        ) from error
    return lock


def _identity(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_dev, status.st_ino


def _holder(file: Path) -> str:
    """Describe the process that holds the lock, by its number if the file can be read."""
    lines = _lines(file)
    if not lines or not lines[0].isdigit():
        return "a process whose number is unknown"
    elsewhere = len(lines) > 1 and lines[1] != socket.gethostname()
    return f"process {lines[0]}" + (f" on {lines[1]}" if elsewhere else "")


def _lines(file: Path) -> list[str]:
    """Return the lines of a lock file: the number of the process, and the name of its host."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []
