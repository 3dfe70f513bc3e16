"""The tables of a scaling experiment or a plan, with the results of [D] Tables 1 to 3 beside.

The paper (Campos et al., ICCS 2017) trains ResNet-50 with 1,200 classes and the mixed strategy:
synchronously inside each node of four K80 GPUs, and asynchronously between the nodes.
"""

from collections.abc import Sequence

from fineprune.experiments.planner import Plan
from fineprune.experiments.scale_table import SERVER_PHASES, WORKER_PHASES, ScaleRow
from fineprune.report.table import NOTHING, Table, decimal, number, percent, table_of

# Configuration, nodes, images per second, speedup, efficiency.
PAPER_THROUGHPUT = (
    ("1 node", 1, 124.18, 1.0, 1.0),
    ("2 workers + 1 PS, shared", 2, 195.60, 1.58, 0.79),
    ("4 workers + 1 PS, shared", 4, 292.22, 2.35, 0.58),
    ("4 workers + 3 PS, shared (Table 1)", 4, 374.73, 3.02, 0.76),
    ("4 workers + 3 PS, shared (Table 2)", 4, 383.09, 3.09, 0.77),
    ("4 workers + 3 PS, dedicated", 7, 396.62, 3.19, 0.46),
    ("8 workers + 7 PS, shared", 8, 809.10, 6.52, 0.82),
)

# The speedups by nodes and shared servers. Figure 2b has those with the most servers.
PAPER_SPEEDUP = {(1, 0): 1.0, (2, 1): 1.58, (4, 1): 2.35, (4, 3): 3.09, (8, 7): 6.52}

# Workers, test accuracy, hours, speedup to the same loss.
PAPER_LEARNING = (
    ("1 worker", 0.228, 106.43, 1.00),
    ("2 workers", 0.217, 62.78, 1.69),
    ("4 workers", 0.202, 37.99, 2.80),
    ("8 workers", 0.217, 22.50, 4.73),
)


def node_speedups(rows: Sequence[ScaleRow]) -> list[tuple[ScaleRow, float]]:
    """Return the speedup of each row over one node with as many accelerators, where one is known.

    As in [D] section 7.2, the throughput of N nodes is divided by that of one of them.
    """
    alone = {row.per_node: row.throughput for row in reversed(rows) if row.nodes == 1}
    return [(row, row.throughput / alone[row.per_node]) for row in rows if row.per_node in alone]


def scale_tables(rows: Sequence[ScaleRow], *, paper: bool = False) -> list[Table]:
    """Return the tables for which the rows have data, on request with the paper's results."""
    tables = [_throughput(rows, paper), _learning(rows, paper)]
    served = [row for row in rows if row.staleness]
    if not served:
        return tables
    tables += [_staleness(served), _phases(served)]
    several = [row for row in served if len(row.each) > 1]
    return [*tables, _each(several)] if several else tables


def _throughput(rows: Sequence[ScaleRow], paper: bool) -> Table:
    return table_of(
        "Throughput (the paper's Tables 1 and 2)",
        rows,
        (
            ("configuration", lambda row: row.configuration),
            ("nodes", lambda row: str(row.nodes)),
            ("samples/s", lambda row: f"{row.throughput:,.1f}"),
            ("quartiles", lambda row: f"{row.throughput_low:,.1f}-{row.throughput_high:,.1f}"),
            ("speedup", lambda row: _ratio(row.speedup)),
            ("efficiency", lambda row: _ratio(row.efficiency)),
        ),
        "Median over all epochs but the first, with quartiles. A node is a worker with its group, "
        "or a dedicated server. Speedup is relative to the first configuration, and efficiency is "
        "speedup divided by the accelerators of the nodes, relative to the first's.",
        [
            (f"paper: {text}", str(nodes), f"{images:,.1f}", NOTHING, _ratio(s), _ratio(e))
            for text, nodes, images, s, e in PAPER_THROUGHPUT
            if paper
        ],
    )


def _learning(rows: Sequence[ScaleRow], paper: bool) -> Table:
    target = rows[0].target_loss
    loss = "(not available: no epoch on all data)" if target is None else f"of {target:.4f}"
    return table_of(
        f"Accuracy, and time to a training loss {loss} (the paper's Table 3)",
        rows,
        (
            ("configuration", lambda row: row.configuration),
            ("last epoch, %", _accuracy),
            ("training, s", lambda row: f"{row.seconds:,.1f}"),
            ("to the loss, s", lambda row: number(row.seconds_to_target, ",.1f", "never")),
            ("epochs", lambda row: number(row.epochs_to_target, ".2f", "never")),
            ("samples", lambda row: number(row.samples_to_target, ",.0f", "never")),
            ("speedup", lambda row: _ratio(row.speedup_to_target)),
        ),
        "The loss is the mean cross-entropy over as many batches as an epoch has; where it falls "
        "to the target is interpolated. Speedup is relative to the first configuration. With "
        "several seeds: means, and the standard deviation of the accuracy.",
        [
            (f"paper: {text}", percent(accuracy, 1), f"{hours:g} h", *[NOTHING] * 3, _ratio(s))
            for text, accuracy, hours, s in PAPER_LEARNING
            if paper
        ],
    )


