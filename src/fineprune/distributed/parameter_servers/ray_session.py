"""The Ray of this process: started or joined, watched, and shut down within a time limit.

Ray is an optional dependency (the extra ``cluster``). Only this module, ``placement`` and
``processes`` import it.
"""

import atexit
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
from subprocess import Popen
from types import FrameType
from typing import Any

import ray
import ray._private.utils as ray_utils
import ray._private.worker as ray_worker
from ray._private import ray_constants
from ray.exceptions import AuthenticationError

from fineprune.distributed.parameter_servers.end_ray import (
    process_status,
    ray_ends_with_this_process,
)
from fineprune.distributed.parameter_servers.events import LOGGER
from fineprune.errors import InputError, RunError, first_line

_LOOPBACK = "127.0.0.1"
# Ray creates Unix sockets in its folder, whose names have up to 66 characters. On Linux, the path
# of a socket has at most 107 bytes, of which this leaves 13 for the name of the folder.
_LONGEST_PARENT = 27
# Seconds to wait for an answer at the address of a cluster.
_CONNECT_SECONDS = 10.0
# How long Ray's own processes may be silent. Ray itself ends this process, without a word, when its
# control store has been silent for a minute.
SILENCE_SECONDS = 20.0
# The interval between two looks at them, and how long the control store may take for an answer.
_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 0.5
# How long Ray may take to end. If its control store is dead, it takes 7 s.
_END_SECONDS = 20.0
_WATCHED = ("raylet", "gcs_server")


@contextlib.contextmanager
def ray_session(cpus: int) -> Iterator[None]:
    """Use the Ray of this process, join the one that ``RAY_ADDRESS`` names, or start a new one.

    A new Ray runs on this machine only. It listens on the loopback interface, has no dashboard and
    sends no usage statistics. It ends with this block, or when this process is killed. Its files
    are in a temporary folder, which is then removed. Its processes have the priority of this one.

    Within this block, SIGTERM has the same effect as before. If that was to end the process
    immediately, it raises SystemExit instead, so that Ray is shut down.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # If a process dies, its pending calls are dropped. Ray would print an error for each of them.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_rays_messages_logged())
        address = os.environ.get("RAY_ADDRESS", "local")
        if address in ("", "local"):
            # Otherwise, Ray would replace 127.0.0.1 by the address of another interface and listen
            # on all interfaces.
            ray_constants.ENABLE_RAY_CLUSTER = False
            parent = tempfile.gettempdir()
            if len(parent.encode()) > _LONGEST_PARENT:
                parent = "/tmp"
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="ray-", dir=parent, ignore_cleanup_errors=True)
            )
            stack.enter_context(ray_ends_with_this_process(folder))
            options |= {
                "address": "local",
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
        else:
            options["address"] = address
        stack.enter_context(_own_sigterm(lambda: _init(options)))
        stack.callback(_shut_down)
        yield


class RayLost(RunError):
    """Ray's own processes have ended or hang, so that no process can be started or replaced."""

    def __str__(self) -> str:
        return (
            f"{self.args[0]}: Ray cannot start or replace processes without it; continue with "
            f"--resume"
        )


