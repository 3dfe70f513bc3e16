"""[D], "Distributed training strategies" (Campos et al., ICCS 2017): a page with ours."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fineprune.experiments.configurations import configuration
from fineprune.experiments.planner import Cluster, costs_of_runs, predicted_speed
from fineprune.experiments.scale_table import ScaleRow, Scaling
from fineprune.report.facts import facts
from fineprune.report.figures.drawing import drawn
from fineprune.report.page_template import write_page
from fineprune.report.paper_one import Claim, claims_table
from fineprune.report.scaling.figures import (
    draw_loss,
    draw_phases,
    draw_speedup,
    draw_staleness,
    draw_throughput,
    node_speedups,
)
from fineprune.report.scaling.page import scale_caveats
from fineprune.report.scaling.tables import PAPER_LEARNING, PAPER_THROUGHPUT, scale_tables
from fineprune.report.table import NOTHING, Table, decimal, table_of
from fineprune.runs.files import RECIPE

# The paper's speedups by nodes and shared servers, from its Table 2. Its Figure 2b has those with
# the most servers for each number of nodes.
_BY_SERVERS = {(1, 0): 1.0, (2, 1): 1.58, (4, 1): 2.35, (4, 3): 3.09, (8, 7): 6.52}
_FIGURE_2B = tuple({nodes: speedup for (nodes, _), speedup in _BY_SERVERS.items()}.items())


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
        "paper's are ResNet-50 on nodes with four K80 GPUs, so only signs can be compared."
    )
    return claims_table(list(_claims(rows, made)), note)


def _claims(rows: Sequence[ScaleRow], made: Sequence[Forecast]) -> Iterator[Claim]:
    by_text = {row.configuration: row for row in rows}
    across = {row.configuration: speedup for row, speedup in node_speedups(rows)}
    reduced = [row for row in rows if row.strategy == "all-reduce" and row.nodes == 1]
    inside = max(reduced, key=lambda row: row.workers, default=None)
    if inside is not None:
        yield Claim(
            f"Speedup of {inside.workers} replicas on one node, at least 0.8 of linear (Figure 2a)",
            "almost linear",
            decimal(inside.speedup, 2),
            _yes(inside.speedup > 0.8 * inside.workers),
        )
    mixed = [row for row in rows if row.strategy == "mixed" and row.configuration in across]
    for row in mixed:
        theirs = _BY_SERVERS.get((row.nodes, row.servers))
        yield Claim(
            f"Speedup of {row.configuration} on {row.nodes} nodes (Figure 2b)",
            decimal(theirs, 2),
            decimal(across[row.configuration], 2),
            _yes(across[row.configuration] > 1),
        )
    pairs = [
        (few, many)
        for few in mixed
        for many in mixed
        if few.workers == many.workers and few.nodes == many.nodes and few.servers < many.servers
    ]
    for few, many in pairs[:1]:
        gain = many.throughput / few.throughput - 1
        yield Claim(
            f"{many.servers} servers instead of {few.servers}: throughput, % (Figure 1)",
            f"{100 * (PAPER_THROUGHPUT[3][2] / PAPER_THROUGHPUT[2][2] - 1):+.1f}",
            f"{100 * gain:+.1f}",
            _yes(gain > 0),
        )
    one = by_text.get("one")
    stale = [row for row in rows if (row.staleness_mean or 0) > 0.1]
    for row in stale:
        groups = row.workers // row.per_node
        assert row.staleness_mean is not None
        yield Claim(
            f"Mean staleness of {row.configuration}, N = {groups}, within a tenth",
            f"N - 1 = {groups - 1}",
            decimal(row.staleness_mean, 2),
            _yes(abs(row.staleness_mean - (groups - 1)) < 0.1 * (groups - 1)),
        )
    if one is not None and stale:
        loss = statistics.fmean(row.accuracy_last for row in stale) - one.accuracy_last
        theirs = statistics.fmean(row[1] for row in PAPER_LEARNING[1:]) - PAPER_LEARNING[0][1]
        yield Claim(
            "Stale gradients: accuracy minus one process, points (Table 3)",
            f"{100 * theirs:+.1f}",
            f"{100 * loss:+.1f}",
            _yes(loss < 0),
        )
    slower = [row for row in mixed if row.speedup_to_target is not None]
    for row in slower[-1:]:
        yield Claim(
            f"{row.configuration}: the speedup to a loss is below that of the throughput (Table 3)",
            "4.73 below 6.52 on 8 nodes; 1.69 above 1.58 on 2",
            f"{decimal(row.speedup_to_target, 2)} and {decimal(row.speedup, 2)}",
            _yes((row.speedup_to_target or 0) < row.speedup),
        )
    others = [abs(one.error) for one in made if one.row.configuration not in ("one", "async 1+1")]
    if others:
        yield Claim(
            "Forecast of the throughput: median error, %",
            NOTHING,
            decimal(100 * statistics.median(others), 1),
            NOTHING,
        )


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def write_paper_two(scaling: Scaling, rows: Sequence[ScaleRow], path: Path) -> None:
    """Write the page with the paper's tables and figures, ours beside theirs, and the forecast.

    Args:
        scaling: The runs of ``experiments.papers.paper_two``.
        rows: Their measures.
        path: The HTML file.
    """
    made = forecasts(scaling, rows)
    throughput, learning, *others = scale_tables(rows, paper=True)
    target = rows[0].target_loss
    write_page(
        path,
        "results.html.j2",
        title="Paper 2: distributed training strategies",
        lead="Campos, Sastre, Yagües, Bellver, Giró-i-Nieto and Torres: Distributed training "
        "strategies for a computer vision deep learning algorithm on a distributed GPU cluster "
        "(ICCS 2017). The paper's results beside ours.",
        parts=[
            claims_two(rows, made),
            *drawn(draw_throughput(rows)),
            throughput,
            *drawn(draw_speedup(rows, _FIGURE_2B)),
            *drawn(draw_loss(scaling.runs, target)),
            learning,
            forecast_table(made),
            *drawn(draw_staleness(rows), draw_phases(rows)),
            *others,
        ],
        notes=scale_caveats(scaling),
        facts=facts([scaled.run for scaled in scaling.runs]),
        recipes=[(scaling.runs[0].run.path / RECIPE).read_text(encoding="utf-8").strip()],
    )
