"""Where the processes of a training run: the resources that it reserves in a Ray cluster."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fineprune.distributed.parameter_servers.events import Event, EventKind, ProcessKind, report
from fineprune.errors import InputError

# Seconds between two reports that processes wait for CPUs.
REPORT_EVERY = 10.0
_LOOK_SECONDS = 0.5


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

    @property
    def cpus(self) -> int:
        """The number of CPUs of all processes together."""
        servers = self.servers if self.dedicated else 0
        return (self.groups * self.members + servers) * self.threads

    def __str__(self) -> str:
        gpus = self.groups * self.members * self.gpus
        return (
            f"{self.cpus} free CPUs{f' and {gpus:g} GPUs' if gpus else ''} for {self.groups} "
            f"groups of {self.members} and {self.servers} servers"
        )


@dataclass(frozen=True)
class Node:
    """A node of the cluster: its identifier in Ray, its name, and its CPUs and GPUs."""

    id: str
    name: str
    cpus: float
    gpus: float = 0.0


class Placement:
    """Reserved resources: a bundle per group of replicas, then one per dedicated server.

    ``stop`` is called repeatedly. If it returns True, the wait for the resources ends.
    """

    def __init__(self, places: Places, stop: Callable[[], bool]) -> None:
        self.places = places
        self._group = _reserve(places, stop)
        self._shared: set[str] = set()
        self.report_shared_nodes()

    def options(self, kind: ProcessKind, index: int) -> dict[str, Any]:
        """Return Ray's options for a process."""
        places = self.places
        if kind is ProcessKind.WORKER:
            bundle, cpus, gpus = index // places.members, places.threads, places.gpus
        elif places.dedicated:
            bundle, cpus, gpus = places.groups + index, places.threads, 0.0
        else:
            bundle, cpus, gpus = index % places.groups, 0, 0.0
        return {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        }

    def unplaced(self) -> int:
        """Return the number of places that were lost with their nodes and not yet replaced."""
        return sum(not node for node in self._nodes_of_bundles().values())

    def report_shared_nodes(self) -> None:
        """Report the nodes that dedicated servers share with workers, if there are new ones."""
        if not self.places.dedicated:
            return
        nodes = self._nodes_of_bundles()
        groups = {nodes.get(bundle, "") for bundle in range(self.places.groups)}
        servers = {nodes[bundle] for bundle in nodes if bundle >= self.places.groups}
        shared = groups & servers - {""}
        if shared - self._shared:
            names = sorted({node.name for node in _nodes() if node.id in shared})
            report(Event(EventKind.SHARED, node=", ".join(names)))
        self._shared = shared

    def release(self) -> None:
        """Give the resources back."""
        remove_placement_group(self._group)

    def _nodes_of_bundles(self) -> dict[int, str]:
        nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        return nodes


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


def available() -> str:
    """Return the resources of the cluster, in words."""
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"


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


def _reserve(places: Places, stop: Callable[[], bool]) -> Any:
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
    reported = 0.0
    while not stop():
        try:
            ray.get(group.ready(), timeout=min(_LOOK_SECONDS, places.seconds))
            break
        except GetTimeoutError:
            waited = time.monotonic() - began
        if waited >= places.seconds:
            remove_placement_group(group)
            raise InputError(
                f"expected {places}, but found no place in {places.seconds:g} s on {available()}: "
                f"ask for fewer, or for a larger cluster"
            )
        if waited >= reported + REPORT_EVERY:
            reported = waited
            reason = f"{waited:.0f} s so far for {places}, on {available()}"
            report(Event(EventKind.WAITING, reason=reason))
    return group


def _not_on(nodes: Sequence[Node]) -> dict[str, str]:
    return {"ray.io/node-id": f"!in({','.join(node.id for node in nodes)})"}
