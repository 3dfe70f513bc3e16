"""Starts the processes of a training with Ray, and exchanges messages with them.

Ray places and starts the processes, and knows why one has died. Messages do not travel through Ray:
each process connects to this one, and the end of its channel is its death.
"""

import contextlib
import os
import re
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVarTuple

import ray
import torch
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.channel import (
    Channel,
    ChannelClosed,
    Listener,
    join_channel,
)
from fineprune.distributed.parameter_servers.events import Event, EventKind, ProcessKind
from fineprune.distributed.parameter_servers.messages import Hello, Message, Ping, Pong, Ready
from fineprune.distributed.parameter_servers.placement import Placement, Places
from fineprune.distributed.parameter_servers.ray_session import (
    RayHealth,
    RayLost,
    ray_session,
    within,
)
from fineprune.errors import InputError, RunError, first_line, lack_of

Ts = TypeVarTuple("Ts")

# Why a process died together with its node.
LOST_NODE = "its node died or cannot be reached"
# The interval at which Ray is asked which processes have ended.
_LOOK_SECONDS = 0.5
# How long Ray may take to say why a process has ended.
_CAUSE_SECONDS = 5.0
# How long Ray may take to kill all processes.
_KILL_SECONDS = 10.0


class RemoteError(RuntimeError):
    """A process of the training raised an exception. The message is one line: it and its place.

    ``__cause__`` is Ray's exception, which shows the stack trace of the other process.
    """


@dataclass(frozen=True)
class Ended:
    """A process has ended, for this reason."""

    reason: str


class Served(Protocol):
    """What a process holds: a worker or a server."""

    def serve(self, channel: Channel) -> None:
        """Execute the requests of the coordinator, until it is gone."""
        ...


