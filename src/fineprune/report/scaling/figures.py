"""The figures of a scaling experiment: [D] Figures 1 to 3, and staleness."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fineprune.experiments.scale_table import Scaled, ScaleRow, loss_curve
from fineprune.report.figures import style
from fineprune.report.figures.curves import time_unit
from fineprune.report.figures.style import Drawing, our_style
from fineprune.report.scaling.tables import PAPER_SPEEDUP, node_speedups

# The colour and the marker of each strategy, which are the same in every figure of scaling.
_COLOURS = {
    "one": style.INK,
    "all-reduce": "#0072b2",
    "sync": "#009e73",
    "async": "#d55e00",
    "mixed": "#cc79a7",
}
_MARKERS = {"one": "s", "all-reduce": "^", "sync": "o", "async": "D", "mixed": "v"}

# The line styles that distinguish configurations with the same strategy in a figure.
_DASHES = ("-", (0, (4, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))


def _mark_of(strategy: str, *, hollow: bool = False) -> dict[str, str]:
    """Return how matplotlib marks a configuration with a strategy."""
    colour = _COLOURS[strategy]
    face = "white" if hollow else colour
    return {"color": colour, "marker": _MARKERS[strategy], "markerfacecolor": face}


@our_style()
def draw_throughput(rows: Sequence[ScaleRow]) -> Drawing:
    """Draw the throughput of each configuration as a bar, with the quartiles over its epochs."""
    names = [row.configuration for row in rows]
    figure = style.new_figure(0.8 + 0.3 * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        axes.barh(place, row.throughput, height=0.66, color=_COLOURS[row.strategy])
        axes.plot(
            [row.throughput_low, row.throughput_high], [place, place], color=style.INK, linewidth=1
        )
        end = max(row.throughput, row.throughput_high)
        # The gap is an offset in points, because SVG viewers remove spaces around a text.
        axes.annotate(
            f"{row.throughput:,.0f}",
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            ha="left",
            fontsize=8,
        )
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("training samples per second")
    axes.set_xlim(0, 1.15 * max(max(row.throughput, row.throughput_high) for row in rows))
    caption = "Medians over all epochs but the first. The thin lines span the quartiles."
    return style.drawing(figure, "Throughput by configuration (the paper's Figure 1)", caption)


@our_style()
def draw_speedup(rows: Sequence[ScaleRow]) -> Drawing | None:
    """Draw speedup against the accelerators of a node and against nodes, as in [D] Figure 2.

    None without a configuration on one node.
    """
    across = node_speedups(rows)
    one = next((row.throughput for row in rows if row.strategy == "one"), None)
    reduced = [row for row in rows if row.nodes == 1 and row.strategy in ("one", "all-reduce")]
    inside = [(row, row.throughput / one) for row in reduced] if one else []
    if not across:
        return None
    strategies = list(dict.fromkeys(row.strategy for row, _ in [*inside, *across]))
    figure = style.new_figure(3.0)
    panels = figure.subplots(1, 2)
    for axes, title, points in (
        (panels[0], "(a) accelerators of a node", [(r, r.workers, s) for r, s in inside]),
        (panels[1], "(b) nodes", [(row, row.nodes, speedup) for row, speedup in across]),
    ):
        for row, place, speedup in points:
            mark = _mark_of(row.strategy, hollow=" dedicated" in row.configuration)
            axes.plot(place, speedup, markersize=6, linestyle="none", **mark)
        axes.set_xlabel(title)
        axes.xaxis.set_major_locator(style.whole_ticks(8))
    theirs = {nodes: speedup for (nodes, _), speedup in PAPER_SPEEDUP.items()}
    cross = {"color": style.FAINT, "marker": "x", "linestyle": "none", "label": "the paper"}
    panels[1].plot(list(theirs), list(theirs.values()), **cross)
    for axes in panels:
        most = max(axes.dataLim.x1, 2) if axes.has_data() else 2
        axes.plot([1, most], [1, most], color=style.FAINT, linewidth=1, linestyle=":", zorder=0)
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("speedup of the throughput")
    for strategy in strategies:
        panels[0].plot([], [], linestyle="none", label=strategy, **_mark_of(strategy))
    figure.legend(loc="outside upper center", ncols=len(strategies) + 1)
    caption = (
        "(a) Synchronous replicas on one node, relative to one of them. (b) Nodes, relative to one "
        "node with as many accelerators. The dotted lines are linear speedups. Hollow marks are "
        "configurations with dedicated servers."
    )
    return style.drawing(figure, "Speedup (the paper's Figure 2)", caption)


@our_style()
def draw_loss(runs: Sequence[Scaled], target_loss: float | None) -> Drawing | None:
    """Draw the training loss against the training time, as in [D] Figure 3.

    The target loss, if there is one, is a dotted line. The result is None if no configuration has
    an epoch on all data.
    """
    curves = [
        (scaled.configuration, [point[2] for point in curve], [point[3] for point in curve])
        for scaled in runs
        if (curve := loss_curve(scaled.run))
    ]
    if not curves:
        return None
    unit, length = time_unit(max(seconds[-1] for _, seconds, _ in curves))
    drawn: Counter[str] = Counter()
    dashes: dict[str, Any] = {}
    figure = style.new_figure(3.6)
    axes = figure.subplots()
    for configuration, seconds, losses in curves:
        again = configuration.text in dashes  # with another seed
        if not again:
            dashes[configuration.text] = _DASHES[drawn[configuration.strategy] % len(_DASHES)]
            drawn[configuration.strategy] += 1
        axes.plot(
            [second / length for second in seconds],
            losses,
            color=_COLOURS[configuration.strategy],
            linestyle=dashes[configuration.text],
            marker="o" if len(losses) == 1 else None,
            markersize=4,
            label=None if again else configuration.text,
        )
    if target_loss is not None:
        axes.axhline(target_loss, color=style.FAINT, linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"training time, {unit}")
    axes.set_xlim(left=0)
    axes.set_ylabel("mean training loss")
    figure.legend(loc="outside upper center", ncols=4)
    caption = (
        "Mean cross-entropy over as many batches as an epoch has, noted several times per epoch on "
        "all data, against the training time. The dotted line is the target loss of the table."
    )
    return style.drawing(figure, "Training loss against time (the paper's Figure 3)", caption)


@our_style()
def draw_staleness(rows: Sequence[ScaleRow]) -> Drawing | None:
    """Draw a histogram for each configuration with stale updates; None if there are none."""
    stale = [row for row in rows if len(row.staleness) > 1]
    if not stale:
        return None
    figure, panels = style.new_panels(
        len(stale), 3, 0.5, 1.7, "staleness, updates", "share of the updates, %"
    )
    for axes, row in zip(panels, stale, strict=True):
        shares = [100 * count / sum(row.staleness) for count in row.staleness]
        axes.bar(range(len(shares)), shares, width=0.8, color=_COLOURS[row.strategy])
        axes.set_title(row.configuration)
        axes.xaxis.set_major_locator(style.whole_ticks(8))
        axes.tick_params(labelbottom=True)
    caption = (
        "The staleness of an update is the number of other updates between a worker's read of the "
        "parameters and its own update. With N equal workers, it is about N - 1."
    )
    return style.drawing(figure, "Staleness", caption)
