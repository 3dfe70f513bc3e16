"""The schedule of a plan, with one cell per epoch, as in [P] Figure 3."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from fineprune.report.figures import style
from fineprune.report.figures.style import Drawing, our_style

_EPOCHS_PER_ROW = 20
_FULL_CELL, _PRUNED_CELL = "#e3e3e3", "#f0a45d"


@our_style()
def draw_schedule(
    prunes: Sequence[bool], boundaries: Sequence[int] = (), caption: str = ""
) -> Drawing:
    """Draw a schedule as rows of numbered epochs, as in the paper's Figure 3.

    Args:
        prunes: Whether each epoch, of at least one, skips samples.
        boundaries: The epochs, counted from 1, at whose end the counts are cleared.
        caption: The explanation.
    """
    columns = min(_EPOCHS_PER_ROW, len(prunes))
    rows = math.ceil(len(prunes) / columns)
    row_height, legend_height = 1.25, 0.9  # In cells.
    cell = style.WIDTH / (_EPOCHS_PER_ROW + 0.4)  # In inches.
    figure = Figure((style.WIDTH, cell * (rows * row_height + legend_height)), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.2, _EPOCHS_PER_ROW + 0.2)
    axes.set_ylim(rows * row_height, -legend_height)
    axes.set_axis_off()
    places = [(epoch % columns, epoch // columns * row_height) for epoch in range(len(prunes))]
    for skips, colour in ((False, _FULL_CELL), (True, _PRUNED_CELL)):
        cells = [
            Rectangle((x + 0.03, y), 0.94, 1)
            for (x, y), is_pruned in zip(places, prunes, strict=True)
            if bool(is_pruned) is skips
        ]
        axes.add_collection(PatchCollection(cells, facecolor=colour, edgecolor="none"))
    for number, (x, y) in enumerate(places, start=1):
        axes.text(x + 0.5, y + 0.52, str(number), ha="center", va="center", fontsize=8)
    handles: list[Any] = [
        Patch(facecolor=_FULL_CELL, label="trains on all samples"),
        Patch(facecolor=_PRUNED_CELL, label="skips samples"),
    ]
    ends: Any = {"color": style.INK, "linewidth": 2.2}
    for boundary in boundaries:
        x, y = places[boundary - 1]
        axes.plot([x + 1, x + 1], [y - 0.1, y + 1.1], **ends)
    if boundaries:
        handles.append(Line2D([], [], label="window ends, counts are cleared", **ends))
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        borderaxespad=0.2,
        borderpad=0,
    )
    return style.drawing(figure, "The schedule (the paper's Figure 3)", caption)
