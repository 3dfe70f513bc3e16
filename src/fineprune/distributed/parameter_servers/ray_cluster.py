"""Processes on one machine or many, by Ray: started, called, waited for and killed.

Ray carries control only. It is imported nowhere else, and is the optional extra `cluster`.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
import torch
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fineprune.errors import InputError

_LOOPBACK = "127.0.0.1"


class Died(RuntimeError):
    """The process that was called died; its method may have run, in part or whole."""


@dataclass(frozen=True)
class Places:
    """What processes are given.

    Attributes:
        groups: of replicas.
        members: replicas of a group, all on one node.
        servers: how many.
        dedicated: servers get CPUs of their own, on other nodes where there are as many; otherwise
            they share those of the groups, in turn.
        threads: of torch in each process, and CPUs of each replica and dedicated server.
        gpus: of each replica, which sees no others.
        seconds: how long to wait for a place.
    """

    groups: int
    members: int = 1
    servers: int = 1
    dedicated: bool = False
    threads: int = 1
    gpus: float = 0.0
    seconds: float = 60.0


class _Host:
    """An actor: it holds one object, made by the first call, and calls its methods."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._held: Any = None

    def make(self, build: Callable[..., Any], arguments: Sequence[Any]) -> int:
        self._held = build(*arguments, host=_own_address())
        return os.getpid()

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        return getattr(self._held, method)(*arguments)


class Process:
    """A process that holds one object. Its calls return at once; see `Cluster.result`.

    Attributes:
        made: the call that makes the object; its result is the process's number.
    """

    def __init__(self, actor: Any, build: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self._actor = actor
        self.made: Any = actor.make.remote(build, arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object; returns what `Cluster.wait` and `.result` take."""
        return self._actor.call.remote(method, arguments)

    def kill(self) -> None:
        """End the process at once; does nothing if it is dead."""
        with contextlib.suppress(RayActorError):
            ray.kill(self._actor, no_restart=True)


class Cluster:
    """Places that are reserved for one training; made by `cluster`.

    Attributes:
        host: address of this process for links and stores.
    """

    def __init__(self, places: Places, group: Any) -> None:
        self._places = places
        self._group = group
        self._actors: list[Process] = []
        self.host = _own_address()

    def server(self, index: int, build: Callable[..., Any], arguments: Sequence[Any]) -> Process:
        """Start a server's process; `build(*arguments, host=...)` makes its object."""
        places = self._places
        bundle = places.groups + index if places.dedicated else index % places.groups
        # Every group can have one call under way, one link being made, and one of a life before.
        calls = 4 * places.groups + 8
        cpus = places.threads if places.dedicated else 0
        return self._start(bundle, cpus, 0.0, calls, build, arguments)

    def replica(self, group: int, build: Callable[..., Any], arguments: Sequence[Any]) -> Process:
        """Start a replica's process."""
        places = self._places
        return self._start(group, places.threads, places.gpus, 1, build, arguments)

    def wait(self, calls: Sequence[Any]) -> list[Any]:
        """Wait for one or more of these calls to end; returns those that have."""
        ended, _ = ray.wait(list(calls), num_returns=1)
        if len(calls) > 1:
            ended, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        return cast(list[Any], ended)

    def result(self, call: Any) -> Any:
        """Wait for a call, and return its result or raise its exception.

        Raises:
            Died: the process did.
        """
        try:
            return ray.get(call)
        except RayActorError as error:
            raise Died(str(error).splitlines()[0]) from None

    def close(self) -> None:
        """Kill all processes and give their places back."""
        for actor in self._actors:
            actor.kill()
        remove_placement_group(self._group)

    def _start(
        self,
        bundle: int,
        cpus: float,
        gpus: float,
        calls: int,
        build: Callable[..., Any],
        arguments: Sequence[Any],
    ) -> Process:
        options: dict[str, Any] = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": calls,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        }
        actor = ray.remote(_Host).options(**options).remote(self._places.threads)
        process = Process(actor, build, arguments)
        self._actors.append(process)
        return process


@contextlib.contextmanager
def cluster(places: Places) -> Iterator[Cluster]:
    """Join the Ray that runs here or that `RAY_ADDRESS` names, or start one on this machine.

    One that is started here listens on the loopback interface only, has no dashboard, reports
    nothing to its makers, has as many CPUs as are needed, and ends with this block, as do all
    processes of the training.

    Raises:
        InputError: the places are not there in time.
    """
    started = not ray.is_initialized()
    if started:
        start_ray(_cpus(places))
    try:
        group = _reserve(places)
        held = Cluster(places, group)
        try:
            yield held
        finally:
            held.close()
    finally:
        if started:
            ray.shutdown()


def start_ray(cpus: int) -> None:
    """Join the Ray that `RAY_ADDRESS` names, or start one on this machine with so many CPUs."""
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


def _reserve(places: Places) -> Any:
    replicas: dict[str, float] = {"CPU": places.members * places.threads}
    if places.gpus:
        replicas["GPU"] = places.members * places.gpus
    bundles = [dict(replicas) for _ in range(places.groups)]
    if places.dedicated:
        bundles += [{"CPU": float(places.threads)} for _ in range(places.servers)]
    group = placement_group(bundles, strategy="SPREAD")
    try:
        ray.get(group.ready(), timeout=places.seconds)
    except GetTimeoutError:
        remove_placement_group(group)
        there = ray.cluster_resources()  # type: ignore[no-untyped-call]
        gpus = f" and {sum(b.get('GPU', 0) for b in bundles):g} GPUs" if places.gpus else ""
        raise InputError(
            f"expected {_cpus(places)} free CPUs{gpus} for {places.groups} groups of "
            f"{places.members} and {places.servers} servers, but found no place in "
            f"{places.seconds:g} s on {there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} "
            f"GPUs: ask for fewer, or for a larger cluster"
        ) from None
    return group


def _cpus(places: Places) -> int:
    servers = places.servers if places.dedicated else 0
    return (places.groups * places.members + servers) * places.threads


def _own_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
