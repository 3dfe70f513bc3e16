"""Starts, calls, awaits and kills processes on one or several machines, with Ray.

Ray carries control messages only. It is an optional dependency (the extra ``cluster``), and no
other module imports it.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import ray
import ray._private.worker as ray_worker
import torch
from ray._private import ray_constants
from ray.exceptions import (
    ActorUnavailableError,
    AuthenticationError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fineprune.distributed.parameter_servers.end_ray import ray_ends_with_this_process
from fineprune.distributed.parameter_servers.events import (
    LOGGER,
    Event,
    EventKind,
    Report,
    reporter,
)
from fineprune.distributed.parameter_servers.link import LinkBroken
from fineprune.errors import InputError, RunError, first_line

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

_LOOPBACK = "127.0.0.1"
# Seconds between two reports that processes wait for CPUs.
REPORT_EVERY = 10.0
# Ray creates Unix sockets in its folder, whose names have up to 66 characters. On Linux, the path
# of a socket has at most 107 bytes.
_LONGEST_FOLDER = 40
# Why a process died together with its node.
LOST_NODE = "its node died or cannot be reached"
# Seconds to wait for an answer at the address of a cluster.
_CONNECT_SECONDS = 10.0


class Died(RuntimeError):
    """The called process died. The method may have run partly, completely or not at all."""


class Silent(RuntimeError):
    """A call did not end in time."""


class RemoteError(RuntimeError):
    """A called method raised an exception. The message is one line: the exception and its place.

    ``__cause__`` is Ray's exception, which shows the stack trace of the other process.
    """


@dataclass(frozen=True)
class Places:
    """The resources that the processes of a training need.

    Attributes:
        groups: The number of groups of replicas.
        members: The number of replicas in a group, which are all on one node.
        servers: The number of servers.
        dedicated: Whether servers have CPUs of their own, on nodes without groups if there are
            enough nodes. Otherwise, each server shares the CPUs of a group.
        threads: The number of torch threads in each process, which is also the number of CPUs of
            each replica and each dedicated server.
        gpus: The number of GPUs of each replica, which are the only ones that it sees.
        seconds: How long to wait for these resources.
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
    """Where a process runs: its process ID, and the name of its node."""

    pid: int
    node: str


@dataclass(frozen=True)
class Call(Generic[R]):
    """A call to another process. ``Cluster.result`` returns the result of the method."""

    reference: Any