class RayHealth:
    """Looks at the processes of Ray itself, on which the workers and servers depend.

    They are not needed while no process of the training is started, so a training could go on
    without them for some time. But Ray would end this process without a word.

    Args:
        stop: Function that returns whether this process was asked to stop.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop
        self._processes = _own_processes()
        self._looked = time.monotonic()
        self._silence = 0.0

    def check(self) -> None:
        """Look at the processes, if the last look was a second ago."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._silent()

    def wait(self) -> None:
        """Wait until the processes answer, because Ray would start nothing before, but hang.

        If this process was asked to stop, they probably were, too, and are not waited for.
        """
        while silent := self._silent():
            if self._stop():
                raise RayLost(f"Ray's process {silent} does not answer")
            time.sleep(_ANSWER_SECONDS)

    def _silent(self) -> str | None:
        """Return the name of a process that does not answer, if any."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RayLost(f"Ray's process {name} {_end_of(process)}")
        silent = next((n for n, p in self._processes.items() if _is_suspended(p.pid)), None)
        if silent is None and not _control_store_answers():
            silent = "gcs_server"
        passed = time.monotonic() - self._looked
        # If this process was suspended, that time does not count.
        self._silence = 0.0 if silent is None else self._silence + min(passed, 2 * _LOOK_SECONDS)
        self._looked = time.monotonic()
        if self._silence > SILENCE_SECONDS:
            seconds = f"{self._silence:.0f} s"
            raise RayLost(f"Ray's process {silent} has been silent for {seconds}")
        return silent


def within(seconds: float, act: Callable[[], object]) -> bool:
    """Call a function that may hang in a thread. Return whether it has ended in time."""
    thread = threading.Thread(target=act, name="ray", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _own_processes() -> dict[str, Popen[bytes]]:
    """Return the processes of a Ray that this process has started, by their names."""
    node = ray_worker._global_node
    started: dict[str, Any] = {} if node is None else node.all_processes
    return {name: started[name][0].process for name in _WATCHED if started.get(name)}


def _end_of(process: Popen[bytes]) -> str:
    if process.returncode < 0:
        return f"was killed by {signal.Signals(-process.returncode).name}"
    return f"ended with status {process.returncode}"


def _is_suspended(pid: int) -> bool:
    """Return whether a process is stopped, as SIGSTOP does; False where there is no ``/proc``."""
    return process_status(pid)[:1] in (["T"], ["t"])


def _control_store_answers() -> bool:
    worker: Any = ray_worker.global_worker
    try:
        worker.gcs_client.check_alive([worker.current_node_id], timeout=_ANSWER_SECONDS)
    except Exception:  # Ray raises RpcError, which is not public.
        return False
    return True


def _shut_down() -> None:
    """Shut Ray down, even if its own processes are dead or hang."""
    own = _own_processes()
    for process in own.values():
        if _is_suspended(process.pid):
            process.kill()
    if within(_END_SECONDS, ray.shutdown):
        return
    for process in own.values():
        process.kill()
    # A thread that waits inside Ray would make the end of the interpreter hang or crash. Functions
    # that are registered last are called first.
    atexit.register(_leave)
    raise RunError(f"Ray did not end within {_END_SECONDS:.0f} s: its processes may still run")


def _leave() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def _init(options: dict[str, Any]) -> None:
    """Call ``ray.init``."""
    address = options["address"]
    if address == "local":
        try:
            ray.init(**options)
        except Exception as error:  # Ray raises this class itself, when half a minute has passed.
            raise RunError(
                f"Ray did not start on this machine: {first_line(error)} If the machine is busy, "
                f"start the run again later"
            ) from error
        return
    expected = f"expected a Ray cluster at {address!r}, which RAY_ADDRESS names, but "
    if address.startswith("ray://"):
        raise InputError(
            f"{expected}this is an address of Ray Client, whose programs run elsewhere: give the "
            f"address HOST:PORT that `ray start --head` prints"
        )
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in host:
        try:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            raise InputError(
                f"{expected}nothing answers there ({error}): start it with `ray start --head`"
            ) from None
    try:
        ray.init(**options)
    except ValueError as error:
        raise InputError(f"{expected}{first_line(error)}: give it as HOST:PORT") from error
    except (AuthenticationError, ConnectionError) as error:
        if "token" not in f"{error} {error.__cause__}".lower():
            raise InputError(
                f"{expected}{first_line(error)}: start it with `ray start --head`, or unset "
                f"RAY_ADDRESS"
            ) from error
        raise InputError(
            f"{expected}it asks for a token: set RAY_AUTH_MODE=token, and put the token of the "
            f"first node into ~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from None


@contextlib.contextmanager
def _own_sigterm(start: Callable[[], object]) -> Iterator[None]:
    """Start Ray without its SIGTERM handler, which prints a stack trace and then waits.

    Only the main thread can set signal handlers; in other threads, there is none of Ray either.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    own = _exit if before == signal.SIG_DFL else before
    of_ray = ray_utils.set_sigterm_handler
    try:
        if main:
            signal.signal(signal.SIGTERM, own)
        ray_utils.set_sigterm_handler = lambda handler: None
        try:
            start()
        finally:
            ray_utils.set_sigterm_handler = of_ray
        if main:  # The library of Ray, which is not in Python, has set a handler, too.
            signal.signal(signal.SIGTERM, own)
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def _rays_messages_logged() -> Iterator[None]:
    """Log what Ray would print in paragraphs, for example about a death, at the level DEBUG."""

    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            LOGGER.debug("Ray: %s", line)

    printed = ray_worker.print_to_stdstream
    ray_worker.print_to_stdstream = log
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = printed
