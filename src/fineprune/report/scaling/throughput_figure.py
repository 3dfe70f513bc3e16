"""Throughput of each configuration: [D] Figure 1."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from fineprune.experiments.scale_table import ScaleRow
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.style import INK, WIDTH, our_style
from fineprune.report.scaling.colours import COLOURS


def draw_throughput(rows: Sequence[ScaleRow]) -> Drawing:
    """Draw the throughput of each configuration as a bar, with the quartiles over its epochs."""
    names = [row.configuration for row in rows]
    with our_style():
        figure = Figure((WIDTH, 0.8 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for place, row in enumerate(rows):
            axes.barh(place, row.throughput, height=0.66, color=COLOURS[row.strategy])
            axes.plot(
                [row.throughput_low, row.throughput_high], [place, place], color=INK, linewidth=1
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
        svg = svg_text(figure, "Throughput by configuration")
    caption = "Medians over all epochs but the first. The thin lines span the quartiles."
    return Drawing("Throughput by configuration (the paper's Figure 1)", svg, caption)
