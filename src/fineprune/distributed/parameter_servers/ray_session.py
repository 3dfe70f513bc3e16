"""The Ray of this process: started or joined, watched, and shut down within a time limit.

Ray is an optional dependency (the extra ``cluster``).
"""

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import ray._private.worker as ray_worker
from ray.exceptions import AuthenticationError

from fineprune.distributed.parameter_servers.start import RayLost
from fineprune.errors import InputError, RunError

_LOOPBACK = "127.0.0.1"
# Ray creates Unix sockets in its folder, whose names have up to 66 characters. On Linux, the path
# of a socket has at most 107 bytes, of which this leaves 13 for the name of the folder.
_LONGEST_PARENT = 27
# How long an address may take to answer, and Ray to start or to join.
_CONNECT_SECONDS = 10.0
_START_SECONDS = 90.0
# How long Ray's own processes may be silent. Ray itself ends this process, without a word, when its
# control store has been silent for a minute.
SILENCE_SECONDS = 20.0
# The interval between two looks at them.
_LOOK_SECONDS = 1.0
# How long Ray may take to end. If its control store is dead, it takes 7 s.
_END_SECONDS = 20.0
_DAEMONS = ("raylet", "gcs_server")

Stop = Callable[[], bool]


@contextlib.contextmanager
def ray_session(cpus: int, stop: Stop = lambda: False) -> Iterator[None]:
    """Use the Ray of this process, join the one that ``RAY_ADDRESS`` names, or start a new one.

    A new Ray runs on this machine only. It listens on the loopback interface, has no dashboard and
    sends no usage statistics. It ends with this block, or when this process is killed. Its files
    are in a temporary folder, which is then removed. Its processes have the priority of this one.

    Within this block, SIGTERM has the same effect as before. If that was to end the process
    immediately, it raises SystemExit instead, so that Ray is shut down.

    Args:
        cpus: The number of CPUs that a new Ray counts at least.
        stop: Function that is called repeatedly while Ray starts. If it returns True, the wait ends
            with RayLost.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # If a process dies, its pending calls are dropped. Ray would print an error for each of them.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = os.environ.get("RAY_ADDRESS", "local") or "local"
    with contextlib.ExitStack() as stack:
        if address == "local":
            options |= _local_options(cpus, stack.enter_context(_short_folder()))
        else:
            _check_answers(address)
        options["address"] = address
        # A death is one line of ours; Ray would print a paragraph on standard output.
        stack.callback(setattr, ray_worker, "_worker_logs_enabled", ray_worker._worker_logs_enabled)
        ray_worker._worker_logs_enabled = False
        thread = stack.enter_context(_own_signals(lambda: _RayThread(options, stop)))
        stack.callback(thread.end)
        if address == "local" and ray.util.get_node_ip_address() != _LOOPBACK:  # type: ignore[no-untyped-call]
            raise RunError(
                "Ray would listen on all interfaces, because it was imported before fineprune: set "
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the environment"
            )
        yield


class RayHealth:
    """Looks at the processes of Ray itself, on which the workers and servers depend.

    Ray would end this process without a word some time after their end.
    """

    def __init__(self) -> None:
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._daemons = _daemons()
        self._looked = time.monotonic()
        self._silence = 0.0

    def check(self) -> None:
        """Look at the processes, if the last look was a second ago.

        Raises:
            RayLost: One of them has ended, or does not answer.
        """
        passed = time.monotonic() - self._looked
        if passed < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        silent, reason = self._silent()
        if reason:
            raise RayLost(f"Ray's process {silent} {reason}")
        # If this process was suspended, that time does not count.
        self._silence = self._silence + min(passed, 2 * _LOOK_SECONDS) if silent else 0.0
        if self._silence > SILENCE_SECONDS:
            raise RayLost(f"Ray's process {silent} has been silent for {self._silence:.0f} s")

    @property
    def answers(self) -> bool:
        """Whether all processes answer now. Otherwise, requests to Ray hang."""
        return not self._silent()[0]

    def _silent(self) -> tuple[str, str]:
        """Return the name of a process that does not answer, and how it ended; "" if none did."""
        states = {name: _state_of(pid) for name, pid in self._daemons.items()}
        for name, state in states.items():
            if state in ("", "Z"):
                return name, "ended"
        for name, state in states.items():
            if state in ("T", "t"):
                return name, ""
        try:
            socket.create_connection(self._address, timeout=_LOOK_SECONDS).close()
        except OSError:
            return "gcs_server", ""
        return "", ""


class _RayThread:
    """Calls ``ray.init`` and ``ray.shutdown`` in a thread, because either may hang.

    The processes of Ray end with the thread that started them, so this one lives as long as they.
    """

    def __init__(self, options: dict[str, Any], stop: Stop) -> None:
        self._begun, self._ending = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._live, args=(options,), name="ray", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._begun.wait(0.2):
            if stop():
                raise RayLost("the start of Ray was stopped")
            if time.monotonic() > deadline:
                raise RunError(
                    f"Ray at {options['address']} did not answer within {_START_SECONDS:.0f} s"
                )
        if self._error is not None:
            raise _explained(self._error, options["address"])

    def end(self) -> None:
        """Shut Ray down, even if its own processes are dead or hang."""
        daemons = _daemons()
        for pid in daemons.values():
            if _state_of(pid) in ("T", "t"):
                os.kill(pid, signal.SIGKILL)
        self._ending.set()
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            for pid in daemons.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._thread.join(_END_SECONDS)

    def _live(self, options: dict[str, Any]) -> None:
        try:
            ray.init(**options)
        except Exception as error:
            self._error = error
        self._begun.set()
        if self._error is None:
            self._ending.wait()
            ray.shutdown()


def _local_options(cpus: int, folder: str) -> dict[str, Any]:
    return {
        "num_cpus": max(cpus, os.cpu_count() or 1),
        "include_dashboard": False,
        "_node_ip_address": _LOOPBACK,
        "_temp_dir": folder,
        "_system_config": {
            # Else Ray starts a process for each CPU, most of which are never used.
            "prestart_worker_first_driver": False,
            # Else workers and servers have a lower priority than other trainings.
            "worker_niceness": 0,
        },
    }


def _short_folder() -> tempfile.TemporaryDirectory[str]:
    parent = tempfile.gettempdir()
    if len(parent.encode()) > _LONGEST_PARENT:
        parent = "/tmp"
    return tempfile.TemporaryDirectory(prefix="ray-", dir=parent, ignore_cleanup_errors=True)


def _daemons() -> dict[str, int]:
    """Return the process IDs of Ray's own processes that this one has started, by their names.

    It is empty if Ray was joined, and on systems without ``/proc``.
    """
    found = {}
    for file in Path("/proc/self/task").glob("*/children"):
        for child in file.read_text().split():
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{child}/comm").read_text().strip()
                if name in _DAEMONS:
                    found[name] = int(child)
    return found


def _state_of(pid: int) -> str:
    """Return the letter that ``/proc`` gives for the state of a process; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _expected(address: str) -> str:
    return f"expected a Ray cluster at {address!r}, which RAY_ADDRESS names, but "


