"""The evaluations of each arm, averaged over its seeds and drawn as a curve."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from fineprune.experiments.arm_table import Group
from fineprune.report.figures.style import line_of

# The metrics of a run: one dict per epoch.
Metrics = list[dict[str, Any]]


@dataclass(frozen=True)
class Curve:
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
    def mean(self) -> npt.NDArray[np.float64]:
        """The mean over the seeds."""
        return np.asarray(self.values.mean(0))


def metrics_by_arm(group: Group) -> dict[str, list[Metrics]]:
    """Return the metrics of the runs of each arm."""
    return {arm: [run.metrics for run in group.of(arm)] for arm in group.arms}


def average_curves(
    arms: Mapping[str, Sequence[Metrics]], key: str, scale: float
) -> dict[str, Curve]:
    """Average the evaluations of each arm over its seeds, in the epochs that all runs evaluated.

    Returns:
        The curve of each arm that has evaluations, by the name of the arm.
    """
    curves = {}
    for arm, runs in arms.items():
        tracks = [_track(metrics, key) for metrics in runs]
        epochs = sorted(set.intersection(*(set(track) for track in tracks)))
        if not epochs:
            continue
        values = scale * np.array([[track[epoch][0] for epoch in epochs] for track in tracks])
        seconds = np.array([[track[epoch][1] for epoch in epochs] for track in tracks])
        curves[arm] = Curve(np.array(epochs), seconds.mean(0), values)
    return curves


def _track(metrics: Metrics, key: str) -> dict[int, tuple[float, float]]:
    """Return the value and the training time so far for each evaluated epoch, counted from 1."""
    seconds = itertools.accumulate(line["seconds"] for line in metrics)
    return {
        line["epoch"] + 1: (line[key], so_far)
        for line, so_far in zip(metrics, seconds, strict=True)
        if line.get(key) is not None
    }


def plot_curve(axes: Axes, arm: str, curve: Curve) -> None:
    """Draw the mean of an arm and, if its seeds differ, a band from the minimum to the maximum."""
    line, least, most = line_of(arm), curve.values.min(0), curve.values.max(0)
    if (most > least).any():
        axes.fill_between(curve.epochs, least, most, color=line["color"], alpha=0.15, linewidth=0)
    # A line through a single point is invisible.
    marker: dict[str, Any] = {"marker": "o", "markersize": 4} if len(curve.epochs) == 1 else {}
    axes.plot(curve.epochs, curve.mean, zorder=3, **line, **marker)


def accuracy_limits(curves: dict[str, Curve], since: float) -> tuple[float, float]:
    """Return limits of the accuracy axis that fit the later epochs.

    The low accuracies of the first epochs would make the later differences invisible.

    Args:
        curves: The curves of the arms, in percent.
        since: The share of the training after which the axis must fit the values.
    """
    values = np.concatenate(
        [
            curve.values[:, curve.epochs >= since * curve.epochs[-1]].ravel()
            for curve in curves.values()
        ]
    )
    values = values[np.isfinite(values)]
    if not len(values):
        return 0, 100
    margin = max(0.06 * float(values.max() - values.min()), 0.1)
    return max(0, float(values.min()) - margin), min(100.5, float(values.max()) + margin)
