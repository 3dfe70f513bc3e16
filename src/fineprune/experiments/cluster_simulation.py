"""Simulates the time of a distributed training: who waits for whom, without computing anything.

The resources are the link of each node, in each direction; the servers; and the coordinator. Each
serves one request after another, in the order of their arrival. A worker computes, pushes its
gradient to all servers, waits for the update, and pulls the parameters. The simulation is
deterministic: the durations of steps are drawn from measured ones, once for all workers of a node,
because what slows a node down slows all of them down.
"""

import heapq
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.experiments.cluster_costs import ClusterShape, Costs
from fineprune.experiments.configurations import ALL_REDUCE, ONE, Configuration

Array = npt.NDArray[np.float64]

# The steps of each worker, the first of which are a warm-up. A simulation of many workers averages
# over them, so that fewer steps suffice.
_STEPS, _FEWEST_STEPS, _WARM_UP = 60, 9, 3
_MOST_STEPS_IN_ALL = 8_000
# DDP exchanges gradients in parts of 25 MB, during the backward pass, which takes about two thirds
# of a step. Only the last part has nothing to overlap with.
_BUCKET_MEGABYTES, _BACKWARD = 25.0, 2 / 3
# How busy a resource is that counts as the limit of the throughput.
_SATURATED = 0.9


@dataclass(frozen=True)
class Simulated:
    """What a simulation measured.

    Attributes:
        throughput: The applied samples per second.
        staleness_mean, staleness_p95: The mean and the 95th percentile of the updates' staleness.
        limit: What limits the throughput: compute, waiting (for slower workers), link, server,
            coordinator, or exchange (a worker's time from its gradient to its next parameters, if
            no resource is occupied most of the time).
        busy: The share of the time for which the most occupied link, the servers and the
            coordinator are occupied.
    """

    throughput: float
    staleness_mean: float
    staleness_p95: float
    limit: str
    busy: dict[str, float]


def simulate(costs: Costs, cluster: ClusterShape, configuration: Configuration) -> Simulated:
    """Simulate a configuration on a cluster.

    Workers fill the nodes one after another. Shared servers are spread over the workers' nodes, and
    each dedicated server has a node of its own.
    """
    if configuration.distributed.staleness_bound is not None:
        raise InputError(
            f"expected a configuration without bound= for a prediction, got {configuration.text!r}"
        )
    if configuration.strategy == ONE:
        return Simulated(costs.samples / costs.step, 0.0, 0.0, "compute", {})
    if configuration.strategy == ALL_REDUCE:
        return _all_reduce(costs, cluster, configuration.workers)
    if configuration.strategy == "sync":
        return _Training(costs, cluster, configuration).synchronous()
    return _Training(costs, cluster, configuration).asynchronous()


