"""Ends what is left of the Ray of a training, and removes Ray's folder.

Ray's own processes notice the death of the process that started them only after up to a minute, and
so do Ray's agents if one of Ray's own processes dies.
This file runs as a program of its own, ``python end_ray.py FOLDER``, with a pipe as its standard
input. The pipe closes when the training's process ends, however that happens. This file imports
only the standard library, so that it starts quickly.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

# What the training's process writes if it ends Ray itself.
_ENDED = b"ended"
# A request to stop often reaches all processes of a training. This one is needed until the end.
_IGNORED = ("SIGTERM", "SIGINT", "SIGHUP")
# Ray ends a training without a word if its own processes are stopped, as ``ray stop`` does.
_NO_MESSAGE = (
    "fineprune: the training ended without a message: it, or its Ray, was killed or stopped; "
    "continue with --resume"
)
_LONGEST_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_QUIET_LOOKS = 5


@contextlib.contextmanager
def ray_ends_with_this_process(folder: str) -> Iterator[None]:
    """End the Ray whose files are in this folder, also if this process is killed inside the block.

    The processes are found by their open log files, in ``/proc``. On systems without it, only the
    folder is removed.
    """
    command = [sys.executable, "-I", "-S", __file__, folder]
    # A session of its own, because a signal to the training's process group must not end it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watching:
        try:
            yield
        finally:
            watching.communicate(_ENDED)


def _processes_of_ray(folder: str) -> set[int]:
    """Return the processes that have an open file in the folder."""
    if not os.path.isdir("/proc"):
        return set()
    found = set()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        files = f"/proc/{process}/fd"
        numbers: list[str] = []
        with contextlib.suppress(OSError):  # It has ended, or it is another user's.
            numbers = os.listdir(files)
        for number in numbers:
            with contextlib.suppress(OSError):  # The file has been closed.
                if os.readlink(f"{files}/{number}").startswith(f"{folder}/"):
                    found.add(int(process))
    return found


def process_status(number: int) -> list[str]:
    """Return the state of a process, its parent and what follows in ``/proc``; empty without it."""
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _kill(numbers: Iterable[int]) -> None:
    for number in numbers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(number, signal.SIGKILL)


def _main(folder: str) -> None:
    training = os.getppid()
    # This returns after so many bytes, or when the other end of the pipe is closed, which a loader
    # process that the training has forked may keep open.
    if sys.stdin.buffer.read(len(_ENDED)) == _ENDED:
        # The training and its loader processes may still have Ray's files open.
        parents = {number: process_status(number)[1:2] for number in _processes_of_ray(folder)}
        parents.pop(training, None)
        _kill(number for number, parent in parents.items() if parent not in ([], [str(training)]))
        return
    with contextlib.suppress(OSError):  # The terminal may be gone.
        print(_NO_MESSAGE, file=sys.stderr, flush=True)
    deadline = time.monotonic() + _LONGEST_SECONDS
    quiet = 0
    # A process that was just being started is found a little later.
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        found = _processes_of_ray(folder)
        quiet = 0 if found else quiet + 1
        _kill(found)
        time.sleep(_LOOK_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for name in _IGNORED:
        if hasattr(signal, name):  # Windows has no SIGHUP.
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    _main(sys.argv[1])
