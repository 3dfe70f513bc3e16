"""Where the processes of a training run: the resources that it reserves in a Ray cluster."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fineprune.distributed.parameter_servers.processes import EventKind, ProcessKind, report
from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError

# How long to wait for resources before the training begins, and between two reports, in seconds.
_LONGEST_WAIT = 60.0
_REPORT_EVERY = 10.0

Resources = dict[str, float]


def bundles_for(
    strategy: Strategy, threads: int, gpus: float
) -> tuple[list[Resources], list[Resources]]:
    """Return the resources of each group and of each dedicated server, by Ray's names.

    Servers that are not dedicated share the CPUs of the groups.
    """
    group = {"CPU": float(strategy.group * threads)}
    if gpus:
        group["GPU"] = strategy.group * gpus
    return [group] * strategy.groups, [{"CPU": float(threads)}] * strategy.dedicated_servers


class Placement:
    """The resources that a training reserves: a CPU for each thread, and the workers' GPUs."""

    def __init__(self, strategy: Strategy, threads: int, gpus: float) -> None:
        self._strategy, self._threads, self._gpus = strategy, threads, gpus
        groups, servers = bundles_for(strategy, threads, gpus)
        selectors: list[dict[str, str]] | None = None
        if servers:
            nodes = {
                node["NodeID"]: node["Resources"]
                for node in ray.nodes()  # type: ignore[no-untyped-call]
                if node["Alive"]
            }
            if chosen := nodes_for_servers(nodes, groups, servers):
                others = [node for node in nodes if node not in chosen]
                selectors = [_not_on(chosen)] * len(groups) + [_not_on(others)] * len(servers)
            else:
                reason = f"dedicated servers share nodes with workers: there are {len(nodes)} nodes"
                report(EventKind.SHARED, reason)
        self._bundles = groups + servers
        self._group = placement_group(
            self._bundles, strategy="SPREAD", bundle_label_selector=selectors
        )
        self._waited = self._reported = 0.0
        self._begun = False

    def options(self, kind: ProcessKind, index: int) -> dict[str, Any]:
        """Return Ray's options for a process."""
        strategy, cpus, gpus = self._strategy, self._threads, 0.0
        if kind is ProcessKind.WORKER:
            bundle, gpus = index // strategy.group, self._gpus
        elif strategy.dedicated_servers:
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

        ``passed`` are the seconds since the last call.

        Raises:
            InputError: The resources have not been there yet, and the wait is too long.
        """
        if placement_group_table(self._group)["state"] == "CREATED":
            self._begun, self._waited, self._reported = True, 0.0, 0.0
            return False
        self._waited += passed
        there = ray.cluster_resources()  # type: ignore[no-untyped-call]
        needed, found = _told(self._bundles), _told([there])
        if not self._begun and self._waited >= _LONGEST_WAIT:
            raise InputError(
                f"expected {needed} free for {self._strategy.groups} groups of "
                f"{self._strategy.group} and {self._strategy.servers} servers, but found no place "
                f"in {_LONGEST_WAIT:g} s on {found}: ask for fewer, or for a larger cluster"
            )
        if self._waited >= self._reported + _REPORT_EVERY:
            self._reported = self._waited
            line = f"waiting for CPUs: {self._waited:.0f} s so far for {needed}, on {found}"
            report(EventKind.WAITING, line)
        return True

    def release(self) -> None:
        """Give the resources back."""
        remove_placement_group(self._group)


def nodes_for_servers(
    nodes: dict[str, Resources], groups: Sequence[Resources], servers: Sequence[Resources]
) -> list[str]:
    """Choose nodes for dedicated servers so that the groups fit on the others; empty if none do.

    Nodes with few GPUs and few CPUs are preferred. The number of nodes is the number of servers, or
    less if the groups need more nodes.

    Args:
        nodes: The resources of each node, by Ray's names.
        groups, servers: The bundles.
    """

    def fits(names: Sequence[str], bundles: Sequence[Resources]) -> bool:
        """Return whether bundles, which are equal, fit on nodes."""
        needs = bundles[0].items()
        room = [min(nodes[name].get(kind, 0.0) // need for kind, need in needs) for name in names]
        return sum(room) >= len(bundles)

    large_enough = [name for name in nodes if fits([name], servers[:1])]
    large_enough.sort(key=lambda name: (nodes[name].get("GPU", 0.0), nodes[name]["CPU"]))
    for number in range(min(len(servers), len(large_enough)), 0, -1):
        chosen, others = large_enough[:number], large_enough[number:]
        if fits(chosen, servers) and fits(others, groups):
            return chosen
    return []


def _told(bundles: Sequence[Resources]) -> str:
    cpus, gpus = (sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU"))
    return f"{cpus:g} CPUs and {gpus:g} GPUs"


def _not_on(nodes: Sequence[str]) -> dict[str, str]:
    # "Not in" instead of "in", because a node that leaves and returns has a new identifier.
    return {"ray.io/node-id": f"!in({','.join(nodes)})"}
