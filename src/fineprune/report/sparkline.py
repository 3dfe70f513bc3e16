"""A sparkline: the loss of one sample over the epochs, as the path of a small SVG."""

import itertools

import numpy as np
import numpy.typing as npt

from fineprune.labels.review_page import LINE_HEIGHT, LINE_WIDTH

# A page shows thousands of sparklines, so their paths have few points and short, whole numbers.
_POINTS = 20


def sparkline(losses: npt.NDArray[np.floating], top: float) -> str:
    """Return the path of the losses of one sample, inside the units of ``Card.line``.

    The line has a gap where no epoch trained the sample. With more than 20 epochs, each point is
    the mean over several consecutive epochs.

    Args:
        losses: The loss in each epoch, floating point, shape (epochs,); NaN if the epoch did not
            train the sample.
        top: The loss at the upper edge, above 0. Larger losses, and infinite ones, are drawn there.

    Returns:
        The value of the attribute ``d``; empty if no epoch trained the sample.
    """
    values = np.minimum(losses.astype(np.float64), top)
    parts = [part[~np.isnan(part)] for part in np.array_split(values, min(_POINTS, len(values)))]
    step = LINE_WIDTH / max(len(parts) - 1, 1)
    points = [
        (round(number * step), round(LINE_HEIGHT * (1 - max(part.mean(), 0) / top)))
        if len(part)
        else None
        for number, part in enumerate(parts)
    ]
    lines = itertools.groupby(points, lambda point: point is not None)
    return "".join(_line([point for point in line if point]) for drawn, line in lines if drawn)


def _line(points: list[tuple[int, int]]) -> str:
    (x, y), *others = points
    if not others:
        return f"M{x - 1} {y}h2"
    steps = " ".join(f"{across} {down}" for across, down in np.diff(points, axis=0))
    return f"M{x} {y}l{steps}".replace(" -", "-")
