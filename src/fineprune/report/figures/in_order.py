"""All figures of a group, in the order of the report."""

from fineprune.experiments.arm_table import Group
from fineprune.report.figures.accuracy_over_time import draw_time
from fineprune.report.figures.counts import draw_counts
from fineprune.report.figures.curves import draw_curves
from fineprune.report.figures.drawing import Drawing
from fineprune.report.figures.schedule import draw_schedule
from fineprune.report.figures.watched import draw_watched


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
