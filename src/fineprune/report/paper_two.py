"""[D], "Distributed training strategies" (Campos et al., ICCS 2017): a page with ours."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fineprune.experiments.arm_table import mean_difference
from fineprune.experiments.configurations import configuration
from fineprune.experiments.planner import Cluster, costs_of_runs, predicted_speed
from fineprune.experiments.scale_table import ScaleRow, Scaling
from fineprune.report.facts import what_was_run
from fineprune.report.page import Line, Sentences, write_page
from fineprune.report.paper_one import Claim, claims_table
from fineprune.report.scaling.figures import (
    draw_loss,
    draw_speedup,
    draw_staleness,
    draw_throughput,
)
from fineprune.report.scaling.page import scale_caveats
from fineprune.report.scaling.tables import (
    PAPER_LEARNING,
    PAPER_SPEEDUP,
    PAPER_THROUGHPUT,
    node_speedups,
    scale_tables,
)
from fineprune.report.table import NOTHING, Table, decimal, table_of
from fineprune.runs.files import RECIPE


@dataclass(frozen=True)
class Forecast:
    """The planner's forecast for a configuration beside the measurement, in samples per second."""

    row: ScaleRow
    predicted: float

    @property
    def error(self) -> float:
        """The forecast divided by the measurement, minus 1."""
        return self.predicted / self.row.throughput - 1