def _staleness(rows: Sequence[ScaleRow]) -> Table:
    return table_of(
        "Staleness, and gradients that were not applied",
        rows,
        (
            ("configuration", lambda row: row.configuration),
            ("updates", lambda row: f"{row.updates:,.0f}"),
            ("mean", lambda row: number(row.staleness_mean, ".3f")),
            ("p95", lambda row: number(row.staleness_p95, "g")),
            ("max", lambda row: number(row.staleness_max, "d")),
            ("dropped, %", lambda row: percent(row.dropped)),
        ),
        "Staleness: the number of other updates between a worker's read and its own update. "
        "Dropped: gradients that arrived too late for a synchronous update with backup workers.",
    )


def _phases(rows: Sequence[ScaleRow]) -> Table:
    phases = [
        phase for phase in WORKER_PHASES + SERVER_PHASES if any(phase in r.phases for r in rows)
    ]
    return Table(
        "Time per gradient in each phase, ms",
        ("configuration", *phases),
        [(row.configuration, *_milliseconds(row.phases, phases)) for row in rows],
        f"Sums over all processes, per applied gradient. The phases {', '.join(SERVER_PHASES)} are "
        f"those of the servers; they take place during the workers' phases pull and wait.",
    )


def _each(rows: Sequence[ScaleRow]) -> Table:
    phases = [
        phase for phase in WORKER_PHASES if any(phase in w.phases for r in rows for w in r.each)
    ]
    return Table(
        "Each worker: time per gradient in each phase, ms",
        ("configuration", "worker", "samples, %", "staleness", *phases),
        [
            (
                *(row.configuration, str(rank), percent(worker.share, 1)),
                number(worker.staleness_mean, ".2f"),
                *_milliseconds(worker.phases, phases),
            )
            for row in rows
            for rank, worker in enumerate(row.each)
        ],
        "A slow worker computes longer than the others, trains fewer samples of asynchronous runs, "
        "and its gradients are staler.",
    )


def _milliseconds(seconds: dict[str, float], phases: Sequence[str]) -> list[str]:
    return [f"{1e3 * seconds.get(phase, 0.0):.2f}" for phase in phases]


def _accuracy(row: ScaleRow) -> str:
    text = percent(row.accuracy_last)
    if row.accuracy_deviation is None:
        return text
    return f"{text} ± {percent(row.accuracy_deviation)} (n = {row.seeds})"


def _ratio(value: float | None) -> str:
    return decimal(value, 2)


def planned_table(plan: Plan) -> Table:
    """Return where scaling stops paying or, if only some configurations were asked for, these."""
    title, note = "Predicted configurations", ""
    if plan.stops:
        title = "Where scaling stops paying"
        note = (
            "For each strategy, the configuration with the most workers whose last doubling "
            "shortened the training by a third. "
        )
    return table_of(
        title,
        plan.stops or plan.rows,
        (
            ("configuration", lambda row: row.configuration),
            ("nodes", lambda row: f"{row.nodes:,}"),
            ("samples/s", lambda row: number(row.throughput, _digits(row.throughput))),
            ("speedup", lambda row: f"{row.speedup:,.2f}"),
            ("efficiency", lambda row: f"{row.efficiency:.2f}"),
            ("staleness", lambda row: f"{row.staleness:,.3g}"),
            ("limit", lambda row: row.limit),
            ("hours", lambda row: f"{row.hours:,.3g}"),
            ("pruned", lambda row: number(row.hours_pruned, ",.3g")),
        ),
        f"{note}Speedup is relative to one node, and efficiency is speedup divided by nodes. "
        f"Limit: what limits the throughput. Hours: of the recipe's epochs, on all data and with "
        f"the pruning of the recipe. A formula predicts this from steps that were measured on one "
        f"machine or given. Every configuration is taken to need the same number of samples; large "
        f"updates and stale gradients need more.",
    )


def _digits(value: float) -> str:
    return ",.0f" if value >= 100 else ".3g"
