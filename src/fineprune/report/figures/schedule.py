"""The schedule, with one cell per epoch: [P] Figure 3, for our runs or for a plan."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from fineprune.errors import InputError
from fineprune.experiments.arm_table import Group
from fineprune.experiments.run_schedule import boundaries_of
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.style import INK, WIDTH, our_style
from fineprune.runs.run import Run

_EPOCHS_PER_ROW = 20
_FULL_CELL, _PRUNED_CELL = "#e3e3e3", "#f0a45d"


def draw_schedule(group: Group) -> Drawing | None:
    """Draw the schedule of the group's first run that prunes; None if no run prunes."""
    run = _first_pruned(group)
    if run is None:
        return None
    prunes = [bool(line["pruned"]) for line in run.metrics]
    boundaries = boundaries_of(run)
    svg = _schedule_svg(prunes, boundaries, f"Schedule of {group.label}")
    caption = (
        f"Each cell is an epoch. {sum(prunes)} of {len(prunes)} epochs skip samples; the others "
        f"train on all samples."
    )
    if boundaries:
        caption += " A thick line marks the end of a window, where the counts are reset to zero."
    return Drawing("The schedule (the paper's Figure 3)", svg, caption)


def schedule_svg(prunes: Sequence[bool], boundaries: Sequence[int] = ()) -> str:
    """Draw a schedule as rows of numbered epochs, as in the paper's Figure 3.

    Args:
        prunes: Whether each epoch skips samples.
        boundaries: The epochs, counted from 1, at whose end the counts are cleared.

    Returns:
        One ``<svg>`` element.

    Raises:
        InputError: There is no epoch.
    """
    if not prunes:
        raise InputError("expected a schedule of at least one epoch, got none")
    return _schedule_svg(prunes, boundaries, "Schedule")


def prunes_by_epoch(group: Group) -> list[bool]:
    """Return whether each epoch skips samples in the first run that prunes; empty if none does."""
    run = _first_pruned(group)
    return [] if run is None else [bool(line["pruned"]) for line in run.metrics]


def _schedule_svg(prunes: Sequence[bool], boundaries: Sequence[int], label: str) -> str:
    columns = min(_EPOCHS_PER_ROW, len(prunes))
    rows = math.ceil(len(prunes) / columns)
    row_height, legend_height = 1.25, 0.9  # In cells.
    cell = WIDTH / (_EPOCHS_PER_ROW + 0.4)  # In inches.
    with our_style():
        figure = Figure((WIDTH, cell * (rows * row_height + legend_height)))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(-0.2, _EPOCHS_PER_ROW + 0.2)
        axes.set_ylim(rows * row_height, -legend_height)
        axes.set_axis_off()
        places = [
            (epoch % columns, epoch // columns * row_height, bool(prunes[epoch]))
            for epoch in range(len(prunes))
        ]
        for pruned, colour in ((False, _FULL_CELL), (True, _PRUNED_CELL)):
            cells = [
                Rectangle((x + 0.03, y), 0.94, 1)
                for x, y, is_pruned in places
                if is_pruned is pruned
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
        return svg_text(figure, f"{label}: {sum(map(bool, prunes))} of {len(prunes)} epochs pruned")


def _first_pruned(group: Group) -> Run | None:
    return next((run for run in group.runs if any(line["pruned"] for line in run.metrics)), None)
