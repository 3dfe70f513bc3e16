"""How fast a configuration trains on a cluster: a formula of the costs of a step.

A worker computes, sends its gradient, waits for the update, and receives the parameters. What all
workers share (the link of the node with the most of a server, the servers, the driver) serves one
after another. *Asynchronous*: a closed network of queues, whose throughput mean value analysis
gives (Reiser and Lavenberg, 1980), with equal service times, so that whoever arrives finds half of
the service in progress left. *Synchronous*: the slowest gradient that counts is an order statistic
of the measured steps, and transfers that begin together share a link.
"""

import math
from dataclasses import dataclass

import numpy as np

from fineprune.distributed.parameter_servers.update_rule import UpdateRule, simulated_updates
from fineprune.errors import InputError
from fineprune.experiments.cluster_costs import ClusterShape, Costs
from fineprune.experiments.configurations import ALL_REDUCE, ONE, Configuration

# DDP exchanges gradients in parts of 25 MB, during the backward pass, which takes about two thirds
# of a step. Only the last part has nothing to overlap with.
_BUCKET_MEGABYTES, _BACKWARD = 25.0, 2 / 3
# How busy a resource is that counts as the limit of the throughput.
_SATURATED = 0.9
# The updates of each worker from which the staleness is taken, the first of which are a warm-up.
_UPDATES, _WARM_UP = 20, 5


@dataclass(frozen=True)
class Speed:
    """What is predicted for a configuration on a cluster.

    Attributes:
        throughput: The applied samples per second.
        staleness_mean, staleness_p95: The mean and the 95th percentile of the updates' staleness.
        limit: What limits the throughput: compute, waiting (for slower workers), link, server,
            driver, or exchange (a worker's time from its gradient to its next parameters, if no
            resource is occupied most of the time).
        busy: The share of the time for which the most occupied link, the servers and the driver are
            occupied.
    """

    throughput: float
    staleness_mean: float
    staleness_p95: float
    limit: str
    busy: dict[str, float]


def predicted_speed(costs: Costs, cluster: ClusterShape, configuration: Configuration) -> Speed:
    """Predict a configuration on a cluster.

    Workers fill the nodes one after another. Shared servers are spread over the workers' nodes, and
    each dedicated server has a node of its own.

    Raises:
        InputError: The configuration has a bound of the staleness.
    """
    if configuration.distributed.staleness_bound is not None:
        raise InputError(
            f"expected a configuration without bound= for a prediction, got {configuration.text!r}"
        )
    if configuration.strategy == ONE:
        return Speed(costs.samples / costs.step, 0.0, 0.0, "compute", {})
    if configuration.strategy == ALL_REDUCE:
        return _all_reduce(costs, cluster, configuration.workers)
    if configuration.distributed.synchronous:
        return _synchronous(costs, cluster, configuration)
    return _asynchronous(costs, cluster, configuration)


