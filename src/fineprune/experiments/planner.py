"""Predicts what workers and servers make of a training, and where more of them stop to pay.

A node is what has a link of its own: the workers on it, with the servers that share it, or a
dedicated server. Speedup and efficiency are relative to one node, as in [D] Tables 1 and 2.

The formula: a worker computes a step, sends its gradient, waits for the update and receives the
parameters. The link of the node that holds most of the parameters and the servers serve one after
another. *Asynchronous*: a closed network of these two queues (mean value analysis, Reiser and
Lavenberg 1980), in which whoever arrives finds half of the service in progress left. *Synchronous*:
the slowest step that counts, a normal order statistic, and then all that is served one after
another. *All-reduce*: a ring, of which DDP hides all but the last 25 MB behind the backward pass.
"""

import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from fineprune.errors import InputError, explaining
from fineprune.experiments.configurations import ALL_REDUCE, ONE, Configuration, configuration
from fineprune.experiments.planned_run import OnProgress
from fineprune.experiments.scale import scale
from fineprune.experiments.scale_table import Scaled, phases_of, read_scaling, steps_per_second
from fineprune.runs.run import split_by
from fineprune.training.convert import Count, Positive, converted
from fineprune.training.forecast import cost_is_known, saved_share
from fineprune.training.recipe import Recipe

NotNegative = Annotated[float, Meta(ge=0)]

_MOST_WORKERS = 1024
_KINDS = (ALL_REDUCE, "sync", "async", "mixed")
# Twice as many nodes pay if they shorten the training at least by a third.
_PAYS = 1.5
# DDP exchanges gradients in parts of 25 MB during the backward pass, two thirds of a step.
_BUCKET_MEGABYTES, _BACKWARD = 25.0, 2 / 3
# The length of the runs that measure costs. The first epoch is a warm-up.
_EPOCHS, _BATCHES = 4, 100


@dataclass(frozen=True)
class Cluster:
    """The cluster to plan for. All nodes and all links are equal.

    Attributes:
        nodes: The largest number of nodes.
        accelerators: The number of workers per node, one for each accelerator.
        gigabits: The bandwidth of a node's link in Gbit/s in each direction; 0: never the limit.
        latency: The time of an empty message between two nodes, in seconds.
    """

    nodes: Count = 1024
    accelerators: Count = 1
    gigabits: NotNegative = 10.0
    latency: NotNegative = 5e-5

    def seconds(self, megabytes: float) -> float:
        """Return how long a link carries so many megabytes, in seconds."""
        return 8e-3 * megabytes / self.gigabits if self.gigabits else 0.0


@dataclass(frozen=True)
class Costs:
    """The costs of a step, from ``costs_of_runs`` or given.

    Attributes:
        step: The mean duration of a step of one worker that trains alone, in seconds.
        samples: The number of samples per step.
        megabytes: The size of the parameters, and of their gradient.
        exchange: The seconds that an exchange with an idle server adds to a step, without what
            ``gradient``, ``update`` and the network add.
        gradient, update: The seconds for which one server that holds all parameters is busy with a
            gradient, and with an update. With S servers, each is busy for a part of 1 / S.
        spread: The standard deviation of a step's duration, relative to its mean.
        overlaps: Whether servers work on a gradient while its worker still computes, as with
            TensorFlow. Then they limit the throughput, but take no part of a worker's step.
    """

    step: Positive
    samples: Count
    megabytes: NotNegative
    exchange: NotNegative = 0.0
    gradient: NotNegative = 0.0
    update: NotNegative = 0.0
    spread: NotNegative = 0.0
    overlaps: bool = False


