"""Ends the Ray of a training whose process was killed, and removes Ray's folder.

Ray's own processes notice the death of the process that started them only after up to a minute.
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
from collections.abc import Iterator
from pathlib import Path

_VARIABLE = "FINEPRUNE_RAY_FOLDER"


@contextlib.contextmanager
def ray_ends_with_this_process(folder: str) -> Iterator[None]:
    """End the Ray whose files are in this folder if this process is killed inside the block.

    Start Ray inside the block. Its processes inherit an environment variable, by which they are
    found in ``/proc``. On systems without it, only the folder is removed.

    Args:
        folder: Ray's temporary folder.
    """
    command = [sys.executable, "-I", "-S", __file__, folder]
    # A session of its own, because a signal to the training's process group must not end it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        os.environ[_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[_VARIABLE]


def _processes_of_ray(folder: str) -> Iterator[int]:
    sought = f"{_VARIABLE}={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if sought in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)


def _main(folder: str) -> None:
    sys.stdin.buffer.read()  # Returns when the other end of the pipe is closed.
    for number in _processes_of_ray(folder):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(number, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(sys.argv[1])
