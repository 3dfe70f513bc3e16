"""Accuracy against training time."""

from matplotlib.figure import Figure

from fineprune.experiments.arm_table import Group
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.evaluations import (
    accuracy_limits,
    average_curves,
    evaluated_on,
    first_tenths,
    plot_curve,
)
from fineprune.report.figures.style import WIDTH, arm_legend, colour_of, our_style


def draw_time(group: Group) -> Drawing | None:
    """Draw accuracy against training time; None if there are no evaluations."""
    kind = evaluated_on(group)
    curves = average_curves(group, f"{kind}_accuracy", 100)
    if not curves:
        return None
    unit, length = time_unit(max(curve.seconds[-1] for curve in curves.values()))
    with our_style():
        figure = Figure((WIDTH, 3.4), layout="constrained")
        axes = figure.subplots()
        for arm, curve in curves.items():
            plot_curve(axes, arm, curve.seconds / length, curve)
            axes.plot(
                curve.seconds[-1] / length,
                curve.mean[-1],
                marker="o",
                markersize=4,
                color=colour_of(arm),
                zorder=4,
            )
        axes.set_xlabel(f"training time, {unit}")
        axes.set_xlim(left=0)
        axes.set_ylabel(f"{kind} accuracy, %")
        axes.set_ylim(*accuracy_limits(curves, first_tenths(group)))
        arm_legend(figure, curves)
        svg = svg_text(figure, f"Accuracy of {group.label} against training time")
    caption = (
        f"Accuracy on the {kind} set against the wall-clock time of the training, including "
        f"overhead and excluding evaluation. A dot marks the end of each arm."
    )
    return Drawing("Accuracy against time", svg, caption)


def time_unit(seconds: float) -> tuple[str, float]:
    """Return a suitable unit for a duration, and the length of this unit in seconds."""
    if seconds < 300:
        return "seconds", 1
    return ("minutes", 60) if seconds < 2 * 3600 else ("hours", 3600)