def _check_answers(address: str) -> None:
    """Check that something answers at an address; Ray itself would try for minutes."""
    if address.startswith("ray://"):
        raise InputError(
            f"{_expected(address)}this is an address of Ray Client, whose programs run elsewhere: "
            f"give the address HOST:PORT that `ray start --head` prints"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"{_expected(address)}it is no address: give it as HOST:PORT")
    try:
        place = host.strip("[]"), int(port)
        socket.create_connection(place, timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"{_expected(address)}nothing answers there ({error}): start it with `ray start --head`"
        ) from None


def _explained(error: Exception, address: str) -> Exception:
    """Return the exception to raise in place of one of ``ray.init``."""
    told = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    told = told if len(told) <= 300 else f"{told[:300]}..."
    if address == "local":
        advice = (
            ": if the machine is busy, start the run again later" if "timed out" in told else ""
        )
        found: Exception = RunError(f"Ray did not start on this machine: {told}{advice}")
    elif isinstance(error, AuthenticationError) or "token" in f"{told} {error.__cause__}".lower():
        found = InputError(
            f"{_expected(address)}it asks for a token: set RAY_AUTH_MODE=token, and put the token "
            f"of the first node into ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    else:
        found = InputError(f"{_expected(address)}{told}")
    found.__cause__ = error
    return found


@contextlib.contextmanager
def _own_signals(start: Callable[[], _RayThread]) -> Iterator[_RayThread]:
    """Start Ray, and keep this process's handler of SIGTERM: Ray's library sets one of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield start()
        return
    before = signal.getsignal(signal.SIGTERM)
    own = _exit if before == signal.SIG_DFL else before
    signal.signal(signal.SIGTERM, own)
    try:
        thread = start()
        signal.signal(signal.SIGTERM, own)
        yield thread
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