class _Host:
    """The Ray actor, which runs a process of the training."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        # A request to stop often reaches all processes of a training. The coordinator then still
        # needs this one for a checkpoint. A handler, since programs inherit what is ignored.
        signal.signal(signal.SIGTERM, lambda number, frame: None)

    def run(
        self,
        address: tuple[str, int],
        key: bytes,
        number: int,
        build: Callable[..., Served],
        arguments: Sequence[Any],
    ) -> None:
        """Connect to the coordinator, build what this process holds, and let it serve."""
        with contextlib.suppress(ChannelClosed):  # The coordinator has ended.
            channel = join_channel(address, key)
            channel.send(Hello(number, os.getpid(), socket.gethostname()))
            held = build(_own_address(), *arguments)
            channel.send(Ready())
            held.serve(channel)


class Process:
    """A process of the training, as the coordinator sees it.

    Attributes:
        kind: The role of the process.
        index: The worker's rank, or the server's index.
        hello: Its first message, which says where it runs; None until then. It may wait for CPUs.
        pinged: Whether it has not answered the last ping.
        silence: The number of seconds since this ping.
    """

    def __init__(self, kind: ProcessKind, index: int, number: int, actor: Any) -> None:
        self.kind = kind
        self.index = index
        self.hello: Hello | None = None
        self.pinged = False
        self.silence = 0.0
        self._number = number
        self._actor = actor
        self._end: Any = None  # Ray's reference to the end of the process
        self._channel: Channel | None = None
        self._unreachable = False

    def __str__(self) -> str:
        return f"{self.kind.value} {self.index}"

    def send(self, message: Message) -> None:
        """Send a message. If the process has died, ``Cluster.poll`` returns its end."""
        if self._channel is not None:
            try:
                self._channel.send(message)
            except ChannelClosed:
                self._unreachable = True

    def event(self, kind: EventKind, reason: str = "", batch: BatchKey | None = None) -> Event:
        """Return an event that concerns this process."""
        pid, node = (self.hello.pid, self.hello.node) if self.hello else (None, "")
        return Event(kind, self.kind, self.index, pid, node, reason, batch=batch)

    def ping(self) -> None:
        """Ping the process, if it runs and has answered the last ping."""
        if self._channel is not None and not self.pinged:
            self.pinged = True
            self.send(Ping())


class Cluster:
    """The processes of one training. The function ``cluster`` makes it.

    Attributes:
        placement: Where the processes run.
        host: The address of this process for links and stores.
    """

    def __init__(self, placement: Placement, stop: Callable[[], bool]) -> None:
        self.placement = placement
        self._health = RayHealth(stop)
        self.host = _own_address()
        self._listener = Listener(self.host)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._processes: dict[int, Process] = {}  # those that live, by their numbers
        self._started = 0
        self._looked = time.monotonic()

    def start(
        self,
        kind: ProcessKind,
        index: int,
        build: Callable[[str, *Ts], Served],
        *args: *Ts,
    ) -> Process:
        """Start a worker or a server, which serves what ``build(host, *args)`` returns.

        ``index`` is the worker's rank, or the server's index. ``host`` is the address of the
        process for links. The arguments must be picklable.
        """
        self._health.wait()
        host: Any = ray.remote(_Host)
        options = self.placement.options(kind, index)
        actor = host.options(**options).remote(self.placement.places.threads)
        self._started += 1
        process = Process(kind, index, self._started, actor)
        address, key = self._listener.address, self._listener.key
        process._end = actor.run.remote(address, key, self._started, build, args)
        self._processes[self._started] = process
        return process

    def poll(self, seconds: float) -> list[tuple[Process, Message | Ended]]:
        """Wait for messages, and return at most one of each process.

        A process that has ended, or that sent something that is no message, is killed.

        Args:
            seconds: How long to wait at most.
        """
        unreachable = [p for p in self._processes.values() if p._unreachable]
        came: list[tuple[Process, Message | Ended]] = [(p, self._ended(p)) for p in unreachable]
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                came += self._admit()
                continue
            process = key.data
            if process._channel is None:
                continue  # It was killed because of an earlier message.
            try:
                message = process._channel.receive()
            except ChannelClosed:
                came.append((process, self._ended(process)))
                continue
            process.silence = 0.0
            if isinstance(message, Pong):
                process.pinged = False
            else:
                came.append((process, message))
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._health.check()
            ends = {process._end: process for process in self._processes.values()}
            ended, _ = ray.wait(list(ends), num_returns=len(ends), timeout=0) if ends else ([], [])
            # Those that could not connect, and those whose nodes are lost.
            came += [(ends[end], self._ended(ends[end])) for end in ended]
        return came

    def add_silence(self, seconds: float) -> None:
        """Add to the time for which processes have not answered pings, and ping the others."""
        for process in self._processes.values():
            if process.pinged:
                process.silence += seconds
            else:
                process.ping()

    def kill(self, process: Process) -> None:
        """Kill a process; do nothing if it is dead. ``poll`` returns nothing of it any more."""
        self._forget(process)
        with contextlib.suppress(RayActorError):
            ray.kill(process._actor, no_restart=True)

    def close(self) -> None:
        """Kill all processes and release the resources, unless Ray hangs."""
        self._listener.close()

        def end() -> None:
            for process in list(self._processes.values()):
                self.kill(process)
            self.placement.release()

        within(_KILL_SECONDS, end)

    def _admit(self) -> list[tuple[Process, Message | Ended]]:
        channel = self._listener.accepted()
        try:
            hello = channel.receive()
        except ChannelClosed:
            return []  # Ray says why the process has ended.
        process = self._processes.get(hello.number) if isinstance(hello, Hello) else None
        if process is None or not isinstance(hello, Hello):
            channel.close()  # The process was replaced while it started.
            return []
        process.hello = hello
        process._channel = channel
        self._selector.register(channel, selectors.EVENT_READ, process)
        return [(process, hello)]

    def _ended(self, process: Process) -> Ended:
        """Return why a process has ended, and kill it if it has not."""
        self._forget(process)
        try:
            ray.get(process._end, timeout=_CAUSE_SECONDS)
        except (RayActorError, OutOfMemoryError) as error:
            if "its owner has died" in str(error):  # This process is the owner.
                raise RayLost("Ray's process raylet counts as dead") from error
            return Ended(_cause(error))
        except GetTimeoutError:
            pass
        except RayTaskError as error:
            # These explain the failure in one line. Other errors keep the remote stack trace.
            if isinstance(error.cause, InputError | RunError):
                raise error.cause from None
            if lack := lack_of(error.cause):
                raise RunError(f"{lack}: {_described(error)}") from error
            raise RemoteError(_described(error)) from error
        self.kill(process)
        return Ended("its connection ended")

    def _forget(self, process: Process) -> None:
        """Close the channel of a process, and return nothing of it any more."""
        if process._channel is not None:
            self._selector.unregister(process._channel)
            process._channel.close()
            process._channel = None
        self._processes.pop(process._number, None)


@contextlib.contextmanager
def cluster(places: Places, *, stop: Callable[[], bool] = lambda: False) -> Iterator[Cluster]:
    """Reserve resources in the Ray cluster that ``ray_session`` joins or starts.

    All processes of the training end with this block.

    Args:
        places: The resources to reserve.
        stop: Function that is called repeatedly during a wait for the resources, or for Ray's own
            processes. If it returns True, the wait ends. In the first case, processes may not be
            started; in the second, ``RayLost`` is raised.
    """
    with ray_session(places.cpus):
        held = Cluster(Placement(places, stop), stop)
        try:
            yield held
        finally:
            held.close()


def _cause(error: RayActorError | OutOfMemoryError) -> str:
    """Return in a few words the cause that Ray's error describes in a paragraph."""
    told = str(error)
    if isinstance(error, OutOfMemoryError):
        return "Ray killed it because the memory of its node was almost full"
    if "killed by `ray.kill`" in told:
        return "it was killed"
    if "node has died" in told or "node died" in told:
        return LOST_NODE
    if "connection error" in told:
        return "it ended unexpectedly: killed, out of memory, or crashed"
    if isinstance(error, ActorUnavailableError):
        return "its node cannot be reached"
    return told.splitlines()[-1]


def _described(error: RayTaskError) -> str:
    """Return in one line the exception that a process raised, and its place."""
    frames = re.findall(r'File "(.+)", line (\d+)', str(error))
    place = ": {}, line {}".format(*frames[-1]) if frames else ""
    return f"{type(error.cause).__name__}: {first_line(error.cause)} (in a worker or server{place})"


def _own_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
