"""The prediction for a cluster: tables, a figure, and the page."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fineprune.experiments.planner import Cluster, Costs, Plan, Predicted
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.style import FAINT, INK, new_figure
from fineprune.report.page_template import write_page
from fineprune.report.scaling.figures import mark_of
from fineprune.report.table import Table, number, table_of

_NOTE = (
    "Speedup is relative to one node, and efficiency is speedup divided by nodes. Limit: what "
    "limits the throughput. Hours: of the recipe's epochs, on all data and with the pruning of the "
    "recipe."
)
_STOPS = (
    "For each strategy, the configuration with the most workers whose last doubling shortened the "
    "training by a third. "
)
_COLUMNS: Sequence[tuple[str, Callable[[Predicted], str]]] = (
    ("configuration", lambda row: row.configuration),
    ("nodes", lambda row: f"{row.nodes:,}"),
    ("samples/s", lambda row: format(row.throughput, ",.0f" if row.throughput >= 100 else ".3g")),
    ("speedup", lambda row: f"{row.speedup:,.2f}"),
    ("efficiency", lambda row: f"{row.efficiency:.2f}"),
    ("staleness", lambda row: f"{row.staleness:,.3g}"),
    ("limit", lambda row: row.limit),
    ("hours", lambda row: f"{row.hours:,.3g}"),
    ("pruned", lambda row: number(row.hours_pruned, ",.3g")),
)
_CAVEATS = (
    "A formula predicts the throughput from steps that were measured on one machine or given; all "
    "nodes and links are taken to be equal.",
    "Every configuration is taken to need the same number of samples. Larger updates and stale "
    "gradients need more.",
)


def planned_tables(plan: Plan, *, every: bool = False) -> list[Table]:
    """Return the table of where scaling stops paying; with ``every``, all predictions too."""
    tables = []
    if plan.stops:
        title = "Where scaling stops paying"
        tables.append(table_of(title, plan.stops, _COLUMNS, _STOPS + _NOTE))
    if every or not plan.stops:
        tables.append(table_of("Predicted configurations", plan.rows, _COLUMNS, _NOTE))
    return tables


def draw_planned(plan: Plan) -> Drawing:
    """Draw the predicted throughput and time of each strategy against the number of nodes."""
    most = max(row.nodes for row in plan.rows)
    with new_figure(3.4) as figure:
        panels = figure.subplots(1, 2, sharex=True)
        for kind in dict.fromkeys(row.kind for row in plan.rows):
            rows = sorted((r for r in plan.rows if r.kind == kind), key=lambda row: row.nodes)
            nodes = [row.nodes for row in rows]
            for axes, values in zip(
                panels, ([r.speedup for r in rows], [r.hours for r in rows]), strict=True
            ):
                axes.plot(nodes, values, markersize=4, label=kind, **mark_of(kind))
        panels[0].plot([1, most], [1, most], color=FAINT, linewidth=1, linestyle=":")
        best = plan.recommended
        circle = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "color": INK}
        panels[1].plot([best.nodes], [best.hours], linestyle="none", **circle)
        for axes, title in zip(panels, ("speedup", "hours"), strict=True):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("nodes")
            axes.set_title(title)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
        svg = svg_text(figure, "Predicted speedup and time by nodes")
    caption = (
        "Speedup of the throughput relative to one node; the dotted line is a speedup equal to the "
        "number of nodes. The circle marks the recommended configuration."
    )
    return Drawing("Prediction", svg, caption)


def write_plan_page(
    plan: Plan, costs: Costs, cluster: Cluster, title: str, recipe: str, path: Path
) -> None:
    """Write a plan and what it rests on as one self-contained HTML file.

    Args:
        plan: The plan.
        costs: The costs of a step.
        cluster: The cluster.
        title: The name of what is trained.
        recipe: The recipe, as TOML.
        path: The HTML file.
    """
    link = f"{cluster.gigabits:g} Gbit/s" if cluster.gigabits else "never the limit"
    milliseconds = {
        "exchange": costs.exchange,
        "server, per gradient": costs.gradient,
        "per update": costs.update,
    }
    facts = [
        (
            "Cluster",
            f"up to {cluster.nodes:,} nodes with {cluster.accelerators} workers; links: {link}",
        ),
        (
            "Step",
            f"{costs.samples} samples, {1e3 * costs.step:.4g} ms ± {100 * costs.spread:.0f} %; "
            f"{costs.megabytes:.4g} MB of parameters",
        ),
        ("Exchange, ms", "; ".join(f"{n} {1e3 * s:.3g}" for n, s in milliseconds.items())),
    ]
    write_page(
        path,
        "results.html.j2",
        title=f"{title}: predicted workers and servers",
        lead=f"Recommended: {plan.recommended.configuration}.",
        parts=[*planned_tables(plan, every=True), draw_planned(plan)],
        notes=_CAVEATS,
        facts=facts,
        recipes=[recipe.strip()],
    )
