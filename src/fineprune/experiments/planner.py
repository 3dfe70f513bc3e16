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
from fineprune.experiments.controls import with_epochs
from fineprune.experiments.planned_run import OnProgress
from fineprune.experiments.scale import scale
from fineprune.experiments.scale_table import Scaled, phases_of, read_scaling, steps_per_second
from fineprune.runs.run import split_by
from fineprune.training.convert import Count, Positive, check_known, converted
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
        gigabits: The bandwidth of a node's link in Gbit/s in each direction; 0 for a network that
            is never the limit.
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
        exchange: How much an exchange with a server that has nothing else to do adds to a step, in
            seconds, without what ``gradient``, ``update`` and the network add.
        gradient, update: How long one server that holds all parameters is busy with a gradient, and
            with an update, in seconds. With S servers, each is busy for a part of 1 / S.
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
class Target:
    """How the number of samples that a training needs depends on the workers.

    Attributes:
        epochs: The epochs that one worker needs to reach the target; None for those of the recipe.
        critical_batch: The batch size at which a training needs twice as many samples as with tiny
            batches (the gradient noise scale, McCandlish et al. 2018); None if larger batches need
            no more samples.
        per_staleness: The share of additional samples for each update of mean staleness.
    """

    epochs: Positive | None = None
    critical_batch: Positive | None = None
    per_staleness: NotNegative = 0.0

    def factor(self, alone: int, update: int, staleness: float) -> float:
        """Return how many times the samples of one worker a configuration needs."""
        batch = 1.0
        if self.critical_batch is not None:
            batch = (self.critical_batch + update) / (self.critical_batch + alone)
        return batch * (1 + self.per_staleness * staleness)


@dataclass(frozen=True)
class Predicted:
    """What is predicted for a configuration.

    Attributes:
        configuration: The text of the configuration.
        kind: Its strategy.
        workers, servers, nodes: The numbers of workers, servers and nodes.
        throughput: The applied samples per second.
        speedup: The throughput divided by that of one node.
        efficiency: The speedup divided by the number of nodes.
        staleness: The mean staleness of the updates.
        limit: What takes most of the time, or is always busy: compute, exchange, server or link.
        samples_factor: How many times the samples of one worker are needed.
        hours, hours_pruned: The time to the target on all data, and with the recipe's pruning (None
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
    samples_factor: float
    hours: float
    hours_pruned: float | None

    @property
    def node_hours(self) -> float:
        """The time to the target multiplied by the nodes."""
        return self.hours * self.nodes


@dataclass(frozen=True)
class Plan:
    """The predictions of a plan.

    Attributes:
        rows: The predictions.
        stops: For each strategy, the prediction with the most nodes that still pay. It is empty if
            the configurations were given.
        recommended: The recommended prediction.
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
    target: Target | None = None,
    saved: float | None = None,
    configurations: Sequence[Configuration] = (),
) -> Plan:
    """Predict configurations, or all strategies with up to 1,024 workers.

    Args:
        costs: The costs of a step.
        cluster: The cluster.
        samples: The number of sample-steps that one worker needs on all data.
        target: How this number depends on the workers; None if it does not.
        saved: The share of the sample-steps that the recipe's pruning saves; None without pruning.
        configurations: The configurations to predict; if there are none, they are chosen.
    """
    per = cluster.accelerators
    one_node = configuration(ONE if per == 1 else f"{ALL_REDUCE} {per}")
    base, aim = predicted_speed(costs, cluster, one_node)[0], target or Target()

    def predicted(chosen: Configuration) -> Predicted:
        _check(chosen, cluster)
        throughput, staleness, limit = predicted_speed(costs, cluster, chosen)
        factor = aim.factor(costs.samples, costs.samples * chosen.averaged, staleness)
        hours = samples * factor / throughput / 3600
        nodes = chosen.nodes_with(per)
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
            samples_factor=factor,
            hours=hours,
            hours_pruned=None if saved is None else hours * (1 - saved),
        )

    if configurations:
        rows = [predicted(chosen) for chosen in configurations]
        return Plan(rows, [], _recommended(rows))
    rows, stops = [predicted(one_node)], []
    most = min(_MOST_WORKERS, cluster.nodes * per)
    for kind in _KINDS if per > 1 else _KINDS[:-1]:
        chain: list[Predicted] = []
        workers = 2 * per
        while workers <= most:
            tried = [predicted(one) for one in _choices(kind, workers, per)]
            # More servers have to make a difference.
            quick = min(row.hours for row in tried)
            chain.append(next(row for row in tried if row.hours <= 1.01 * quick))
            if len(chain) > 1 and quick > chain[-2].hours:
                break  # More workers make it slower.
            workers *= 2
        rows += chain
        if chain and (last := _last_that_pays(chain)).hours < rows[0].hours:
            stops.append(last)
    return Plan(rows, stops, _recommended([rows[0], *stops]))


