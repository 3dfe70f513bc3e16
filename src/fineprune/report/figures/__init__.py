"""Figures as SVG: the paper's Figures 1 to 3 of our runs, counts, and accuracy against time.

Every figure is drawn through matplotlib's objects, without pyplot and without changing its global
settings, and is the same to the byte for the same runs. Text stays text.
"""

from fineprune.report.figures.counts import draw_counts
from fineprune.report.figures.curves import draw_curves
from fineprune.report.figures.drawing import Drawing
from fineprune.report.figures.in_order import draw_all
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