@dataclass(frozen=True)
class Predicted:
    """What is predicted for a configuration.

    Attributes:
        configuration, kind: The text of the configuration, and its strategy.
        workers, servers, nodes: Their numbers.
        throughput: The applied samples per second.
        speedup, efficiency: The throughput divided by that of one node, and this by the nodes.
        staleness: The mean staleness of the updates.
        limit: What takes most of the time, or is always busy: compute, exchange, server or link.
        hours, hours_pruned: The time of the recipe's epochs on all data, and with its pruning (None
            without it), in hours.
    """

    configuration: str
    kind: str
    workers: int
    servers: int
    nodes: int
    throughput: float
    speedup: float
    efficiency: float
    staleness: float
    limit: str
    hours: float
    hours_pruned: float | None


@dataclass(frozen=True)
class Plan:
    """The predictions of a plan, and the recommended one.

    ``stops`` are, for each strategy, the predictions with the most nodes that still pay; there are
    none if the configurations were given.
    """

    rows: list[Predicted]
    stops: list[Predicted]
    recommended: Predicted


def predicted_speed(
    costs: Costs, cluster: Cluster, chosen: Configuration
) -> tuple[float, float, str]:
    """Return the samples per second, the mean staleness, and what limits the throughput.

    Workers fill the nodes one after another; shared servers are spread over the workers' nodes.
    """
    if chosen.distributed.staleness_bound is not None:
        raise InputError(f"expected a configuration without bound=, got {chosen.text!r}")
    nodes = -(-chosen.workers // cluster.accelerators)
    if chosen.strategy in (ONE, ALL_REDUCE):
        ring = cluster.seconds(2 * (nodes - 1) / nodes * costs.megabytes)
        ring += 2 * (nodes - 1) * cluster.latency
        parts = max(1, round(costs.megabytes / _BUCKET_MEGABYTES))
        link = ring - min(ring * (parts - 1) / parts, _BACKWARD * costs.step)
        step = _slowest(costs, nodes, nodes)
        limit = "link" if link > step else "compute"
        return chosen.workers * costs.samples / (step + link), 0.0, limit
    groups, servers = chosen.distributed.groups, chosen.servers
    hosts = servers if chosen.dedicated else min(servers, nodes)
    per_node = -(-groups // nodes)
    held = -(-servers // hosts) / servers  # The share of the node that holds most parameters.
    remote = groups if chosen.dedicated else groups - per_node
    away = 1.0 if chosen.dedicated else 1 - hosts / nodes * held
    transfer = cluster.seconds(costs.megabytes)
    alone = costs.exchange + (2 * cluster.latency if remote else 0.0)
    if chosen.distributed.synchronous:
        quorum = chosen.distributed.quorum
        slowest = _slowest(costs, nodes, max(1, math.ceil(quorum * nodes / chosen.workers)))
        # Of n transfers that begin together, each ends on average after (3 n + 1) / 4 of one.
        link = 2 * transfer * max(held * (3 * remote + 1) / 4, away) if remote else 0.0
        served = 0.0 if costs.overlaps else (quorum * costs.gradient + costs.update) / servers
        times = {"compute": slowest, "exchange": alone, "server": served, "link": link}
        total = sum(times.values())
        return quorum * costs.samples / total, 0.0, max(times, key=times.__getitem__)
    step = _slowest(costs, -(-chosen.group // cluster.accelerators), 1)
    alone += step + 2 * transfer * max(0.0, away - held * remote / groups)
    server = (costs.gradient + costs.update) / servers
    shared = {"server": server, "push": transfer * held * remote / groups}
    shared["pull"] = shared["push"]
    if costs.overlaps:
        alone -= server
    waiting, rate = dict.fromkeys(shared, 0.0), 0.0
    for number in range(1, groups + 1):
        times = {
            name: seconds * (1 + waiting[name] - min(1.0, rate * seconds) / 2)
            for name, seconds in shared.items()
        }
        rate = number / (alone + sum(times.values()))
        waiting = {name: rate * seconds for name, seconds in times.items()}
    busiest = max(shared, key=shared.__getitem__)
    rate = min(rate, 1 / shared[busiest]) if shared[busiest] else rate
    if rate * shared[busiest] >= 0.9:
        limit = "server" if busiest == "server" else "link"
    else:
        limit = "compute" if 2 * step >= groups / rate else "exchange"
    return rate * chosen.group * costs.samples, groups - 1.0, limit


def _slowest(costs: Costs, nodes: int, place: int) -> float:
    """Return the mean duration of the step that ends in this place, from 1, among so many nodes.

    The steps are normally distributed, and the workers of a node are slow together (Blom 1958).
    """
    quantile = statistics.NormalDist().inv_cdf((place - 0.375) / (nodes + 0.25))
    return costs.step * max(0.0, 1 + costs.spread * quantile)


def plan_cluster(
    costs: Costs,
    cluster: Cluster,
    *,
    samples: float,
    saved: float | None = None,
    configurations: Sequence[Configuration] = (),
) -> Plan:
    """Predict configurations, or all strategies with up to 1,024 workers.

    Every configuration is taken to need the same number of samples.

    Args:
        costs: The costs of a step.
        cluster: The cluster.
        samples: The number of sample-steps on all data.
        saved: The share of them that the recipe's pruning saves; None without pruning.
        configurations: The configurations to predict; if there are none, they are chosen.
    """
    per = cluster.accelerators
    one_node = configuration(ONE if per == 1 else f"{ALL_REDUCE} {per}")
    base = predicted_speed(costs, cluster, one_node)[0]

    def predicted(chosen: Configuration) -> Predicted:
        _check(chosen, cluster)
        throughput, staleness, limit = predicted_speed(costs, cluster, chosen)
        hours, nodes = samples / throughput / 3600, chosen.nodes_with(per)
        return Predicted(
            configuration=chosen.text,
            kind=chosen.strategy,
            workers=chosen.workers,
            servers=chosen.servers,
            nodes=nodes,
            throughput=throughput,
            speedup=throughput / base,
            efficiency=throughput / base / nodes,
            staleness=staleness,
            limit=limit,
            hours=hours,
            hours_pruned=None if saved is None else hours * (1 - saved),
        )

    if configurations:
        rows = [predicted(chosen) for chosen in configurations]
        return Plan(rows, [], _recommended(rows))
    rows, stops = [predicted(one_node)], []
    for kind in _KINDS if per > 1 else _KINDS[:-1]:
        chain: list[Predicted] = []
        nodes = 2
        while nodes <= min(_MOST_WORKERS // per, cluster.nodes):
            servers = "" if kind == ALL_REDUCE else f"+{nodes}"  # One on each node.
            group = f" group={per}" if kind in (ALL_REDUCE, "mixed") else ""
            chain.append(predicted(configuration(f"{kind} {nodes * per}{servers}{group}")))
            if chain[-1].hours > chain[-2:][0].hours:
                break  # More workers make it slower.
            nodes *= 2
        rows += chain
        if chain and (last := _last_that_pays(chain)).hours < rows[0].hours:
            stops.append(last)
    return Plan(rows, stops, _recommended([rows[0], *stops]))


def _last_that_pays(chain: Sequence[Predicted]) -> Predicted:
    last = chain[0]
    for row in chain[1:]:
        if last.hours < _PAYS * row.hours:
            break
        last = row
    return last


def _recommended(among: Sequence[Predicted]) -> Predicted:
    """Return the fastest of some predictions, or one as fast that takes fewer node-hours."""
    fastest = min(row.hours for row in among)
    good = [row for row in among if row.hours <= 1.02 * fastest]
    simplest = (ONE, *_KINDS)
    return min(
        good, key=lambda row: (float(f"{row.hours * row.nodes:.4g}"), simplest.index(row.kind))
    )


def _check(chosen: Configuration, cluster: Cluster) -> None:
    if chosen.strategy != ALL_REDUCE and chosen.group > cluster.accelerators:
        raise InputError(
            f"expected a group whose workers are on one node, which has {cluster.accelerators}, "
            f"got {chosen.text!r}: give cluster.accelerators={chosen.group}"
        )
    nodes = chosen.nodes_with(cluster.accelerators)
    if nodes > cluster.nodes:
        raise InputError(
            f"expected a configuration for at most {cluster.nodes} nodes, got {chosen.text!r}, "
            f"which takes {nodes}: give cluster.nodes={nodes}, or fewer workers"
        )


def measured_costs(
    recipe: Recipe,
    folder: Path,
    given: Mapping[str, Any],
    on_progress: OnProgress = lambda line, done, total: None,
) -> Costs:
    """Return the costs of a recipe's step on this machine, from two short runs in a folder.

    The runs, of one process and of one worker with one server, train part of the data for a few
    epochs. What is given, by the names of ``Costs``, replaces what is measured; if all is given but
    the sizes, nothing is trained.
    """
    if {"step", "samples", "megabytes"} <= given.keys():
        return converted("costs", Costs, given)
    short = recipe.replaced("pruning", policy="full").replaced("run", history=False)
    constant = {"schedule": "constant", "milestones": (), "gamma": None, "rates": (), "warmup": 0}
    evaluated = {"evaluate_every": _EPOCHS, "evaluate_last": 1}
    short = short.replaced("training", epochs=_EPOCHS, **constant, **evaluated)
    most = _BATCHES * recipe.training.batch_size
    short = short.replaced("data", train_size=min(recipe.data.train_size or most, most))
    texts = [ONE] if "exchange" in given else [ONE, "async 1+1"]
    chosen = [configuration(text) for text in texts]
    scale(short, folder, chosen, title="costs", on_progress=on_progress)
    return replace(costs_of_runs(read_scaling(folder).runs), **given)


def costs_of_runs(runs: Sequence[Scaled]) -> Costs:
    """Return the costs of a step, from runs on one machine.

    Args:
        runs: The runs of ``one`` and of ``async 1+1``; others are not read. Without ``async 1+1``,
            an exchange costs nothing but the network.
    """
    by_text = split_by(lambda scaled: scaled.configuration.text, runs)
    if ONE not in by_text:
        raise InputError(f"expected a run of {ONE!r} to measure a step, got {', '.join(by_text)}")
    steps = {
        text: statistics.median(1 / steps_per_second(scaled.run) for scaled in of)
        for text, of in by_text.items()
    }
    alone = by_text[ONE][0].run
    samples = int(alone.recipe["training"]["batch_size"])
    made = Costs(steps[ONE], samples, 4e-6 * alone.summary.parameters)
    served = by_text.get("async 1+1")
    if served is None:
        return made
    update = statistics.median(phases_of(scaled.run).get("apply", 0.0) for scaled in served)
    exchange = max(0.0, steps["async 1+1"] - made.step - update)
    return replace(made, exchange=exchange, update=update)


def sample_steps(recipe: Recipe, num_samples: int) -> tuple[float, float | None]:
    """Return the sample-steps of a recipe on all data, and the share that pruning saves.

    The share is None if the recipe does not prune, or if it is not known before the training.
    """
    prunes = not recipe.pruning.own and recipe.pruning.policy != "full"
    known = prunes and cost_is_known(recipe, num_samples)
    steps = recipe.training.epochs * num_samples
    return steps, saved_share(recipe, num_samples) if known else None


def described(settings: Sequence[str]) -> tuple[Cluster, dict[str, Any]]:
    """Return the cluster, and what is given of the costs, from settings such as ``costs.step=1``.

    All settings are optional.
    """
    with explaining("expected numbers such as cluster.nodes=64, cannot read them", ValueError):
        sections = tomllib.loads("\n".join(settings))
    given: Mapping[str, Any] = sections.get("costs", {})
    made = converted("costs", Costs, {"step": 1.0, "samples": 1, "megabytes": 0.0, **given})
    cluster = converted("cluster", Cluster, sections.get("cluster", {}))
    return cluster, {name: value for name, value in asdict(made).items() if name in given}
