"""Figures as SVG: what a comparison showed, [P] Figures 1 and 2 for our runs, and the counts.

The figures are drawn with matplotlib's objects, without pyplot and without changing matplotlib's
global settings. The same runs give the same bytes. Text is written as text, not as paths.
"""

from fineprune.experiments.arm_table import Group
from fineprune.report.figures.accuracy_over_time import draw_time
from fineprune.report.figures.counts import draw_counts
from fineprune.report.figures.curves import draw_curves
from fineprune.report.figures.drawing import Drawing, drawn
from fineprune.report.figures.evaluations import metrics_by_arm
from fineprune.report.figures.sample_losses import draw_sample_losses
from fineprune.report.figures.samples import draw_samples
from fineprune.report.figures.schedule import schedule_svg

__all__ = [
    "Drawing",
    "draw_counts",
    "draw_curves",
    "draw_first",
    "draw_further",
    "draw_sample_losses",
    "draw_samples",
    "draw_time",
    "drawn",
    "schedule_svg",
]


def draw_first(group: Group) -> list[Drawing]:
    """Draw what each arm reached and what it trained, for which every run has the data."""
    arms = metrics_by_arm(group)
    kind = group.first.evaluated_on
    return drawn(draw_time(arms, kind, group.label), draw_samples(arms, group.label))


def draw_further(group: Group) -> list[Drawing]:
    """Draw every other figure for which the runs have the data."""
    return drawn(draw_curves(group), draw_sample_losses(group), draw_counts(group))
