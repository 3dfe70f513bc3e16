"""Predicts what workers and servers make of a training, and where more of them stop to pay.

A node is what has a link of its own: the workers on it, with the servers that share it, or a
dedicated server. Speedup and efficiency are relative to one node, as in [D] Tables 1 and 2.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fineprune.errors import InputError
from fineprune.experiments.cluster_costs import ClusterShape, Costs, Target
from fineprune.experiments.cluster_formula import predicted_speed
from fineprune.experiments.configurations import ALL_REDUCE, ONE, Configuration, configuration
from fineprune.training.forecast import cost_is_known, saved_share
from fineprune.training.recipe import Recipe

_MOST_WORKERS = 1024
# The strategies that are tried, with their options.
_KINDS = (ALL_REDUCE, "sync", "sync backup", "async", "async dedicated")
# Twice as many nodes pay if they shorten the training at least by a third.
_PAYS = 1.5
# The share of the workers that are backup workers.
_BACKUP, _FEWEST_WITH_BACKUP = 1 / 16, 8


@dataclass(frozen=True)
class Predicted:
    """What is predicted for a configuration.

    Attributes:
        configuration: The text of the configuration.
        kind: The strategy, with ``backup`` or ``dedicated`` if it has these.
        workers, servers, nodes: The numbers of workers, servers and nodes.
        throughput: The samples per second.
        speedup: The throughput divided by that of one node.
        efficiency: The speedup divided by the number of nodes.
        staleness_mean, staleness_p95: The mean and the 95th percentile of the staleness.
        samples_factor: How many times the samples of one worker are needed.
        limit: What limits the throughput; see ``Speed``.
        busy: The share of the time for which resources are occupied; see ``Speed``.
        hours: The time to the target on all data, in hours.
        node_hours: This time multiplied by the nodes.
        hours_pruned, node_hours_pruned: The same with the pruning of the recipe; None without it.
    """

    configuration: str
    kind: str
    workers: int
    servers: int
    nodes: int
    throughput: float
    speedup: float
    efficiency: float
    staleness_mean: float
    staleness_p95: float
    samples_factor: float
    limit: str
    busy: dict[str, float]
    hours: float
    node_hours: float
    hours_pruned: float | None
    node_hours_pruned: float | None


@dataclass(frozen=True)
class ClusterPlan:
    """The predictions of a plan.

    Attributes:
        rows: The predictions.
        stops: For each strategy, the prediction with the most nodes that still pay. It is empty if
            the configurations were given.
        recommended: The recommended one of these.
        reason: Why it is recommended, as a sentence.
    """

    rows: list[Predicted]
    stops: list[Predicted]
    recommended: Predicted
    reason: str


def plan_cluster(
    costs: Costs,
    cluster: ClusterShape,
    *,
    samples: float,
    target: Target | None = None,
    saved: float | None = None,
    configurations: Sequence[Configuration] = (),
) -> ClusterPlan:
    """Predict configurations, or all strategies with up to 1,024 workers.

    Args:
        costs: The costs of a step.
        cluster: The cluster.
        samples: The number of sample-steps that one worker needs on all data.
        target: How this number depends on the workers; None if it does not.
        saved: The share of the sample-steps that the recipe's pruning saves; None without pruning.
        configurations: The configurations to predict; if there are none, they are chosen.
    """
    alone = cluster.accelerators == 1
    one_node = configuration(ONE if alone else f"{ALL_REDUCE} {cluster.accelerators}")
    base = predicted_speed(costs, cluster, one_node).throughput
    aim = target or Target()

    def predicted(chosen: Configuration) -> Predicted:
        speed = predicted_speed(costs, cluster, chosen)
        nodes = chosen.nodes_with(cluster.accelerators)
        update = costs.samples * chosen.averaged
        factor = aim.factor(costs.samples, update, speed.staleness_mean)
        hours = samples * factor / speed.throughput / 3600
        pruned = None if saved is None else hours * (1 - saved)
        speedup = speed.throughput / base
        return Predicted(
            configuration=chosen.text,
            kind=_kind(chosen),
            workers=chosen.workers,
            servers=chosen.servers,
            nodes=nodes,
            speedup=speedup,
            efficiency=speedup / nodes,
            samples_factor=factor,
            **vars(speed),
            hours=hours,
            node_hours=hours * nodes,
            hours_pruned=pruned,
            node_hours_pruned=None if pruned is None else pruned * nodes,
        )

    for chosen in configurations:
        _check(chosen, cluster)
    if configurations:
        rows = [predicted(chosen) for chosen in configurations]
        return ClusterPlan(rows, [], *_recommended(rows, rows))
    first = predicted(one_node)
    rows, stops = [first], []
    most = min(_MOST_WORKERS, cluster.nodes * cluster.accelerators)
    for kind in _KINDS if alone else (*_KINDS, "mixed", "mixed dedicated"):
        chain: list[Predicted] = []
        workers = cluster.accelerators
        while (workers := 2 * workers) <= most:
            # More workers need at least as many servers.
            fewest = chain[-1].servers if chain else 1
            choices = _choices(kind, workers, cluster, fewest)
            tried = [predicted(chosen) for chosen in choices]
            if not tried and not chain:
                continue  # too few for this strategy
            if not tried:
                break
            # More servers have to make a difference.
            best = min(row.hours for row in tried)
            chain.append(next(row for row in tried if row.hours <= 1.01 * best))
            if len(chain) > 1 and best > chain[-2].hours:
                break  # More workers make it slower.
        rows += chain
        if chain and (last := _last_that_pays(chain)).hours < first.hours:
            stops.append(last)
    return ClusterPlan(rows, stops, *_recommended([first, *stops], rows))


def sample_steps(recipe: Recipe, num_samples: int, target: Target) -> tuple[float, float | None]:
    """Return the sample-steps of one worker on all data, and the share that pruning saves.

    The share is None if the recipe does not prune, or if it is not known before the training.
    """
    epochs = recipe.training.epochs if target.epochs is None else target.epochs
    prunes = not recipe.pruning.own and recipe.pruning.policy != "full"
    known = prunes and cost_is_known(recipe, num_samples)
    return epochs * num_samples, saved_share(recipe, num_samples) if known else None


def _check(chosen: Configuration, cluster: ClusterShape) -> None:
    if chosen.training or chosen.seeds > 1:
        raise InputError(
            f"expected a configuration without lr=, epochs= and seeds= for a prediction, got "
            f"{chosen.text!r}: change the settings of the recipe"
        )
    if chosen.strategy == ALL_REDUCE and chosen.group not in (1, cluster.accelerators):
        raise InputError(
            f"expected the {cluster.accelerators} workers per node of the cluster, got "
            f"{chosen.text!r}: give --accelerators {chosen.group}"
        )
    if chosen.group > cluster.accelerators:
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


def _kind(chosen: Configuration) -> str:
    words = [chosen.strategy]
    words += ["backup"] if chosen.distributed.backup else []
    words += ["dedicated"] if chosen.dedicated else []
    return " ".join(words)


def _choices(
    kind: str, workers: int, cluster: ClusterShape, fewest: int
) -> Iterable[Configuration]:
    """Return the configurations of a kind that are tried, from the fewest servers on."""
    strategy, _, option = kind.partition(" ")
    if strategy == ALL_REDUCE:
        return [configuration(f"{ALL_REDUCE} {workers}")]
    nodes = workers // cluster.accelerators
    tail = " dedicated" if option == "dedicated" else ""
    if option == "backup":
        if workers < _FEWEST_WITH_BACKUP:
            return []
        tail += f" backup={max(1, round(workers * _BACKUP))}"
    if strategy == "mixed":
        tail += f" group={cluster.accelerators}"
    numbers = sorted({min(nodes, fewest), min(nodes, 2 * fewest)})
    made = [configuration(f"{strategy} {workers}+{number}{tail}") for number in numbers]
    return [each for each in made if each.nodes_with(cluster.accelerators) <= cluster.nodes]


def _last_that_pays(chain: Sequence[Predicted]) -> Predicted:
    last = chain[0]
    for row in chain[1:]:
        # Dedicated servers add nodes, so the nodes may more than double.
        if last.hours / row.hours < 1 + (_PAYS - 1) * (row.nodes / last.nodes - 1):
            break
        last = row
    return last


def _recommended(among: Sequence[Predicted], rows: Sequence[Predicted]) -> tuple[Predicted, str]:
    """Return the fastest of some predictions, or one as fast that takes fewer node-hours."""
    fastest = min(row.hours for row in among)
    good = [row for row in among if row.hours <= 1.02 * fastest]
    best = min(good, key=_cost)
    # Another kind may be better in both ways, although it stopped to pay before.
    better = [row for row in rows if row.hours <= best.hours and row.nodes <= best.nodes]
    best = min(better, key=_cost)
    reason = (
        f"{best.configuration}, on one node, {best.hours:.3g} h; no configuration on more nodes "
        f"takes clearly less"
        if best.nodes == 1
        else f"{best.configuration}: {best.speedup:.3g} times one node on {best.nodes} nodes "
        f"(efficiency {best.efficiency:.2f}), {best.hours:.3g} h"
    )
    larger = [row for row in rows if row.kind == best.kind and row.workers > best.workers]
    if larger:
        following = min(larger, key=lambda row: row.workers)
        gain = 100 * (best.hours / following.hours - 1)
        reason += f"; {following.configuration} would be "
        reason += f"{gain:.0f} % faster" if gain > 0 else "no faster"
        reason += f" on {following.nodes} nodes, because "
        more = 100 * (following.samples_factor / best.samples_factor - 1)
        if following.throughput >= _PAYS * best.throughput:
            reason += f"it needs {more:.0f} % more samples"
        else:
            reason += f"its throughput is limited by: {following.limit}"
    return best, reason + "."


def _cost(row: Predicted) -> tuple[float, int]:
    """Return the node-hours without rounding errors and, for ties, how complicated a row is."""
    simplest_first = (ONE, *_KINDS, row.kind)  # Kinds that are not listed come last.
    return float(f"{row.node_hours:.4g}"), simplest_first.index(row.kind)


def plan_dict(plan: ClusterPlan) -> dict[str, object]:
    """Return a plan as nested dictionaries, for JSON."""
    return {
        "rows": [dataclasses.asdict(row) for row in plan.rows],
        "stops": [row.configuration for row in plan.stops],
        "recommended": plan.recommended.configuration,
        "reason": plan.reason,
    }
