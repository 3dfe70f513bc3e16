"""Histograms of the staleness of updates, one for each asynchronous configuration."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from fineprune.experiments.scale_table import ScaleRow
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.style import WIDTH, our_style, whole_ticks
from fineprune.report.scaling.colours import COLOURS

_COLUMNS = 3


def draw_staleness(rows: Sequence[ScaleRow]) -> Drawing | None:
    """Draw a histogram for each configuration with stale updates; None if there are none."""
    stale = [row for row in rows if len(row.staleness) > 1]
    if not stale:
        return None
    lines = -(-len(stale) // _COLUMNS)
    with our_style():
        figure = Figure((WIDTH, 0.5 + 1.7 * lines), layout="constrained")
        panels = figure.subplots(lines, _COLUMNS, squeeze=False, sharex=True, sharey=True).flat
        for axes, row in zip(panels, stale, strict=False):
            shares = [100 * count / sum(row.staleness) for count in row.staleness]
            axes.bar(range(len(shares)), shares, width=0.8, color=COLOURS[row.strategy])
            axes.set_title(row.configuration)
            axes.xaxis.set_major_locator(whole_ticks(8))
            axes.tick_params(labelbottom=True)
        for axes in list(figure.axes)[len(stale) :]:
            axes.set_visible(False)
        figure.supxlabel("staleness, updates", fontsize=9)
        figure.supylabel("share of the updates, %", fontsize=9)
        svg = svg_text(figure, "Staleness of the updates")
    caption = (
        "The staleness of an update is the number of other updates between a worker's read of the "
        "parameters and its own update. With N equal workers, it is about N - 1."
    )
    return Drawing("Staleness", svg, caption)
