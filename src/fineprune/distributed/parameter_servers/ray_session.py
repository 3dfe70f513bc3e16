"""The Ray of this process: started or joined, watched, and shut down within a time limit.

Ray is an optional dependency (the extra ``cluster``).
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import ray
import ray._private.worker as ray_worker

from fineprune.distributed.parameter_servers.processes import EventKind, report
from fineprune.errors import InputError, RayLost, RunError, explaining, reason_of

_LOCAL, _LOOPBACK = "local", "127.0.0.1"
# Ray creates Unix sockets in its folder, whose names have up to 66 characters. On Linux, the path
# of a socket has at most 107 bytes, of which this leaves 13 for the name of the folder.
_LONGEST_PARENT = 27
# How long an address may take to answer, Ray to start or to join, and to end. If its control store
# is dead, it ends in 7 s.
_CONNECT_SECONDS, _START_SECONDS, _END_SECONDS = 10.0, 90.0, 20.0
# After how long the user is told that Ray is being started.
_TELL_SECONDS = 3.0
# How long Ray's own processes may be silent. Ray itself ends this process, without a word, when its
# control store has been silent for a minute.
SILENCE_SECONDS = 20.0
# The longest interval between two looks that counts. Beyond it, this process was suspended.
LONGEST_LOOK_SECONDS = 2.0
# The names of these, and the states of a process that is suspended.
_DAEMONS, _SUSPENDED = ("raylet", "gcs_server"), ("T", "t")


@contextlib.contextmanager
def ray_session(cpus: int, stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Use the Ray of this process, join the one that ``RAY_ADDRESS`` names, or start a new one.

    A new Ray runs on this machine only. It listens on the loopback interface, has no dashboard and
    sends no usage statistics. It ends with this block, or when this process is killed. Its files
    are in a temporary folder, which is then removed.

    Within this block, SIGTERM has the same effect as before. If that was to end the process
    immediately, it raises SystemExit instead, so that Ray is shut down.

    Args:
        cpus: The number of CPUs that a new Ray counts at least.
        stop: Function that is called repeatedly while Ray starts. If it returns True, the wait ends
            with RayLost.

    Raises:
        InputError: ``RAY_ADDRESS`` names no Ray that can be joined.
        RunError: Ray does not start.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # If a process dies, its pending calls are dropped. Ray would print an error for each of them.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    logging.getLogger("ray").setLevel(logging.ERROR)
    address = os.environ.get("RAY_ADDRESS") or _LOCAL
    options = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    with contextlib.ExitStack() as stack:
        if address == _LOCAL:
            parent = tempfile.gettempdir()
            usable = parent.isascii() and len(parent) <= _LONGEST_PARENT  # For Ray.
            parent = parent if usable else "/tmp"
            folder = tempfile.TemporaryDirectory("", "ray-", parent, ignore_cleanup_errors=True)
            options |= {
                "num_cpus": max(cpus, os.cpu_count() or 1),
                "include_dashboard": False,
                "_node_ip_address": _LOOPBACK,
                "_temp_dir": stack.enter_context(folder),
                "_system_config": {
                    # Else Ray starts a process for each CPU, most of which are never used.
                    "prestart_worker_first_driver": False,
                    # Else workers and servers have a lower priority than other trainings.
                    "worker_niceness": 0,
                },
            }
        else:
            failures = (OSError, ValueError, OverflowError)
            with explaining(_expected(address), failures, "; `ray start --head` starts one"):
                _connect(address, _CONNECT_SECONDS)  # Ray itself would try for minutes.
        # A death is one line of ours; Ray would print a paragraph on standard output.
        stack.callback(setattr, ray_worker, "_worker_logs_enabled", ray_worker._worker_logs_enabled)
        ray_worker._worker_logs_enabled = False
        before = signal.getsignal(signal.SIGTERM)
        main = threading.current_thread() is threading.main_thread()
        if main:
            stack.callback(signal.signal, signal.SIGTERM, before)
        stack.enter_context(_running(options, stop))
        if main:  # Ray's library has set a handler of its own.
            own = (lambda number, _: sys.exit(128 + number)) if before == signal.SIG_DFL else before
            signal.signal(signal.SIGTERM, own)
        if address == _LOCAL and ray.util.get_node_ip_address() != _LOOPBACK:  # type: ignore[no-untyped-call]
            raise RunError(
                "Ray would listen on all interfaces, because it was imported before fineprune: set "
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the environment"
            )
        yield


class RayHealth:
    """Looks at Ray's own processes, after whose end Ray would end this one without a word."""

    def __init__(self) -> None:
        self._address = ray.get_runtime_context().gcs_address
        self._daemons = _daemons()
        self._looked, self._silence = time.monotonic(), 0.0

    def answers(self) -> bool:
        """Return whether all processes answer. Otherwise, requests to Ray hang.

        Raises:
            RayLost: One of them has ended, or has been silent for ``SILENCE_SECONDS``.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, LONGEST_LOOK_SECONDS), now
        silent = ""
        for name, pid in self._daemons.items():
            state = _stat(pid)[1]
            if state in ("", "Z"):
                raise RayLost(f"Ray's process {name} ended")
            if state in _SUSPENDED:
                silent = name
        if not silent:
            try:
                _connect(self._address, 1.0)
            except OSError:
                silent = "gcs_server"
        self._silence = self._silence + passed if silent else 0.0
        if self._silence > SILENCE_SECONDS:
            raise RayLost(f"Ray's process {silent} has been silent for {self._silence:.0f} s")
        return not silent


@contextlib.contextmanager
def _running(options: dict[str, Any], stop: Callable[[], bool]) -> Iterator[None]:
    """Call ``ray.init`` and ``ray.shutdown`` in a thread, because either may hang.

    The processes of Ray end with the thread that started them, so this one lives as long as they.
    """
    begun, ending = Future[None](), threading.Event()

    def live() -> None:
        try:
            ray.init(**options)
        except Exception as error:
            begun.set_exception(error)
            return
        begun.set_result(None)
        ending.wait()
        ray.shutdown()

    thread = threading.Thread(target=live, name="ray", daemon=True)
    thread.start()
    address, began, told = options["address"], time.monotonic(), False
    while not wait([begun], 0.2).done:
        waited = time.monotonic() - began
        if stop():
            raise RayLost("the start of Ray was stopped")
        if waited > _START_SECONDS:
            raise RunError(f"Ray at {address} did not answer within {_START_SECONDS:.0f} s")
        if waited > _TELL_SECONDS and not told:
            told = True
            report(EventKind.WAITING, "starting Ray ...")
    error = begun.exception()
    if isinstance(error, Exception) and address == _LOCAL:
        raise RunError(f"Ray did not start on this machine: {reason_of(error)}") from error
    if isinstance(error, Exception):
        raise InputError(f"{_expected(address)}: {reason_of(error)}") from error
    try:
        yield
    finally:
        for pid in _daemons().values():
            if _stat(pid)[1] in _SUSPENDED:  # Ray would wait for it.
                os.kill(pid, signal.SIGKILL)
        ending.set()
        thread.join(_END_SECONDS)


def _daemons() -> dict[str, int]:
    """Return the process IDs of Ray's own processes that this one has started, by their names.

    It is empty if Ray was joined, and on systems without ``/proc``.
    """
    tasks = Path("/proc/self/task").glob("*/children")
    children = [int(child) for file in tasks for child in file.read_text().split()]
    return {_stat(child)[0]: child for child in children if _stat(child)[0] in _DAEMONS}


def _stat(pid: int) -> tuple[str, str]:
    """Return the name of a process and the letter of its state, as in ``/proc``; "" if it ended."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return "", ""
    return before.partition("(")[2], after.split()[0]


def _connect(address: str, seconds: float) -> None:
    """Check that something answers at HOST:PORT; the host may be an IPv6 address in brackets."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def _expected(address: str) -> str:
    return f"expected HOST:PORT of a running Ray cluster as RAY_ADDRESS, got {address!r}"