def _all_reduce(costs: Costs, cluster: ClusterShape, ranks: int) -> Speed:
    """The slowest node computes, and what DDP cannot hide of a ring all-reduce follows."""
    nodes = -(-ranks // cluster.accelerators)
    slowest = _slowest(costs, nodes, nodes)
    # The ring crosses each node's link once in each direction, however many ranks the node has.
    ring = cluster.seconds(2 * (nodes - 1) / nodes * costs.megabytes)
    ring += 2 * (nodes - 1) * cluster.latency
    parts = max(1, round(costs.megabytes / _BUCKET_MEGABYTES))
    hidden = min(ring * (parts - 1) / parts, _BACKWARD * costs.step)
    total = slowest + ring - hidden
    waits = {"compute": costs.step, "waiting": slowest - costs.step, "link": ring - hidden}
    limit = max(waits, key=waits.__getitem__)
    return Speed(ranks * costs.samples / total, 0.0, 0.0, limit, {"link": min(1.0, ring / total)})


def _synchronous(costs: Costs, cluster: ClusterShape, configuration: Configuration) -> Speed:
    strategy, servers = configuration.distributed, configuration.servers
    quorum, whole = strategy.quorum, _transfers(costs, cluster, configuration)
    nodes = -(-configuration.workers // cluster.accelerators)
    # The workers of a node are slow together, and so are the backup workers among them.
    slowest = _slowest(costs, nodes, max(1, math.ceil(quorum * nodes / strategy.workers)))
    # Of n transfers that share a link, each ends halfway between its end in a queue and the end of
    # all, as was measured: on average after (3 n + 1) / 4 of one alone.
    host, own = ((3 * number + 1) / 4 for number in (whole.remote, whole.neighbours))
    link = sum(max(own * o, host * h) for o, h in zip(whole.own, whole.host, strict=True))
    server = (quorum * costs.serve + costs.apply) / servers
    driver = quorum * costs.coordinate
    hidden = server if costs.overlaps else 0.0
    total = slowest + costs.overhead + whole.latency + link + server + driver - hidden
    parts = {"link": link, "server": server, "driver": driver}
    busy = {name: min(1.0, seconds / total) for name, seconds in parts.items()}
    parts |= {"compute": costs.step, "waiting": slowest - costs.step}
    limit = max(parts, key=parts.__getitem__)
    return Speed(quorum * costs.samples / total, 0.0, 0.0, limit, busy)


def _asynchronous(costs: Costs, cluster: ClusterShape, configuration: Configuration) -> Speed:
    groups, servers = configuration.distributed.groups, configuration.servers
    spanned = -(-configuration.group // cluster.accelerators)
    step = _slowest(costs, spanned, spanned)
    whole = _transfers(costs, cluster, configuration)
    remote = whole.remote / groups
    server = (costs.serve + costs.apply) / servers
    alone = step + costs.overhead + whole.latency
    if costs.overlaps:
        alone -= server
    # The seconds at each resource, and how many equal ones there are, of which a worker uses one.
    shared = [(host * remote, 1) for host in whole.host]
    shared += [(server, 1), (costs.coordinate, 1)]
    if whole.neighbours > 1:
        shared += [(own, whole.nodes) for own in whole.own]
    else:
        alone += max(0.0, sum(whole.own) - shared[0][0] - shared[1][0])
    queued = [0.0] * len(shared)
    rate = 0.0
    for workers in range(1, groups + 1):
        times = [
            seconds * (1 + others - min(1.0, rate * seconds / equal) / 2)
            for (seconds, equal), others in zip(shared, queued, strict=True)
        ]
        rate = workers / (alone + sum(times))
        queued = [rate * t / equal for t, (_, equal) in zip(times, shared, strict=True)]
    busiest = max(seconds / equal for seconds, equal in shared)
    rate = min(rate, 1 / busiest) if busiest else rate
    links = [seconds / equal for seconds, equal in (*shared[:2], *shared[4:])]
    parts = {"link": max(links), "server": server, "driver": costs.coordinate}
    busy = {name: min(1.0, rate * seconds) for name, seconds in parts.items()}
    limit = max(busy, key=busy.__getitem__)
    if busy[limit] < _SATURATED:
        # No queue is long, so a worker's own time counts.
        limit = "compute" if step >= groups / rate - step else "exchange"
    mean, p95 = _staleness(costs, groups, max(0.0, alone - step))
    return Speed(rate * configuration.group * costs.samples, mean, p95, limit, busy)


@dataclass(frozen=True)
class _Transfers:
    """The seconds of the transfers of one update, for the parameters and for the gradient.

    Attributes:
        own: On the link of a worker's node, on average over the workers.
        host: On the link of the node that holds most of the servers, for each remote worker.
        remote: The number of groups that are not on this node.
        neighbours: The number of groups on each node.
        nodes: The number of nodes with workers.
        latency: The latency of both messages, 0 if all is on one node.
    """

    own: tuple[float, float]
    host: tuple[float, float]
    remote: int
    neighbours: int
    nodes: int
    latency: float


def _transfers(costs: Costs, cluster: ClusterShape, configuration: Configuration) -> _Transfers:
    per, group = cluster.accelerators, configuration.group
    nodes = [index * group // per for index in range(configuration.distributed.groups)]
    worker_nodes = -(-configuration.workers // per)
    servers = range(configuration.servers)
    dedicated = configuration.dedicated
    hosts = [worker_nodes + s if dedicated else s % worker_nodes for s in servers]
    share = {host: hosts.count(host) / len(hosts) for host in hosts}
    most = max(share, key=share.__getitem__)
    remote = sum(1 - share.get(node, 0.0) for node in nodes) / len(nodes)
    both = cluster.seconds(costs.megabytes), cluster.seconds(costs.megabytes * costs.gradients)
    return _Transfers(
        own=(both[0] * remote, both[1] * remote),
        host=(both[0] * share[most], both[1] * share[most]),
        remote=sum(node != most for node in nodes),
        neighbours=-(-len(nodes) // worker_nodes),
        nodes=worker_nodes,
        latency=2 * cluster.latency if remote else 0.0,
    )


def _slowest(costs: Costs, nodes: int, place: int) -> float:
    """Return the mean duration of the step that ends in this place, from 1, among so many nodes."""
    steps = np.sort(np.asarray(costs.steps))
    below = np.arange(len(steps) + 1) / len(steps)
    # The probability that at least ``place`` of the nodes have ended.
    ended = sum(
        math.comb(nodes, number) * below**number * (1 - below) ** (nodes - number)
        for number in range(place, nodes + 1)
    )
    return float((np.diff(ended) * steps).sum())


def _staleness(costs: Costs, groups: int, exchange: float) -> tuple[float, float]:
    """Return the mean and the 95th percentile of the staleness of asynchronous updates."""
    drawn = np.random.default_rng(0).choice(costs.steps, (_UPDATES + _WARM_UP) * groups) + exchange
    durations = drawn.tolist()
    updates = simulated_updates(
        UpdateRule(),
        groups,
        lambda worker, step: float(durations[(step * groups + worker) % len(durations)]),
        len(durations),
    )
    found = [update.staleness for update in updates][_WARM_UP * groups : -groups]
    return float(np.mean(found)), float(np.percentile(found, 95))
