"""Processes on one machine or on many, by Ray: started, called, waited for and killed.

Ray carries control messages only. No other module imports it, and it is the optional extra
``cluster``.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import ray
import torch
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fineprune.distributed.parameter_servers.events import Event, EventKind, Report, reporter
from fineprune.errors import InputError

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

_LOOPBACK = "127.0.0.1"
# Seconds between two reports of a wait for CPUs.
_REPORT_EVERY = 10.0


class Died(RuntimeError):
    """The process that was called died. Its method may have run, in part or to its end."""


@dataclass(frozen=True)
class Places:
    """What the processes of a training need.

    Attributes:
        groups: The number of groups of replicas.
        members: The number of replicas of a group, all on one node.
        servers: The number of servers.
        dedicated: Whether servers get CPUs of their own, on other nodes if there are as many;
            otherwise they share the CPUs of the groups, in turn.
        threads: The number of torch's threads in each process, and of CPUs for each replica and
            each dedicated server.
        gpus: The number of GPUs of each replica, which sees no others.
        seconds: How long to wait for all these.
    """

    groups: int
    members: int = 1
    servers: int = 1
    dedicated: bool = False
    threads: int = 1
    gpus: float = 0.0
    seconds: float = 60.0


@dataclass(frozen=True)
class Location:
    """Where a process runs: its number, and the name of its node."""

    pid: int
    node: str


@dataclass(frozen=True)
class Call(Generic[R]):
    """A call under way in another process: ``Cluster.result`` returns what the method returned."""

    reference: Any


class _Host:
    """The actor: it holds one object, made by the first call, and calls its methods."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._held: Any = None

    def make(
        self, build: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]
    ) -> Location:
        self._held = build(_own_address(), *arguments, **named)
        return Location(os.getpid(), socket.gethostname())

    def call(
        self, method: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]
    ) -> Any:
        return method(self._held, *arguments, **named)


