"""The prediction for a cluster: tables, a figure, and the page."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fineprune.experiments.cluster_costs import ClusterShape, Costs
from fineprune.experiments.planner import ClusterPlan, Predicted
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.style import FAINT, INK, new_figure
from fineprune.report.page_template import write_page
from fineprune.report.scaling.figures import mark_of
from fineprune.report.table import Table, number, table_of


def planned_tables(plan: ClusterPlan, *, every: bool = False) -> list[Table]:
    """Return the tables of where scaling stops paying; with ``every``, of all predictions too."""
    tables = []
    if plan.stops:
        tables.append(table_of("Where scaling stops paying", plan.stops, _THROUGHPUT, _STOPS))
        tables.append(table_of("Time there", plan.stops, _TIME, _TARGET))
    if every or not plan.stops:
        tables.append(table_of("Predicted configurations", plan.rows, _THROUGHPUT, _SPEEDUP))
        tables.append(table_of("Predicted time", plan.rows, _TIME, _TARGET))
    return tables


_SPEEDUP = (
    "Speedup is relative to one node, and efficiency is speedup divided by nodes. Limit: what "
    "limits the throughput."
)
_STOPS = (
    "For each strategy, the configuration with the most workers whose last doubling paid: it "
    "shortened the training by a third per doubling of the nodes. " + _SPEEDUP
)
_TARGET = (
    "The time to the target, or else that of the recipe's epochs: on all data, and with the "
    "pruning of the recipe. Samples needed: relative to one worker."
)

_THROUGHPUT: Sequence[tuple[str, Callable[[Predicted], str]]] = (
    ("configuration", lambda row: row.configuration),
    ("nodes", lambda row: f"{row.nodes:,}"),
    ("samples/s", lambda row: format(row.throughput, ",.0f" if row.throughput >= 100 else ".3g")),
    ("speedup", lambda row: f"{row.speedup:,.2f}"),
    ("efficiency", lambda row: f"{row.efficiency:.2f}"),
    ("staleness", lambda row: f"{row.staleness_mean:,.3g}"),
    ("limit", lambda row: row.limit),
)
_TIME: Sequence[tuple[str, Callable[[Predicted], str]]] = (
    ("configuration", lambda row: row.configuration),
    ("samples needed", lambda row: f"{row.samples_factor:.2f}"),
    ("hours", lambda row: f"{row.hours:,.3g}"),
    ("node-hours", lambda row: f"{row.node_hours:,.3g}"),
    ("pruned: hours", lambda row: number(row.hours_pruned, ",.3g")),
    ("node-hours", lambda row: number(row.node_hours_pruned, ",.3g")),
)

_CAVEATS = (
    "A formula predicts the throughput from the steps that were measured on one machine or given; "
    "links, servers and the driver serve one request after another.",
    "All nodes and links are taken to be equal, and the workers of a node are slow together.",
    "DDP is taken to hide all of its all-reduce but the last 25 MB behind the backward pass, as "
    "far as that lasts for two thirds of a step.",
    "Unless a critical batch size and a cost of staleness are given, every configuration is taken "
    "to need the same number of samples. Larger updates and stale gradients need more.",
)


def draw_planned(plan: ClusterPlan) -> Drawing:
    """Draw the predicted throughput and time of each strategy against the number of nodes."""
    kinds = list(dict.fromkeys(row.kind for row in plan.rows))
    with new_figure(3.4) as figure:
        panels = figure.subplots(1, 2, sharex=True)
        for kind in kinds:
            rows = sorted((r for r in plan.rows if r.kind == kind), key=lambda row: row.nodes)
            strategy, _, option = kind.partition(" ")
            for axes, values in zip(
                panels, ([r.speedup for r in rows], [r.hours for r in rows]), strict=True
            ):
                axes.plot(
                    [row.nodes for row in rows],
                    values,
                    markersize=4,
                    linestyle="--" if option else "-",
                    label=kind,
                    **mark_of(strategy, hollow=bool(option)),
                )
        most = max(row.nodes for row in plan.rows)
        panels[0].plot([1, most], [1, most], color=FAINT, linewidth=1, linestyle=":")
        best = plan.recommended
        panels[1].plot(
            [best.nodes],
            [best.hours],
            marker="o",
            markersize=11,
            color=INK,
            markerfacecolor="none",
            linestyle="none",
        )
        for axes, title in zip(panels, ("speedup", "hours to the target"), strict=True):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("nodes")
            axes.set_title(title)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
        svg = svg_text(figure, "Predicted speedup and time by nodes")
    caption = (
        "Speedup of the throughput relative to one node; the dotted line is a speedup equal to the "
        "number of nodes. The circle marks the recommended configuration."
    )
    return Drawing("Prediction", svg, caption)


def write_plan_page(
    plan: ClusterPlan, costs: Costs, cluster: ClusterShape, title: str, recipe: str, path: Path
) -> None:
    """Write a plan and what it rests on as one self-contained HTML file.

    The title is the name of what is trained, and the recipe is TOML.
    """
    write_page(
        path,
        "scale.html.j2",
        title=f"{title}: predicted workers and servers",
        facts=planned_facts(plan, costs, cluster),
        tables=planned_tables(plan, every=True),
        drawings=[draw_planned(plan)],
        caveats=_CAVEATS,
        recipe=recipe.strip(),
    )


def planned_facts(plan: ClusterPlan, costs: Costs, cluster: ClusterShape) -> list[tuple[str, str]]:
    """Return pairs of a term and its value that describe what a plan rests on."""
    steps = sorted(costs.steps)
    longest = steps[min(len(steps) - 1, round(0.95 * len(steps)))]
    link = f"{cluster.gigabits:g} Gbit/s" if cluster.gigabits else "never the limit"
    return [
        ("Recommended", plan.reason),
        (
            "Cluster",
            f"up to {cluster.nodes:,} nodes with {cluster.accelerators} workers each; links: "
            f"{link}, {1e3 * cluster.latency:g} ms",
        ),
        (
            "Step",
            f"{costs.samples} samples, {1e3 * costs.step:.4g} ms on average, 95 % within "
            f"{1e3 * longest:.4g} ms (n = {len(steps)}); {costs.megabytes:.4g} MB of parameters",
        ),
        (
            "Exchange",
            f"overhead {1e3 * costs.overhead:.3g} ms; server {1e3 * costs.serve:.3g} ms per "
            f"gradient and {1e3 * costs.apply:.3g} ms per update; driver "
            f"{1e3 * costs.coordinate:.3g} ms per gradient",
        ),
    ]
