"""Processes on one machine or on many, by Ray: started, called, waited for and killed.

Ray carries control messages only. No other module imports it, and it is the optional extra
``cluster``.
"""

import contextlib
import logging
import os
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
from fineprune.errors import InputError

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

_LOOPBACK = "127.0.0.1"
# Seconds between two reports of a wait for CPUs.
REPORT_EVERY = 10.0
# Ray makes Unix sockets below its folder, with names of up to 66 characters; Linux allows a path of
# 107 bytes in all.
_LONGEST_FOLDER = 40
# Seconds after which nothing answers at an address.
_CONNECT_SECONDS = 10.0


class Died(RuntimeError):
    """The process that was called died. Its method may have run, in part or to its end."""


class Silent(RuntimeError):
    """A call has not ended in time."""


@dataclass(frozen=True)
class Places:
    """What the processes of a training need.

    Attributes:
        groups: The number of groups of replicas.
        members: The number of replicas of a group, all on one node.
        servers: The number of servers.
        dedicated: Whether servers get CPUs of their own, on other nodes than the groups if there
            is room for both; otherwise they share the CPUs of the groups, in turn.
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
    """The actor: it holds one object, made by its second call, and calls its methods."""

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
        """Answer; this has a thread of its own, so it answers while a method runs."""


class Process(Generic[T]):
    """A process that holds one object of type ``T``.

    Attributes:
        placed: Ends when the process runs. Until then it may wait for CPUs.
        made: Ends when its object is made.
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
            method: The method as the class has it, such as ``Worker.push``.
            args: Its arguments, which must be picklable.
            kwargs: Its named arguments.
        """
        return Call(self._actor.call.remote(method, args, kwargs))

    def ping(self) -> Call[None]:
        """Ask for a sign of life. The process answers at once, also while a method runs."""
        return Call(self._actor.ping.remote())

    def kill(self) -> None:
        """End the process at once; do nothing if it is dead."""
        with contextlib.suppress(RayActorError):
            ray.kill(self._actor, no_restart=True)


class Cluster:
    """The places that are reserved for one training; made by ``cluster``.

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

    def wait(self, calls: Sequence[Call[Any]], seconds: float | None = None) -> list[Call[Any]]:
        """Wait until at least one of these calls ends, and return those that have ended.

        Args:
            calls: The calls, at least one.
            seconds: How long to wait at most; the result may be empty then.
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
            seconds: How long to wait at most.

        Raises:
            Died: The process died.
            Silent: The call has not ended in time.
        """
        try:
            return cast(R, ray.get(call.reference, timeout=seconds))
        except RayActorError as error:
            raise Died(_cause(error)) from None
        except GetTimeoutError:
            raise Silent(f"killed, since it did not answer for {seconds:g} s") from None
        except RayTaskError as error:
            # These say what happened in one line; others keep the stack of their process.
            if isinstance(error.cause, LinkBroken | InputError):
                raise error.cause from None
            raise

    def unplaced(self) -> int:
        """Return how many places are lost with their nodes, and not yet found again."""
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
        remote: Any = ray.remote  # its type knows nothing of concurrency groups
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
    """Reserve places in the Ray that ``ray_session`` finds or starts.

    All processes of the training end with this block.

    Args:
        places: What to reserve.
        on_event: Called with each event while the places are awaited.

    Raises:
        InputError: The places are not there in time.
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
    """Join the Ray that runs here or that ``RAY_ADDRESS`` names, or start one on this machine.

    A Ray that is started here listens on the loopback interface only, has no dashboard, sends no
    usage statistics, and ends with this block, or when this process is killed. Its files lie in a
    temporary folder that is removed.

    Within this block, SIGTERM does what it did before; if that was to end the process at once, it
    raises SystemExit instead, so that everything is put away.

    Args:
        cpus: The number of CPUs that the training needs.

    Raises:
        InputError: The cluster that ``RAY_ADDRESS`` names cannot be joined.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Calls under way at a death are dropped, and Ray would print what became of each.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_rays_messages_logged())
        address = os.environ.get("RAY_ADDRESS", "local")
        if address in ("", "local"):
            # Else Ray would replace 127.0.0.1 by another interface's address, and listen on all.
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
    """Call ``ray.init``; if the cluster cannot be joined, say why in one line."""
    address = options["address"]
    expected = f"expected a Ray cluster at {address!r}, which RAY_ADDRESS names, but "
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in host:
        try:  # Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            raise InputError(
                f"{expected}nothing answers there ({error}): start it with `ray start --head`"
            ) from None
    try:
        ray.init(**options)
    except (AuthenticationError, ConnectionError) as error:
        if "token" not in f"{error} {error.__cause__}".lower():
            raise InputError(f"{expected}{str(error).splitlines()[0]}") from error
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
    """Start Ray, and take back SIGTERM, which Ray would answer with a stack trace and a long wait.

    Signals can be handled in the main thread only; elsewhere nothing is done about them.
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
    """Log what Ray would print in paragraphs, such as after a death: the events say it shorter."""

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
    """A node of the cluster: Ray's identifier for it, its name, and its CPUs and GPUs."""

    id: str
    name: str
    cpus: float
    gpus: float = 0.0


def nodes_for_servers(nodes: Sequence[Node], places: Places) -> list[Node]:
    """Choose nodes for dedicated servers so that the groups fit on the others.

    Nodes with few GPUs and few CPUs are preferred. There are as many as servers, or fewer if the
    groups need the room.

    Returns:
        The nodes; none if there is no such choice.
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
    """Return how many groups of replicas fit on a node."""
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
    """Return a placement group: a bundle for each group of replicas, then one for each server."""
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
            # Not "in": a node that leaves and comes back has another identifier.
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
    """Return in words what the cluster has."""
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
    if isinstance(error, ActorUnavailableError):
        return "its node cannot be reached"
    return told.splitlines()[-1]


def _own_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
