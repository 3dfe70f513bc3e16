"""Speedup against workers, for synchronous and asynchronous updates: [D] Figure 2."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from fineprune.experiments.scale_table import ScaleRow
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.style import FAINT, WIDTH, our_style, whole_ticks
from fineprune.report.scaling.colours import COLOURS, MARKERS

_PANELS = {
    "synchronous": ("one", "all-reduce", "sync"),
    "asynchronous": ("one", "async", "mixed"),
}


def draw_speedup(rows: Sequence[ScaleRow]) -> Drawing | None:
    """Draw speedup against workers; None if there is no run of a single process."""
    speedups = [(row, row.speedup) for row in rows if row.speedup is not None]
    if not speedups:
        return None
    workers = max(row.workers for row in rows)
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    with our_style():
        figure = Figure((WIDTH, 3.0), layout="constrained")
        for axes, (title, shown) in zip(
            figure.subplots(1, 2, sharex=True, sharey=True), _PANELS.items(), strict=True
        ):
            axes.plot([1, workers], [1, workers], color=FAINT, linewidth=1, linestyle=":")
            for row, speedup in speedups:
                if row.strategy in shown:
                    dedicated = row.nodes > row.workers
                    axes.plot(
                        row.workers,
                        speedup,
                        marker=MARKERS[row.strategy],
                        markersize=6,
                        linestyle="none",
                        color=COLOURS[row.strategy],
                        markerfacecolor="white" if dedicated else COLOURS[row.strategy],
                    )
            axes.set_title(title)
            axes.set_xlabel("workers")
            axes.xaxis.set_major_locator(whole_ticks(8))
            axes.set_ylim(bottom=0)
        figure.axes[0].set_ylabel("speedup of the throughput")
        for strategy in strategies:
            figure.axes[0].plot(
                [],
                [],
                marker=MARKERS[strategy],
                linestyle="none",
                color=COLOURS[strategy],
                label=strategy,
            )
        figure.legend(loc="outside upper center", ncols=len(strategies))
        svg = svg_text(figure, "Speedup by workers")
    caption = (
        "Throughput relative to that of a single process. The dotted line is a speedup equal to "
        "the number of workers. Hollow marks are configurations with dedicated servers."
    )
    return Drawing("Speedup by workers (the paper's Figure 2)", svg, caption)
