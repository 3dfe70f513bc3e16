"""Accuracy against time, and loss and accuracy against epochs: [P] Figure 1 for our runs."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fineprune.experiments.arm_table import Group, mean_difference
from fineprune.report.figures import style
from fineprune.report.figures.style import Drawing, our_style


@dataclass(frozen=True)
class _Curve:
    """The evaluations of an arm, as arrays with one entry per evaluated epoch.

    Attributes:
        epochs: The evaluated epochs, counted from 1.
        seconds: The training time up to each epoch in seconds, averaged over the seeds.
        values: The evaluated value of each run; shape (runs, epochs).
    """

    epochs: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    values: npt.NDArray[np.float64]

    @property
    def marker(self) -> dict[str, Any]:
        """What makes a curve visible that is a single point."""
        return {"marker": "o", "markersize": 4} if len(self.epochs) == 1 else {}


def _curves(group: Group, measure: str, scale: float = 1) -> dict[str, _Curve]:
    """Return the scaled loss or accuracy of each arm, in the epochs that all its runs evaluated."""
    curves, key = {}, f"{group.first.evaluated_on}_{measure}"
    for arm in group.arms:
        tracks = [_track(run.metrics, key) for run in group.of(arm)]
        epochs = sorted(set.intersection(*(set(track) for track in tracks)))
        if not epochs:
            continue
        values = scale * np.array([[track[epoch][0] for epoch in epochs] for track in tracks])
        seconds = np.array([[track[epoch][1] for epoch in epochs] for track in tracks])
        curves[arm] = _Curve(np.array(epochs), seconds.mean(0), values)
    return curves


def _track(metrics: list[dict[str, Any]], key: str) -> dict[int, tuple[float, float]]:
    """Return the value and the training time so far for each evaluated epoch, counted from 1."""
    seconds = itertools.accumulate(line["seconds"] for line in metrics)
    return {
        line["epoch"] + 1: (line[key], so_far)
        for line, so_far in zip(metrics, seconds, strict=True)
        if line.get(key) is not None
    }


@our_style()
def draw_time(group: Group) -> Drawing | None:
    """Draw accuracy against training time; None if there are no evaluations.

    The left panel has the whole training. The right one has its end, where arms differ by little.
    """
    curves, kind = _curves(group, "accuracy", 100), group.first.evaluated_on
    if not curves:
        return None
    unit, length = time_unit(max(curve.seconds[-1] for curve in curves.values()))
    figure = style.new_figure(3.7)
    whole, end = figure.subplots(1, 2, width_ratios=(3, 2))
    for arm, curve in curves.items():
        line, times = style.line_of(arm), curve.seconds / length
        whole.plot(times, curve.values.mean(0), **line, **curve.marker)
        last = mean_difference(list(curve.values[:, -1]))
        color = style.colour_of(arm)
        end.errorbar(times[-1], last.mean, last.half_width, color=color, fmt="o", capsize=3)
    whole.set_xlabel(f"training time, {unit}")
    whole.set_xlim(left=0)
    whole.set_ylabel(f"{kind} accuracy, %")
    end.set_xlabel(f"whole training time, {unit}")
    end.set_title("last epoch")
    end.margins(0.15)
    end.set_ylim(top=min(end.get_ylim()[1], 100.5))
    style.arm_legend(figure, curves)
    caption = (
        f"Accuracy on the {kind} set against the wall-clock time of the training, including "
        f"overhead and excluding evaluation. The right panel shows the end of each arm."
    )
    if len(group.runs) > len(group.arms):
        caption += (
            " The 95 % intervals of the means over the seeds may overlap although arms differ, "
            "because these are compared seed by seed."
        )
    return style.drawing(figure, "Accuracy against time", caption)


@our_style()
def draw_curves(group: Group) -> Drawing | None:
    """Draw loss and accuracy against epochs, as in [P] Figure 1; None without evaluations."""
    kind = group.first.evaluated_on
    losses, accuracies = _curves(group, "loss"), _curves(group, "accuracy", 100)
    if not accuracies:
        return None
    figure = style.new_figure(5.4)
    panels = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    for axes, curves in zip(panels, (losses, accuracies), strict=True):
        for arm, curve in curves.items():
            line, least, most = style.line_of(arm), curve.values.min(0), curve.values.max(0)
            axes.plot(curve.epochs, curve.values.mean(0), zorder=3, **line, **curve.marker)
            if (most > least).any():
                band = {"color": line["color"], "alpha": 0.15, "linewidth": 0}
                axes.fill_between(curve.epochs, least, most, **band)
    panels[0].set_ylabel(f"{kind} loss, nats")
    panels[0].set_ylim(bottom=0)
    panels[1].set_ylabel(f"{kind} accuracy, %")
    panels[1].set_xlim(0.5, max(run.summary.epochs for run in group.runs) + 0.5)
    panels[1].xaxis.set_major_locator(style.whole_ticks(11))
    panels[1].set_xlabel("epoch")
    style.arm_legend(figure, accuracies)
    caption = f"Loss and accuracy on the {kind} set, after each evaluated epoch."
    if len(group.runs) > len(group.arms):
        caption += " Lines are means over the seeds; bands extend from the minimum to the maximum."
    return style.drawing(figure, "Loss and accuracy (the paper's Figure 1)", caption)


def time_unit(seconds: float) -> tuple[str, float]:
    """Return a suitable unit for a duration, and the length of this unit in seconds."""
    if seconds < 300:
        return "seconds", 1
    return ("minutes", 60) if seconds < 2 * 3600 else ("hours", 3600)