class Process(Generic[T]):
    """A process that holds one object of type ``T``.

    Attributes:
        made: The call that makes the object.
    """

    def __init__(
        self,
        actor: Any,
        build: Callable[..., T],
        arguments: Sequence[Any],
        named: dict[str, Any],
    ) -> None:
        self._actor = actor
        self.made: Call[Location] = Call(actor.make.remote(build, arguments, named))

    def call(
        self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Call[R]:
        """Start a method of the object and return at once.

        Args:
            method: The method as the class has it, such as ``Worker.push``.
            args: Its arguments, which must be picklable.
            kwargs: Its named arguments.
        """
        return Call(self._actor.call.remote(method, args, kwargs))

    def kill(self) -> None:
        """End the process at once; do nothing if it is dead."""
        with contextlib.suppress(RayActorError):
            ray.kill(self._actor, no_restart=True)


class Cluster:
    """The places that are reserved for one training; made by ``cluster``.

    Attributes:
        host: The address of this process for links and stores.
    """

    def __init__(self, places: Places, group: Any) -> None:
        self._places = places
        self._group = group
        self._actors: list[Process[Any]] = []
        self.host = _own_address()

    def start_server(
        self,
        index: int,
        build: Callable[Concatenate[str, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Process[T]:
        """Start a server's process, in which ``build(host, *args, **kwargs)`` makes its object.

        ``host`` is the address of the process's node for links.
        """
        places = self._places
        bundle = places.groups + index if places.dedicated else index % places.groups
        cpus = places.threads if places.dedicated else 0
        # For each group: a call under way, a link being made, and one of an earlier generation.
        calls = 4 * places.groups + 8
        return self._start(self._options(bundle, cpus, 0.0, calls), build, args, kwargs)

    def start_worker(
        self,
        group: int,
        build: Callable[Concatenate[str, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Process[T]:
        """Start the process of a group's replica, like a server's. It has one call at a time."""
        places = self._places
        options = self._options(group, places.threads, places.gpus, 1)
        return self._start(options, build, args, kwargs)

    def wait(self, calls: Sequence[Call[Any]]) -> list[Call[Any]]:
        """Wait until at least one of these calls ends, and return those that have ended."""
        by_reference = {call.reference: call for call in calls}
        references = list(by_reference)
        ended, _ = ray.wait(references, num_returns=1)
        if len(references) > 1:
            ended, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return [by_reference[reference] for reference in ended]

    def result(self, call: Call[R]) -> R:
        """Wait for a call, and return its result or raise its exception.

        Raises:
            Died: The process died.
        """
        try:
            return cast(R, ray.get(call.reference))
        except RayActorError as error:
            raise Died(_cause(error)) from None

    def close(self) -> None:
        """Kill all processes and give their places back."""
        for actor in self._actors:
            actor.kill()
        remove_placement_group(self._group)

    def _options(self, bundle: int, cpus: float, gpus: float, calls: int) -> dict[str, Any]:
        return {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": calls,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        }

    def _start(
        self,
        options: dict[str, Any],
        build: Callable[..., T],
        arguments: Sequence[Any],
        named: dict[str, Any],
    ) -> Process[T]:
        actor = ray.remote(_Host).options(**options).remote(self._places.threads)
        process = Process(actor, build, arguments, named)
        self._actors.append(process)
        return process


@contextlib.contextmanager
def cluster(places: Places, *, on_event: Report | None = None) -> Iterator[Cluster]:
    """Join the Ray that runs here or that ``RAY_ADDRESS`` names, or start one on this machine.

    A Ray that is started here listens on the loopback interface only, has no dashboard, sends no
    usage statistics, has as many CPUs as are needed, and ends with this block, as do all processes
    of the training.

    Args:
        places: What to reserve.
        on_event: Called with each event while the places are awaited.

    Raises:
        InputError: The places are not there in time.
    """
    started = not ray.is_initialized()
    if started:
        start_ray(_cpus(places))
    try:
        group = _reserve(places, reporter(on_event))
        held = Cluster(places, group)
        try:
            yield held
        finally:
            held.close()
    finally:
        if started:
            ray.shutdown()


def start_ray(cpus: int) -> None:
    """Join the Ray that ``RAY_ADDRESS`` names, or start one on this machine with so many CPUs."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Calls under way at a death are dropped, and Ray would print what became of each.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        return
    # Else Ray would replace 127.0.0.1 by another interface's address, and listen on all of them.
    ray_constants.ENABLE_RAY_CLUSTER = False
    ray.init(
        address="local",
        num_cpus=max(cpus, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address=_LOOPBACK,
    )


def _reserve(places: Places, report: Report) -> Any:
    replicas: dict[str, float] = {"CPU": places.members * places.threads}
    if places.gpus:
        replicas["GPU"] = places.members * places.gpus
    bundles = [dict(replicas) for _ in range(places.groups)]
    if places.dedicated:
        bundles += [{"CPU": float(places.threads)} for _ in range(places.servers)]
    group = placement_group(bundles, strategy="SPREAD")
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        try:
            ray.get(group.ready(), timeout=max(0.0, min(_REPORT_EVERY, places.seconds - waited)))
            return group
        except GetTimeoutError:
            waited = time.monotonic() - began
            if waited >= places.seconds:
                remove_placement_group(group)
                raise InputError(
                    f"expected {_wanted(places)}, but found no place in {places.seconds:g} s on "
                    f"{_available()}: ask for fewer, or for a larger cluster"
                ) from None
            reason = f"{waited:.0f} s for {_wanted(places)}, on {_available()}"
            report(Event(EventKind.WAITING, reason=reason))


def _wanted(places: Places) -> str:
    gpus = places.groups * places.members * places.gpus
    return (
        f"{_cpus(places)} free CPUs{f' and {gpus:g} GPUs' if gpus else ''} for {places.groups} "
        f"groups of {places.members} and {places.servers} servers"
    )


def _available() -> str:
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"


def _cpus(places: Places) -> int:
    servers = places.servers if places.dedicated else 0
    return (places.groups * places.members + servers) * places.threads


def _cause(error: RayActorError) -> str:
    """Return in a few words what Ray says in a paragraph."""
    told = str(error)
    if "killed by `ray.kill`" in told:
        return "it was killed"
    if "node has died" in told or "node died" in told:
        return "its node died or cannot be reached"
    if "connection error" in told:
        return "it ended unexpectedly: killed, out of memory, or crashed"
    return told.splitlines()[-1]


def _own_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
