"""Figures as SVG: [P] Figures 1 to 3 for our runs, the counts, and accuracy against time.

The figures are drawn with matplotlib's objects, without pyplot and without changing matplotlib's
global settings. The same runs give the same bytes. Text is written as text, not as paths.
"""

from fineprune.experiments.arm_table import Group
from fineprune.report.figures.accuracy_over_time import draw_time
from fineprune.report.figures.counts import draw_counts
from fineprune.report.figures.curves import draw_curves
from fineprune.report.figures.drawing import Drawing
from fineprune.report.figures.schedule import draw_schedule, schedule_svg
from fineprune.report.figures.watched import draw_watched

__all__ = [
    "Drawing",
    "draw_all",
    "draw_counts",
    "draw_curves",
    "draw_schedule",
    "draw_watched",
    "schedule_svg",
]


def draw_all(group: Group) -> list[Drawing]:
    """Draw every figure for which the runs have the data, in the order of the report."""
    drawings = (
        draw_curves(group),
        draw_time(group),
        draw_watched(group),
        draw_schedule(group),
        draw_counts(group),
    )
    return [drawing for drawing in drawings if drawing is not None]
