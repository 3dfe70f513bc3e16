"""The schedule of a plan, with one cell per epoch, as in [P] Figure 3."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from fineprune.report.figures.drawing import svg_text
from fineprune.report.figures.style import INK, WIDTH, our_style

_EPOCHS_PER_ROW = 20
_FULL_CELL, _PRUNED_CELL = "#e3e3e3", "#f0a45d"


def schedule_svg(prunes: Sequence[bool], boundaries: Sequence[int] = ()) -> str:
    """Draw a schedule as rows of numbered epochs, as in the paper's Figure 3.

    Args:
        prunes: Whether each epoch, of at least one, skips samples.
        boundaries: The epochs, counted from 1, at whose end the counts are cleared.

    Returns:
        One ``<svg>`` element.
    """
    columns = min(_EPOCHS_PER_ROW, len(prunes))
    rows = math.ceil(len(prunes) / columns)
    row_height, legend_height = 1.25, 0.9  # In cells.
    cell = WIDTH / (_EPOCHS_PER_ROW + 0.4)  # In inches.
    with our_style():
        figure = Figure((WIDTH, cell * (rows * row_height + legend_height)), facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(-0.2, _EPOCHS_PER_ROW + 0.2)
        axes.set_ylim(rows * row_height, -legend_height)
        axes.set_axis_off()
        places = [
            (epoch % columns, epoch // columns * row_height, bool(prunes[epoch]))
            for epoch in range(len(prunes))
        ]
        for skips, colour in ((False, _FULL_CELL), (True, _PRUNED_CELL)):
            cells = [
                Rectangle((x + 0.03, y), 0.94, 1)
                for x, y, is_pruned in places
                if is_pruned is skips
            ]
            axes.add_collection(PatchCollection(cells, facecolor=colour, edgecolor="none"))
        for number, (x, y, _) in enumerate(places, start=1):
            axes.text(x + 0.5, y + 0.52, str(number), ha="center", va="center", fontsize=8)
        for boundary in boundaries:
            x, y, _ = places[boundary - 1]
            axes.plot([x + 1, x + 1], [y - 0.1, y + 1.1], color=INK, linewidth=2.2)
        handles: list[Any] = [
            Patch(facecolor=_FULL_CELL, label="trains on all samples"),
            Patch(facecolor=_PRUNED_CELL, label="skips samples"),
        ]
        if boundaries:
            handles.append(
                Line2D([], [], color=INK, linewidth=2.2, label="window ends, counts are cleared")
            )
        axes.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0, 1),
            ncols=3,
            borderaxespad=0.2,
            borderpad=0,
        )
        return svg_text(
            figure, f"Schedule: {sum(map(bool, prunes))} of {len(prunes)} epochs pruned"
        )
