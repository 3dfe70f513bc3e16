"""Ends the Ray processes of a training that was killed, and removes Ray's folder.

Ray's processes take up to a minute to notice the death of the process that started them. Therefore
this file runs as a separate program, ``python end_ray.py FOLDER``, whose standard input is a pipe
from the training's process. The pipe closes when that process ends for any reason. This file
imports only the standard library, so that it starts quickly.
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
    """If this process is killed inside the block, end the Ray processes that use a folder.

    Start Ray inside the block. Its processes inherit an environment variable, by which they are
    found in ``/proc``. On systems without ``/proc``, only the folder is removed.

    Args:
        folder: Ray's temporary folder.
    """
    command = [sys.executable, "-I", "-S", __file__, folder]
    # It has its own session, so that a signal to the training's process group does not end it.
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
