"""Accuracy against training time, with the interval of each arm."""

from collections.abc import Mapping, Sequence

import numpy as np

from fineprune.experiments.arm_table import mean_difference
from fineprune.experiments.controls import COOLDOWN
from fineprune.report.figures.drawing import Drawing, Titles, svg_text, titled_points
from fineprune.report.figures.evaluations import Curve, Metrics, accuracy_limits, average_curves
from fineprune.report.figures.style import arm_legend, colour_of, line_of, new_figure


def draw_time(
    arms: Mapping[str, Sequence[Metrics]], kind: str, label: str, *, finished: bool = True
) -> Drawing | None:
    """Draw accuracy against training time; None if there are no evaluations.

    Args:
        arms: The metrics of the runs of each arm.
        kind: The set that the runs were evaluated on.
        label: What was run, for screen readers.
        finished: Whether the runs are finished. Only then do the arms have intervals.
    """
    curves = average_curves(arms, f"{kind}_accuracy", 100)
    if not curves:
        return None
    cooldowns = [arm for arm in curves if finished and arm.startswith(COOLDOWN)]
    for arm in cooldowns:  # Until their ends, they are parts of one training.
        curve = curves[arm]
        curves[arm] = Curve(curve.epochs[-1:], curve.seconds[-1:], curve.values[:, -1:])
    unit, length = time_unit(max(curve.seconds[-1] for curve in curves.values()))
    low, high = accuracy_limits(curves, 0.5)
    intervals = {arm: mean_difference(list(curve.values[:, -1])) for arm, curve in curves.items()}
    for interval in intervals.values():
        if finished and interval.low is not None and interval.high is not None:
            low, high = min(low, interval.low - 0.1), max(high, interval.high + 0.1)
    titles: Titles = {}
    with new_figure(3.9) as figure:
        axes = figure.subplots()
        axes.set_ylim(max(0, low), min(100.5, high))
        if cooldowns:
            ends = sorted((curves[arm].seconds[-1], curves[arm].mean[-1]) for arm in cooldowns)
            x, mean = np.array(ends).T
            axes.plot(x / length, mean, color=colour_of(COOLDOWN), linewidth=1.4)
        for arm, curve in curves.items():
            x, mean, colour = curve.seconds / length, curve.mean, colour_of(arm)
            axes.plot(x, mean, alpha=0.55, linewidth=1.1, **line_of(arm))
            texts = [
                f"{arm}, epoch {epoch}: {value:.2f} % after {_time(second)}"
                for epoch, value, second in zip(curve.epochs, mean, curve.seconds, strict=True)
            ]
            titled_points(axes, x[:-1], mean[:-1], texts[:-1], titles, visible=False)
            half_width = intervals[arm].half_width if finished else None
            if half_width is not None:
                texts[-1] += f", ± {half_width:.2f} with {len(curve.values)} seeds"
                axes.errorbar(x[-1], mean[-1], half_width, color=colour, capsize=3, linewidth=1.3)
            titled_points(axes, x[-1:], mean[-1:], texts[-1:], titles, color=colour, markersize=6)
        axes.set_xlabel(f"training time, {unit}")
        axes.set_xlim(left=0)
        axes.set_ylabel(f"{kind} accuracy, %")
        names = [arm for arm in curves if arm not in cooldowns]
        arm_legend(figure, [*names, "cooldown"] if cooldowns else names)
        svg = svg_text(figure, f"Accuracy of {label} against training time", titles)
    caption = (
        f"Accuracy on the {kind} set against the wall-clock time of the training, including "
        f"overhead and excluding evaluation. The axis fits the second half of the training. "
    )
    if not finished:
        return Drawing("Accuracy against time", svg, f"{caption}The runs are not finished.")
    if cooldowns:
        caption += (
            "The line of the cooldowns connects trainings on all data of several lengths, whose "
            "rate is constant until it falls to zero in the last fifth of their epochs. Their time "
            "is that of a training from the start, although they share most of it. "
        )
    caption += "A dot marks the end of each arm"
    if any(interval.half_width is not None for interval in intervals.values()):
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


def _time(seconds: np.float64) -> str:
    unit, length = time_unit(float(seconds))
    return f"{seconds / length:.1f} {unit}"