def _all_reduce(costs: Costs, cluster: ClusterShape, ranks: int) -> Simulated:
    """The slowest node computes, and what DDP cannot hide of a ring all-reduce follows."""
    nodes = -(-ranks // cluster.accelerators)
    rng = np.random.default_rng(0)
    rounds = max(_FEWEST_STEPS, min(1000, _MOST_STEPS_IN_ALL * 10 // nodes))
    slowest = float(rng.choice(costs.steps, (rounds, nodes)).max(axis=1).mean())
    # The ring crosses each node's link once in each direction, however many ranks the node has.
    ring = cluster.seconds(2 * (nodes - 1) / nodes * costs.megabytes)
    ring += 2 * (nodes - 1) * cluster.latency
    parts = max(1, round(costs.megabytes / _BUCKET_MEGABYTES))
    hidden = min(ring * (parts - 1) / parts, _BACKWARD * costs.step)
    total = slowest + ring - hidden
    waits = {"compute": costs.step, "waiting": slowest - costs.step, "link": ring - hidden}
    limit = max(waits, key=waits.__getitem__)
    return Simulated(ranks * costs.samples / total, 0.0, 0.0, limit, {"link": ring / total})


def _shares(busy: dict[str, float]) -> dict[str, float]:
    # A transfer that was begun counts as a whole, but may end after the last update.
    return {name: min(1.0, share) for name, share in busy.items()}


class _Resource:
    """Something that serves one request after another."""

    def __init__(self) -> None:
        self.free = 0.0
        self.busy = 0.0

    def take(self, time: float, seconds: float) -> float:
        """Return when a request that arrives now is done."""
        self.free = max(self.free, time) + seconds
        self.busy += seconds
        return self.free


def _ends(times: Array, seconds: float) -> Array:
    """Return when transfers over one link end, each of which would take so long alone.

    TCP neither queues transfers nor shares a link equally: of three that began together, the first
    ended after 55 to 80 % of the time of all. So each ends halfway between its end in a queue and
    the end of all that overlap.

    Args:
        times: When they begin; float64, shape (n,), n > 0.
        seconds: The duration of each.
    """
    order = np.argsort(times, kind="stable")
    begins, number = times[order], np.arange(len(times))
    queued = np.maximum.accumulate(begins - number * seconds) + (number + 1) * seconds
    idle = np.append(begins[1:] >= queued[:-1], True)  # whether the link has nothing to do then
    result: Array = np.empty_like(times)
    result[order] = (queued + queued[idle][np.searchsorted(number[idle], number)]) / 2
    return result


class _Training:
    """The state of a simulated training with servers."""

    def __init__(self, costs: Costs, cluster: ClusterShape, configuration: Configuration) -> None:
        self._costs = costs
        self._cluster = cluster
        group, strategy = configuration.group, configuration.distributed
        self._groups, self._quorum = strategy.groups, strategy.quorum
        self._samples = costs.samples * group
        self._servers = configuration.servers
        workers = [index * group // cluster.accelerators for index in range(self._groups)]
        self._node = np.array(workers)
        worker_nodes = -(-configuration.workers // cluster.accelerators)
        if configuration.dedicated:
            hosts = worker_nodes + np.arange(self._servers)
        else:
            hosts = np.arange(self._servers) % worker_nodes
        # The nodes with servers, and the share of the parameters that each of them holds.
        self._hosts, counts = np.unique(hosts, return_counts=True)
        share = counts / self._servers
        # Which groups use a link to which of these nodes.
        self._remote = self._node[:, None] != self._hosts
        nodes = int(max(self._node.max(), self._hosts.max())) + 1
        # When the link of each node is free, and how long it has been busy: outward, then inward.
        self._link_free, self._link_busy = np.zeros((2, nodes)), np.zeros((2, nodes))
        # How long the part of each node with servers occupies a link, in seconds.
        whole = cluster.seconds(costs.megabytes), cluster.seconds(costs.megabytes * costs.gradients)
        self._parts = {outward: seconds * share for outward, seconds in enumerate(whole)}
        self._server, self._coordinator = _Resource(), _Resource()
        self._rng = np.random.default_rng(0)
        many = -(-_MOST_STEPS_IN_ALL // self._groups)
        self._steps = max(_FEWEST_STEPS, min(_STEPS, many))
        drawn = self._rng.choice(costs.steps, (self._steps * 2, nodes))
        # All members of a group on several nodes wait for the slowest of them.
        spanned = -(-group // cluster.accelerators)
        if spanned > 1:
            more = self._rng.choice(costs.steps, (spanned - 1, *drawn.shape))
            drawn = np.maximum(drawn, more.max(axis=0))
        self._drawn = drawn

    def asynchronous(self) -> Simulated:
        """Each gradient is an update of its own, in the order of their arrival."""
        costs = self._costs
        # The updates that each worker has read, and its steps.
        read, count = [0] * self._groups, [0] * self._groups
        stale: list[int] = []
        times: list[float] = []
        # Time, order of events at the same time, worker, and what is done now.
        events: list[tuple[float, int, int, int]] = []
        order = itertools.count()

        def later(time: float, worker: int, stage: int) -> None:
            heapq.heappush(events, (time, next(order), worker, stage))

        # Workers that start at the same time would stay in step.
        for worker in range(self._groups):
            later(costs.step * worker / self._groups, worker, 0)
        while len(times) < self._steps * self._groups:
            now, _, worker, stage = heapq.heappop(events)
            if stage == 0:  # read the parameters, and compute
                drawn = self._drawn[count[worker] % len(self._drawn), self._node[worker]]
                later(now + float(drawn), worker, 1)
                count[worker] += 1
            elif stage == 1:  # push
                later(self._transfer(worker, now, outward=True) + self._before(), worker, 2)
            elif stage == 2:  # update
                told = self._coordinator.take(now, costs.coordinate)
                done = self._server.take(told, (costs.serve + costs.apply) / self._servers)
                stale.append(len(times) - read[worker])
                times.append(done)
                read[worker] = len(times)  # The servers send it together with the update.
                later(done, worker, 3)
            else:  # pull
                later(self._transfer(worker, now, outward=False), worker, 0)
        warm = len(times) * _WARM_UP // self._steps
        each = (times[-1] - times[warm - 1]) / (len(times) - warm)  # the time per update
        busy = self._busy(times[-1])
        limit = max(busy, key=busy.__getitem__)
        if busy[limit] < _SATURATED:
            # No queue is long, so a worker's own time counts.
            beyond = each * self._groups - costs.step
            limit = "compute" if costs.step >= beyond else "exchange"
        kept = np.array(stale[warm:])
        staleness, p95 = float(kept.mean()), float(np.percentile(kept, 95))
        return Simulated(self._samples / each, staleness, p95, limit, _shares(busy))

    def synchronous(self) -> Simulated:
        """An update takes the first gradients; the others are discarded when they have come."""
        costs, quorum = self._costs, self._quorum
        begin = np.zeros(self._groups)
        times: list[float] = []
        slowest = 0.0
        for number in range(self._steps):
            drawn = self._drawn[number, self._node]
            pushed = self._transfers(begin + drawn, outward=True) + self._before()
            for time in np.sort(pushed)[:quorum]:
                told = self._coordinator.take(float(time), costs.coordinate)
                self._server.take(told, costs.serve / self._servers)
            done = self._server.take(self._server.free, costs.apply / self._servers)
            # Whoever is late reads the parameters when its gradient has been discarded, and who is
            # later than that has not begun this step yet.
            pulled = self._transfers(np.maximum(pushed, done), outward=False)
            begin = np.where(begin < done, pulled, begin)
            times.append(done)
            slowest += float(np.partition(drawn, quorum - 1)[quorum - 1])
        warm = _WARM_UP
        seconds = times[-1] - times[warm - 1]
        throughput = (len(times) - warm) * quorum * self._samples / seconds
        busy = self._busy(times[-1])
        cycle = times[-1] / self._steps
        parts = {name: share * cycle for name, share in busy.items()}
        parts["compute"] = costs.step
        parts["waiting"] = slowest / self._steps - costs.step
        limit = max(parts, key=parts.__getitem__)
        return Simulated(throughput, 0.0, 0.0, limit, _shares(busy))

    def _transfers(self, times: Array, *, outward: bool) -> Array:
        """Let each worker send to all servers or receive from them; return when all has arrived."""
        parts = self._parts[outward]
        own_busy, hosts_busy = self._link_busy if outward else self._link_busy[::-1]
        ends = times.copy()
        for host, seconds, using in zip(self._hosts, parts, self._remote.T, strict=True):
            if using.any():
                ends[using] = np.maximum(ends[using], _ends(times[using], float(seconds)))
                hosts_busy[host] += seconds * np.count_nonzero(using)
        own = (self._remote * parts).sum(axis=1)
        for node in np.unique(self._node[own > 0]):
            using = self._node == node
            seconds = float(own[using][0])  # The workers of a node have the same links.
            ends[using] = np.maximum(ends[using], _ends(times[using], seconds))
            own_busy[node] += seconds * np.count_nonzero(using)
        latency: Array = self._cluster.latency * self._remote.any(axis=1)
        return ends + latency

    def _before(self) -> float:
        """Return the part of an exchange during which no resource is busy."""
        costs = self._costs
        hidden = (costs.serve + costs.apply) / self._servers if costs.overlaps else 0.0
        return costs.overhead - hidden

    def _transfer(self, worker: int, time: float, *, outward: bool) -> float:
        """Let a worker send to all servers or receive from them; return when all has arrived."""
        node = self._node[worker]
        remote = self._remote[worker]
        if not remote.any():
            return time
        parts = self._parts[outward][remote]
        own_busy, others_busy = self._link_busy if outward else self._link_busy[::-1]
        own, others = self._link_free if outward else self._link_free[::-1]
        hosts = self._hosts[remote]
        # Both ends of a transfer are occupied at the same time, except that a node receives from
        # several others at once.
        whole = float(parts.sum())
        own[node] = max(float(own[node]), time) + whole
        others[hosts] = np.maximum(others[hosts], time) + parts
        own_busy[node] += whole
        others_busy[hosts] += parts
        return max(float(own[node]), float(others[hosts].max())) + self._cluster.latency

    def _busy(self, time: float) -> dict[str, float]:
        return {
            "link": float(self._link_busy.max()) / time,
            "server": self._server.busy / time,
            "coordinator": self._coordinator.busy / time,
        }
