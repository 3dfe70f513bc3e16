"""The evaluations of each arm, averaged over its seeds."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fineprune.experiments.arm_table import Group


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

    @property
    def marker(self) -> dict[str, Any]:
        """What makes a curve visible that is a single point."""
        return {"marker": "o", "markersize": 4} if len(self.epochs) == 1 else {}


def average_curves(group: Group, measure: str, scale: float = 1) -> dict[str, Curve]:
    """Average the evaluations of each arm over its seeds, in the epochs that all runs evaluated.

    Args:
        group: The runs.
        measure: ``loss`` or ``accuracy`` of the set that they were evaluated on.
        scale: What the values are multiplied with.

    Returns:
        The curve of each arm that has evaluations, by the name of the arm.
    """
    curves, key = {}, f"{group.first.evaluated_on}_{measure}"
    for arm in group.arms:
        tracks = [_track(run.metrics, key) for run in group.of(arm)]
        epochs = sorted(set.intersection(*(set(track) for track in tracks)))
        if not epochs:
            continue
        values = scale * np.array([[track[epoch][0] for epoch in epochs] for track in tracks])
        seconds = np.array([[track[epoch][1] for epoch in epochs] for track in tracks])
        curves[arm] = Curve(np.array(epochs), seconds.mean(0), values)
    return curves


def _track(metrics: list[dict[str, Any]], key: str) -> dict[int, tuple[float, float]]:
    """Return the value and the training time so far for each evaluated epoch, counted from 1."""
    seconds = itertools.accumulate(line["seconds"] for line in metrics)
    return {
        line["epoch"] + 1: (line[key], so_far)
        for line, so_far in zip(metrics, seconds, strict=True)
        if line.get(key) is not None
    }
