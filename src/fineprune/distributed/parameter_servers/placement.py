"""Where the processes of a training run: the resources that it reserves in a Ray cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fineprune.distributed.parameter_servers.events import Event, EventKind, ProcessKind, report
from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError

# How long to wait for resources before the training begins, and between two reports, in seconds.
_LONGEST_WAIT = 60.0
_REPORT_EVERY = 10.0


@dataclass(frozen=True)
class Places:
    """The resources that the processes of a training need.

    The members of a group are on one node. A dedicated server has CPUs of its own, on a node
    without groups if there are enough nodes; any other one shares the CPUs of a group.

    Attributes:
        strategy: The strategy, which says how many processes there are.
        threads: The number of torch threads in each process, which is also the number of CPUs of
            each replica and each dedicated server.
        gpus: The number of GPUs of each replica, which are the only ones that it sees.
    """

    strategy: Strategy
    threads: int = 1
    gpus: float = 0.0

    @property
    def dedicated(self) -> int:
        """The number of dedicated servers."""
        return self.strategy.servers if self.strategy.placement == "dedicated" else 0

    @property
    def cpus(self) -> int:
        """The number of CPUs of all processes together."""
        return (self.strategy.workers + self.dedicated) * self.threads

    @property
    def of_group(self) -> dict[str, float]:
        """The resources of a group, by Ray's names."""
        gpus = {"GPU": self.strategy.group * self.gpus} if self.gpus else {}
        return {"CPU": self.strategy.group * self.threads, **gpus}

    def __str__(self) -> str:
        strategy, gpus = self.strategy, self.strategy.workers * self.gpus
        return (
            f"{self.cpus} free CPUs{f' and {gpus:g} GPUs' if gpus else ''} for {strategy.groups} "
            f"groups of {strategy.group} and {strategy.servers} servers"
        )


class Placement:
    """Reserved resources: a bundle per group of replicas, then one per dedicated server."""

    def __init__(self, places: Places) -> None:
        self.places = places
        groups, dedicated = places.strategy.groups, places.dedicated
        bundles = [places.of_group] * groups + [{"CPU": float(places.threads)}] * dedicated
        selectors: list[dict[str, str]] | None = None
        if dedicated:
            nodes = {
                node["NodeID"]: node["Resources"]
                for node in ray.nodes()  # type: ignore[no-untyped-call]
                if node["Alive"]
            }
            if servers := nodes_for_servers(nodes, places):
                others = [node for node in nodes if node not in servers]
                selectors = [_not_on(servers)] * groups + [_not_on(others)] * dedicated
            else:
                reason = f"dedicated servers share nodes with workers: there are {len(nodes)} nodes"
                report(Event(EventKind.SHARED, reason))
        self._group = placement_group(bundles, strategy="SPREAD", bundle_label_selector=selectors)
        self._waited = self._reported = 0.0
        self._begun = False

    def options(self, kind: ProcessKind, index: int) -> dict[str, Any]:
        """Return Ray's options for a process."""
        places, strategy = self.places, self.places.strategy
        cpus, gpus = places.threads, 0.0
        if kind is ProcessKind.WORKER:
            bundle, gpus = index // strategy.group, places.gpus
        elif places.dedicated:
            bundle = strategy.groups + index
        else:
            bundle, cpus = index % strategy.groups, 0
        return {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        }

    def waits(self, passed: float) -> bool:
        """Return whether processes wait for resources, and report it from time to time.

        Args:
            passed: The seconds since the last call.

        Raises:
            InputError: The resources have not been there yet, and the wait is too long.
        """
        if placement_group_table(self._group)["state"] == "CREATED":
            self._begun, self._waited, self._reported = True, 0.0, 0.0
            return False
        self._waited += passed
        there = ray.cluster_resources()  # type: ignore[no-untyped-call]
        found = f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"
        if not self._begun and self._waited >= _LONGEST_WAIT:
            raise InputError(
                f"expected {self.places}, but found no place in {_LONGEST_WAIT:g} s on {found}: "
                f"ask for fewer, or for a larger cluster"
            )
        if self._waited >= self._reported + _REPORT_EVERY:
            self._reported = self._waited
            line = f"waiting for CPUs: {self._waited:.0f} s so far for {self.places}, on {found}"
            report(Event(EventKind.WAITING, line))
        return True

    def release(self) -> None:
        """Give the resources back."""
        remove_placement_group(self._group)


def nodes_for_servers(nodes: dict[str, dict[str, float]], places: Places) -> list[str]:
    """Choose nodes for dedicated servers so that the groups fit on the other nodes.

    Nodes with few GPUs and few CPUs are preferred. The number of nodes is the number of servers, or
    less if the groups need more nodes.

    Args:
        nodes: The resources of each node, by Ray's names.
        places: The resources that the training needs.

    Returns:
        The nodes; empty if there is no such choice.
    """

    def room(names: Sequence[str], each: dict[str, float]) -> float:
        """Return how many processes with the given resources fit on nodes."""
        return sum(
            min(nodes[name].get(kind, 0.0) // need for kind, need in each.items()) for name in names
        )

    server = {"CPU": float(places.threads)}
    large_enough = [name for name in nodes if room([name], server)]
    large_enough.sort(key=lambda name: (nodes[name].get("GPU", 0.0), nodes[name]["CPU"]))
    for number in range(min(places.dedicated, len(large_enough) - 1), 0, -1):
        chosen, others = large_enough[:number], large_enough[number:]
        if (
            room(chosen, server) >= places.dedicated
            and room(others, places.of_group) >= places.strategy.groups
        ):
            return chosen
    return []


def _not_on(nodes: Sequence[str]) -> dict[str, str]:
    # "Not in" instead of "in", because a node that leaves and returns has a new identifier.
    return {"ray.io/node-id": f"!in({','.join(nodes)})"}