class _Host:
    """The Ray actor. It holds one object, which ``make`` creates, and calls its methods."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._held: Any = None

    def locate(self) -> Location:
        return Location(os.getpid(), socket.gethostname())

    def make(
        self, build: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]
    ) -> None:
        self._held = build(_own_address(), *arguments, **named)

    def call(
        self, method: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]
    ) -> Any:
        return method(self._held, *arguments, **named)

    @ray.method(concurrency_group="ping")
    def ping(self) -> None:
        """Return at once, even while a method runs, because pings have a separate thread."""


class Process(Generic[T]):
    """A process that holds one object of type ``T``.

    Attributes:
        placed: A call that ends when the process runs. Until then, it may wait for CPUs.
        made: A call that ends when the object has been made.
    """

    def __init__(
        self,
        actor: Any,
        build: Callable[..., T],
        arguments: Sequence[Any],
        named: dict[str, Any],
    ) -> None:
        self._actor = actor
        self.placed: Call[Location] = Call(actor.locate.remote())
        self.made: Call[None] = Call(actor.make.remote(build, arguments, named))

    def call(
        self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Call[R]:
        """Start a method of the object and return at once.

        Args:
            method: The method, as an attribute of the class, such as ``Worker.push``.
            args: The positional arguments, which must be picklable.
            kwargs: The keyword arguments, which must be picklable.
        """
        return Call(self._actor.call.remote(method, args, kwargs))

    def ping(self) -> Call[None]:
        """Check that the process is alive. It answers at once, even while a method runs."""
        return Call(self._actor.ping.remote())

    def kill(self) -> None:
        """Kill the process; do nothing if it is dead."""
        with contextlib.suppress(RayActorError):
            ray.kill(self._actor, no_restart=True)


class Cluster:
    """The resources that are reserved for one training. The function ``cluster`` makes it.

    Attributes:
        host: The address of this process for links and stores.
    """

    def __init__(self, places: Places, group: Any, report: Report) -> None:
        self._places = places
        self._group = group
        self._report = report
        self._actors: list[Process[Any]] = []
        self._shared: set[str] = set()
        self.host = _own_address()

    def start_server(
        self,
        index: int,
        build: Callable[Concatenate[str, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Process[T]:
        """Start a server's process, in which ``build(host, *args, **kwargs)`` makes the object.

        ``host`` is the address of the process for links.
        """
        places = self._places
        bundle = places.groups + index if places.dedicated else index % places.groups
        cpus = places.threads if places.dedicated else 0
        # Each group may have a call in progress, a link being made, and calls of old generations.
        calls = 4 * places.groups + 8
        return self._start(self._options(bundle, cpus, 0.0, calls), build, args, kwargs)

    def start_worker(
        self,
        group: int,
        build: Callable[Concatenate[str, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Process[T]:
        """Start a worker's process, as with ``start_server``. It runs one call at a time."""
        places = self._places
        options = self._options(group, places.threads, places.gpus, 1)
        return self._start(options, build, args, kwargs)

    def wait(self, calls: Sequence[Call[Any]], seconds: float | None = None) -> list[Call[Any]]:
        """Wait until at least one of these calls ends, and return those that have ended.

        Args:
            calls: The calls, at least one.
            seconds: How long to wait at most; None for no limit. Then the result may be empty.
        """
        by_reference = {call.reference: call for call in calls}
        references = list(by_reference)
        ended, _ = ray.wait(references, num_returns=1, timeout=seconds)
        if ended and len(references) > 1:
            ended, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return [by_reference[reference] for reference in ended]

    def result(self, call: Call[R], seconds: float | None = None) -> R:
        """Wait for a call, and return its result or raise its exception.

        Args:
            call: The call.
            seconds: How long to wait at most; None for no limit.

        Raises:
            Died: The process died.
            Silent: The call did not end in time.
            LinkBroken, InputError: The method raised it.
            RemoteError: The method raised another exception.
        """
        try:
            return cast(R, ray.get(call.reference, timeout=seconds))
        except (RayActorError, OutOfMemoryError) as error:
            raise Died(_cause(error)) from None
        except GetTimeoutError:
            raise Silent(f"killed because it did not answer for {seconds:g} s") from None
        except RayTaskError as error:
            # These explain the failure in one line. Other errors keep the remote stack trace.
            if isinstance(error.cause, LinkBroken | InputError):
                raise error.cause from None
            raise RemoteError(_described(error)) from error

    def unplaced(self) -> int:
        """Return the number of places that were lost with their nodes and not yet replaced."""
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        return sum(not node for node in nodes.values())

    def report_shared_nodes(self) -> None:
        """Report the nodes that dedicated servers share with workers, if there are new ones."""
        if not self._places.dedicated:
            return
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        groups = {nodes[bundle] for bundle in range(self._places.groups)}
        servers = {nodes[bundle] for bundle in nodes if bundle >= self._places.groups}
        shared = groups & servers - {""}
        if shared - self._shared:
            names = sorted({node.name for node in _nodes() if node.id in shared})
            self._report(Event(EventKind.SHARED, node=", ".join(names)))
        self._shared = shared

    def close(self) -> None:
        """Kill all processes and release the resources."""
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
        remote: Any = ray.remote  # its type does not declare concurrency groups
        actor = (
            remote(concurrency_groups={"ping": 1})(_Host)
            .options(**options)
            .remote(self._places.threads)
        )
        process = Process(actor, build, arguments, named)
        self._actors.append(process)
        return process


@contextlib.contextmanager
def cluster(places: Places, *, on_event: Report | None = None) -> Iterator[Cluster]:
    """Reserve resources in the Ray cluster that ``ray_session`` joins or starts.

    All processes of the training end with this block.

    Args:
        places: The resources to reserve.
        on_event: Function that is called with each event during the wait for the resources.

    Raises:
        InputError: The resources are not available in time.
        RunError: Ray did not start on this machine.
    """
    report = reporter(on_event)
    with ray_session(_cpus(places)):
        held = Cluster(places, _reserve(places, report), report)
        try:
            held.report_shared_nodes()
            yield held
        finally:
            held.close()


@contextlib.contextmanager
def ray_session(cpus: int) -> Iterator[None]:
    """Use the Ray of this process, join the one that ``RAY_ADDRESS`` names, or start a new one.

    A new Ray runs on this machine only. It listens on the loopback interface, has no dashboard and
    sends no usage statistics. It ends with this block, or when this process is killed. Its files
    are in a temporary folder, which is then removed.

    Within this block, SIGTERM has the same effect as before. If that was to end the process
    immediately, it raises SystemExit instead, so that Ray is shut down.

    Args:
        cpus: The number of CPUs that the training needs.

    Raises:
        InputError: The cluster that ``RAY_ADDRESS`` names cannot be joined.
        RunError: Ray did not start on this machine.
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
            folder = stack.enter_context(_short_temporary_folder())
            stack.enter_context(ray_ends_with_this_process(folder))
            options |= {
                "address": "local",
                "num_cpus": max(cpus, os.cpu_count() or 1),
                "include_dashboard": False,
                "_node_ip_address": _LOOPBACK,
                "_temp_dir": folder,
                # Else Ray starts a process for each CPU, most of which are never used.
                "_system_config": {"prestart_worker_first_driver": False},
            }
        else:
            options["address"] = address
        stack.enter_context(_own_sigterm(lambda: _init(options)))
        stack.callback(ray.shutdown)
        yield


def _init(options: dict[str, Any]) -> None:
    """Call ``ray.init``.

    Raises:
        InputError: The cluster cannot be joined.
        RunError: Ray did not start on this machine.
    """
    address = options["address"]
    if address == "local":
        try:
            ray.init(**options)
        except Exception as error:  # Ray raises this class itself, when half a minute has passed.
            raise RunError(
                f"Ray did not start on this machine: {first_line(error)} If the machine is busy, "
                f"start the run again when there is less to do"
            ) from error
        return
    expected = f"expected a Ray cluster at {address!r}, which RAY_ADDRESS names, but "
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
    except (AuthenticationError, ConnectionError) as error:
        if "token" not in f"{error} {error.__cause__}".lower():
            raise InputError(f"{expected}{first_line(error)}") from error
        raise InputError(
            f"{expected}it asks for a token: set RAY_AUTH_MODE=token, and put the token of the "
            f"first node into ~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from None


@contextlib.contextmanager
def _short_temporary_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="ray-")
    if len(folder.encode()) > _LONGEST_FOLDER:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _own_sigterm(start: Callable[[], object]) -> Iterator[None]:
    """Start Ray, and replace its SIGTERM handler, which prints a stack trace and then waits.

    Only the main thread can set signal handlers; in other threads, the handler stays as it is.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        start()
        if main:
            signal.signal(signal.SIGTERM, _exit if before == signal.SIG_DFL else before)
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