def forecasts(scaling: Scaling, rows: Sequence[ScaleRow]) -> list[Forecast]:
    """Return the forecasts for all configurations, from the runs of one worker.

    On one machine, no network is the limit, and no more workers than cores compute at a time.
    """
    costs = costs_of_runs(scaling.runs)
    hardware = scaling.runs[0].run.summary.hardware
    cores = None if hardware.gpu else max(1, hardware.cores // hardware.threads)
    made = []
    for row in rows:
        cluster = Cluster(accelerators=row.per_node, gigabits=0, latency=0)
        speed = predicted_speed(costs, cluster, configuration(row.configuration))[0]
        most = speed if cores is None else cores * costs.samples / costs.step
        made.append(Forecast(row, min(speed, most)))
    return made


def forecast_table(made: Sequence[Forecast]) -> Table:
    """Return the forecasts and the measurements as a table."""
    return table_of(
        "The planner's forecast beside the measurement",
        made,
        (
            ("configuration", lambda one: one.row.configuration),
            ("forecast, samples/s", lambda one: decimal(one.predicted, 1)),
            ("measured", lambda one: decimal(one.row.throughput, 1)),
            ("error, %", lambda one: f"{100 * one.error:+.1f}"),
        ),
        "From the steps of one process, and of one worker with one server, whose rows are met by "
        "construction. On one machine, the network is taken to be free, and no more workers than "
        "cores to compute at a time; servers and the driver need cores, too.",
    )


def claims_two(rows: Sequence[ScaleRow], made: Sequence[Forecast]) -> Table:
    """Return the claims of the paper, with what our runs show of them."""
    note = (
        "Computed from the tables below; with few seeds, small differences are due to chance. The "
        "paper's are ResNet-50 on nodes with four K80 GPUs, so only signs can be compared. On 2 "
        "nodes, the paper's speedup to a loss is above that of the throughput, 1.69 and 1.58."
    )
    claims = [*_of_throughput(rows), *_of_stale_gradients(rows)]
    others = [abs(one.error) for one in made if one.row.configuration not in ("one", "async 1+1")]
    if others:
        median = decimal(100 * statistics.median(others), 1)
        claims.append(Claim("Forecast of the throughput: median error, %", NOTHING, median, "-"))
    return claims_table(claims, note)


def _of_throughput(rows: Sequence[ScaleRow]) -> Iterator[Claim]:
    reduced = [row for row in rows if row.strategy == "all-reduce" and row.nodes == 1]
    inside = max(reduced, key=lambda row: row.workers, default=None)
    if inside is not None:
        yield Claim(
            f"Speedup of {inside.workers} replicas on one node, at least 0.8 of linear (Figure 2a)",
            "almost linear",
            decimal(inside.speedup, 2),
            _yes(inside.speedup > 0.8 * inside.workers),
        )
    mixed = [(row, speedup) for row, speedup in node_speedups(rows) if row.strategy == "mixed"]
    for row, speedup in mixed:
        yield Claim(
            f"Speedup of {row.configuration} on {row.nodes} nodes (Figure 2b)",
            decimal(PAPER_SPEEDUP.get((row.nodes, row.servers)), 2),
            decimal(speedup, 2),
            _yes(speedup > 1),
        )
    pairs = [
        (few, many)
        for (few, _), (many, _) in itertools.permutations(mixed, 2)
        if (few.workers, few.nodes) == (many.workers, many.nodes) and few.servers < many.servers
    ]
    for few, many in pairs[:1]:
        gain = many.throughput / few.throughput - 1
        theirs = PAPER_THROUGHPUT[3][2] / PAPER_THROUGHPUT[2][2] - 1
        yield Claim(
            f"{many.servers} servers instead of {few.servers}: throughput, % (Figure 1)",
            f"{100 * theirs:+.1f}",
            f"{100 * gain:+.1f}",
            _yes(gain > 0),
        )


def _of_stale_gradients(rows: Sequence[ScaleRow]) -> Iterator[Claim]:
    stale = [row for row in rows if (row.staleness_mean or 0) > 0.1]
    for row in stale:
        groups, mean = row.workers // row.per_node, row.staleness_mean or 0
        yield Claim(
            f"Mean staleness of {row.configuration}, N = {groups}, within a tenth",
            f"N - 1 = {groups - 1}",
            decimal(mean, 2),
            _yes(abs(mean - (groups - 1)) < 0.1 * (groups - 1)),
        )
    # As in Table 3, relative to one node with as many accelerators; paired by seed.
    one_node = {row.per_node: row.accuracies for row in reversed(rows) if row.nodes == 1}
    pairs = [(row.accuracies, one_node[row.per_node]) for row in stale if row.per_node in one_node]
    shared = [
        seed for seed in rows[0].accuracies if all(seed in of for of in itertools.chain(*pairs))
    ]
    if pairs and shared:
        difference = mean_difference(
            [statistics.fmean(of[seed] - alone[seed] for of, alone in pairs) for seed in shared]
        )
        theirs = statistics.fmean(row[1] for row in PAPER_LEARNING[1:]) - PAPER_LEARNING[0][1]
        yield Claim(
            "Stale gradients: accuracy minus that of one node, points (Table 3)",
            f"{100 * theirs:+.1f}",
            difference.points(),
            {"worse": "yes", "better": "no"}.get(difference.verdict(margin=0), "open"),
        )
    slower = [
        (row, row.speedup_to_target)
        for row, _ in node_speedups(rows)
        if row.strategy == "mixed" and row.speedup_to_target
    ]
    for row, to_loss in slower[-1:]:
        yield Claim(
            f"{row.configuration}: speedup to a loss below that of throughput (Table 3)",
            "4.73 below 6.52",
            f"{decimal(to_loss, 2)} and {decimal(row.speedup, 2)}",
            _yes(to_loss < row.speedup),
        )


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def write_paper_two(scaling: Scaling, rows: Sequence[ScaleRow], path: Path) -> Table:
    """Write an HTML page on the runs of ``experiments.papers.paper_two`` beside the paper.

    Returns:
        The claims of the paper, which the page begins with.
    """
    made = forecasts(scaling, rows)
    claims = claims_two(rows, made)
    throughput, learning, *others = scale_tables(rows, paper=True)
    lead = (
        "Campos, Sastre, Yagües, Bellver, Giró-i-Nieto and Torres: Distributed training strategies "
        "for a computer vision deep learning algorithm on a distributed GPU cluster (ICCS 2017). "
        "Its results beside ours."
    )
    runs = [scaled.run for scaled in scaling.runs]
    write_page(
        path,
        "Paper 2: distributed training strategies",
        [
            Line("lead", lead),
            claims,
            draw_throughput(rows),
            throughput,
            draw_speedup(rows),
            draw_loss(scaling.runs, rows[0].target_loss),
            learning,
            forecast_table(made),
            draw_staleness(rows),
            *others,
            Sentences(scale_caveats(scaling), "What to keep in mind"),
            *what_was_run([runs], [runs[0].path / RECIPE]),
        ],
    )
    return claims