def _choices(kind: str, workers: int, per_node: int) -> list[Configuration]:
    """Return the configurations of a kind that are tried, from the fewest servers on."""
    if kind == ALL_REDUCE:
        return [configuration(f"{ALL_REDUCE} {workers} group={per_node}")]
    group = f" group={per_node}" if kind == "mixed" else ""
    servers = [2**power for power in range((workers // per_node).bit_length())]
    return [configuration(f"{kind} {workers}+{number}{group}") for number in servers]


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
    return min(good, key=lambda row: (float(f"{row.node_hours:.4g}"), simplest.index(row.kind)))


def _check(chosen: Configuration, cluster: Cluster) -> None:
    if chosen.training or chosen.seeds > 1:
        raise InputError(
            f"expected a configuration without lr=, epochs= and seeds= for a prediction, got "
            f"{chosen.text!r}: change the settings of the recipe"
        )
    if chosen.strategy != ALL_REDUCE and chosen.group > cluster.accelerators:
        raise InputError(
            f"expected a group whose workers are on one node, which has {cluster.accelerators}, "
            f"got {chosen.text!r}: give --accelerators {chosen.group}"
        )
    nodes = chosen.nodes_with(cluster.accelerators)
    if nodes > cluster.nodes:
        raise InputError(
            f"expected a configuration for at most {cluster.nodes} nodes, got {chosen.text!r}, "
            f"which takes {nodes}: give --nodes {nodes}, or fewer workers"
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
    short = with_epochs(recipe.replaced("pruning", policy="full"), _EPOCHS)
    short = short.replaced("training", evaluate_every=_EPOCHS, evaluate_last=1)
    short = short.replaced("run", history=False)
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
    alone = by_text[ONE][0].run
    step = _seconds_per_step(by_text[ONE])
    samples = int(alone.recipe["training"]["batch_size"])
    made = Costs(step, samples, 4e-6 * alone.summary.parameters)
    if "async 1+1" not in by_text:
        return made
    served = by_text["async 1+1"]
    update = statistics.median(phases_of(scaled.run).get("apply", 0.0) for scaled in served)
    exchange = max(0.0, _seconds_per_step(served) - step - update)
    return replace(made, exchange=exchange, update=update)


def _seconds_per_step(runs: Sequence[Scaled]) -> float:
    return statistics.median(1 / steps_per_second(scaled.run) for scaled in runs)


def sample_steps(recipe: Recipe, num_samples: int, target: Target) -> tuple[float, float | None]:
    """Return the sample-steps of one worker on all data, and the share that pruning saves.

    The share is None if the recipe does not prune, or if it is not known before the training.
    """
    epochs = recipe.training.epochs if target.epochs is None else target.epochs
    prunes = not recipe.pruning.own and recipe.pruning.policy != "full"
    known = prunes and cost_is_known(recipe, num_samples)
    return epochs * num_samples, saved_share(recipe, num_samples) if known else None


def read_cluster(path: Path) -> tuple[Cluster, Target, dict[str, Any]]:
    """Read a cluster from TOML: ``[cluster]``, ``[target]`` and what is given of ``[costs]``.

    All sections and keys are optional.
    """
    with (
        explaining(f"expected --cluster to be a TOML file, cannot read {path}", OSError),
        explaining(f"expected TOML in {path}, cannot parse it", ValueError),
    ):
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    for section in sections:
        check_known("section", section, ("cluster", "target", "costs"))
    given: Mapping[str, Any] = sections.get("costs", {})
    made = converted("costs", Costs, {"step": 1.0, "samples": 1, "megabytes": 0.0, **given})
    return (
        converted("cluster", Cluster, sections.get("cluster", {})),
        converted("target", Target, sections.get("target", {})),
        {name: value for name, value in asdict(made).items() if name in given},
    )
