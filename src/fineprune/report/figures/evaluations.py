"""The evaluations of each arm, averaged over its seeds and drawn as a curve."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from fineprune.experiments.arm_table import Group
from fineprune.report.figures.style import colour_of, dash_of
from fineprune.runs.run import Run


@dataclass(frozen=True)
class Curve:
    """The evaluations of an arm, as arrays with one entry per evaluated epoch.

    Attributes:
        epochs: The evaluated epochs, counted from 1.
        seconds: The training time up to each epoch in seconds, averaged over the seeds.
        mean: The mean of the evaluated value over the seeds.
        least: The minimum of the evaluated value over the seeds.
        most: The maximum of the evaluated value over the seeds.
    """

    epochs: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    least: npt.NDArray[np.float64]
    most: npt.NDArray[np.float64]


def evaluated_on(group: Group) -> str:
    """Return the name of the set that the group's runs were evaluated on."""
    return str(group.runs[0].summary.evaluated_on)


def average_curves(group: Group, key: str, scale: float) -> dict[str, Curve]:
    """Average the evaluations of each arm over its seeds, in the epochs that all runs evaluated.

    Args:
        group: The runs.
        key: The name of the value in the metrics.
        scale: The factor to multiply the values by.

    Returns:
        The curve of each arm that has evaluations, by the name of the arm.
    """
    curves = {}
    for arm in group.arms:
        tracks = [_track(run, key) for run in group.of(arm)]
        epochs = sorted(set.intersection(*(set(track) for track in tracks)))
        if not epochs:
            continue
        values = scale * np.array([[track[epoch][0] for epoch in epochs] for track in tracks])
        seconds = np.array([[track[epoch][1] for epoch in epochs] for track in tracks])
        curves[arm] = Curve(
            np.array(epochs),
            seconds.mean(0),
            values.mean(0),
            values.min(0),
            values.max(0),
        )
    return curves


def _track(run: Run, key: str) -> dict[int, tuple[float, float]]:
    """Return the value and the training time so far for each evaluated epoch, counted from 1."""
    seconds = itertools.accumulate(line["seconds"] for line in run.metrics)
    return {
        line["epoch"] + 1: (line[key], so_far)
        for line, so_far in zip(run.metrics, seconds, strict=True)
        if line.get(key) is not None
    }


def plot_curve(axes: Axes, arm: str, x: npt.NDArray[Any], curve: Curve) -> None:
    """Draw the mean of an arm and, if its seeds differ, a band from the minimum to the maximum."""
    colour = colour_of(arm)
    if (curve.most > curve.least).any():
        axes.fill_between(x, curve.least, curve.most, color=colour, alpha=0.15, linewidth=0)
    # A line through a single point is invisible.
    marker: dict[str, Any] = {"marker": "o", "markersize": 4} if len(x) == 1 else {}
    axes.plot(x, curve.mean, color=colour, linestyle=dash_of(arm), zorder=3, **marker)


def accuracy_limits(curves: dict[str, Curve], since: dict[str, float]) -> tuple[float, float]:
    """Return limits of the accuracy axis that fit the later epochs.

    The low accuracies of the first epochs would make the later differences invisible.

    Args:
        curves: The curves of the arms, in percent.
        since: The first epoch that the axis must fit, for each arm.
    """
    values = np.concatenate(
        [
            bound[curve.epochs >= min(since[arm], curve.epochs[-1])]
            for arm, curve in curves.items()
            for bound in (curve.least, curve.most)
        ]
    )
    values = values[np.isfinite(values)]
    if not len(values):
        return 0, 100
    margin = max(0.06 * float(values.max() - values.min()), 0.1)
    return max(0, float(values.min()) - margin), min(100.5, float(values.max()) + margin)


def first_tenths(group: Group) -> dict[str, float]:
    """Return the end of the first tenth of the training for each arm, in epochs."""
    return {arm: group.of(arm)[0].summary.epochs / 10 for arm in group.arms}