@dataclass(frozen=True)
class Node:
    """A node of the cluster: its identifier in Ray, its name, and its CPUs and GPUs."""

    id: str
    name: str
    cpus: float
    gpus: float = 0.0


def nodes_for_servers(nodes: Sequence[Node], places: Places) -> list[Node]:
    """Choose nodes for dedicated servers so that the groups fit on the other nodes.

    Nodes with few GPUs and few CPUs are preferred. The number of nodes is the number of servers, or
    less if the groups need more nodes.

    Returns:
        The nodes; empty if there is no such choice.
    """
    large_enough = [node for node in nodes if node.cpus >= places.threads]
    large_enough.sort(key=lambda node: (node.gpus, node.cpus))
    for number in range(min(places.servers, len(large_enough) - 1), 0, -1):
        chosen, others = large_enough[:number], large_enough[number:]
        room_for_servers = sum(node.cpus // places.threads for node in chosen)
        room_for_groups = sum(_groups_on(node, places) for node in others)
        if room_for_servers >= places.servers and room_for_groups >= places.groups:
            return chosen
    return []


def _groups_on(node: Node, places: Places) -> float:
    """Return the number of groups of replicas that fit on a node."""
    groups = node.cpus // (places.members * places.threads)
    if places.gpus:
        groups = min(groups, node.gpus // (places.members * places.gpus))
    return groups


def _nodes() -> list[Node]:
    return [
        Node(
            node["NodeID"],
            node["NodeManagerHostname"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def _reserve(places: Places, report: Report) -> Any:
    """Return a placement group: a bundle per group of replicas, then one per dedicated server."""
    replicas: dict[str, float] = {"CPU": places.members * places.threads}
    if places.gpus:
        replicas["GPU"] = places.members * places.gpus
    bundles = [dict(replicas) for _ in range(places.groups)]
    selectors: list[dict[str, str]] | None = None
    if places.dedicated:
        bundles += [{"CPU": float(places.threads)} for _ in range(places.servers)]
        nodes = _nodes()
        servers = nodes_for_servers(nodes, places)
        if servers:
            # "Not in" instead of "in", because a node that leaves and returns has a new identifier.
            selectors = [_not_on(servers)] * places.groups
            selectors += [_not_on([n for n in nodes if n not in servers])] * places.servers
    group = placement_group(bundles, strategy="SPREAD", bundle_label_selector=selectors)
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        try:
            ray.get(group.ready(), timeout=max(0.0, min(REPORT_EVERY, places.seconds - waited)))
            return group
        except GetTimeoutError:
            waited = time.monotonic() - began
            if waited >= places.seconds:
                remove_placement_group(group)
                raise InputError(
                    f"expected {_wanted(places)}, but found no place in {places.seconds:g} s on "
                    f"{available()}: ask for fewer, or for a larger cluster"
                ) from None
            reason = f"{waited:.0f} s so far for {_wanted(places)}, on {available()}"
            report(Event(EventKind.WAITING, reason=reason))


def _not_on(nodes: Sequence[Node]) -> dict[str, str]:
    return {"ray.io/node-id": f"!in({','.join(node.id for node in nodes)})"}


def _wanted(places: Places) -> str:
    gpus = places.groups * places.members * places.gpus
    return (
        f"{_cpus(places)} free CPUs{f' and {gpus:g} GPUs' if gpus else ''} for {places.groups} "
        f"groups of {places.members} and {places.servers} servers"
    )


def available() -> str:
    """Return the resources of the cluster, in words."""
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"


def _cpus(places: Places) -> int:
    servers = places.servers if places.dedicated else 0
    return (places.groups * places.members + servers) * places.threads


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
    """Return in one line the exception that a method raised in another process, and its place."""
    frames = re.findall(r'File "(.+)", line (\d+)', str(error))
    place = ": {}, line {}".format(*frames[-1]) if frames else ""
    return f"{type(error.cause).__name__}: {first_line(error.cause)} (in a worker or server{place})"


def _own_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
