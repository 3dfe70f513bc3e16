"""Accuracy against training time, with the interval of each arm at its end."""

from fineprune.experiments.arm_table import Group, mean_difference
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.evaluations import average_curves
from fineprune.report.figures.style import arm_legend, colour_of, line_of, new_figure


def draw_time(group: Group) -> Drawing | None:
    """Draw accuracy against training time; None if there are no evaluations.

    The left panel has the whole training. The right one has its end, where arms differ by little.
    """
    curves, kind = average_curves(group, "accuracy", 100), group.first.evaluated_on
    if not curves:
        return None
    unit, length = time_unit(max(curve.seconds[-1] for curve in curves.values()))
    with new_figure(3.7) as figure:
        whole, end = figure.subplots(1, 2, width_ratios=(3, 2))
        for arm, curve in curves.items():
            whole.plot(curve.seconds / length, curve.mean, **line_of(arm), **curve.marker)
            last = mean_difference(list(curve.values[:, -1]))
            end.errorbar(
                curve.seconds[-1] / length,
                last.mean,
                last.half_width,
                color=colour_of(arm),
                fmt="o",
                capsize=3,
            )
        whole.set_xlabel(f"training time, {unit}")
        whole.set_xlim(left=0)
        whole.set_ylabel(f"{kind} accuracy, %")
        end.set_xlabel(f"whole training time, {unit}")
        end.set_title("last epoch")
        end.margins(0.15)
        end.set_ylim(top=min(end.get_ylim()[1], 100.5))
        arm_legend(figure, curves)
        svg = svg_text(figure, f"Accuracy of {group.label} against training time")
    caption = (
        f"Accuracy on the {kind} set against the wall-clock time of the training, including "
        f"overhead and excluding evaluation. The right panel shows the end of each arm"
    )
    if len(group.runs) > len(group.arms):
        caption += (
            ", with the 95 % interval of the mean over the seeds. Intervals of two arms may "
            "overlap although the arms differ, because arms are compared seed by seed"
        )
    return Drawing("Accuracy against time", svg, f"{caption}.")


def time_unit(seconds: float) -> tuple[str, float]:
    """Return a suitable unit for a duration, and the length of this unit in seconds."""
    if seconds < 300:
        return "seconds", 1
    return ("minutes", 60) if seconds < 2 * 3600 else ("hours", 3600)
