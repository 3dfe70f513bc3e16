"""Histograms of ``DroppingCount``, one for each window."""

import logging

import numpy as np
from matplotlib.ticker import FuncFormatter

from fineprune.errors import InputError
from fineprune.experiments.arm_table import Group
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.style import colour_of, new_panels, whole_ticks

_LOGGER = logging.getLogger(__name__)

_MOST_WINDOWS = 12


def draw_counts(group: Group) -> Drawing | None:
    """Draw a histogram of ``DroppingCount`` for each window; None if no run stored its counts.

    It is also None, with a warning, if the counts are damaged: a report needs the results only.
    """
    try:
        run, counts = next(
            ((run, counts) for run in group.runs if (counts := run.counts())), (None, {})
        )
    except InputError as error:
        _LOGGER.warning("no DroppingCount is drawn: %s", error)
        return None
    if run is None:
        return None
    ends = sorted(counts)
    shown = ends
    if len(ends) > _MOST_WINDOWS:
        places = np.linspace(0, len(ends) - 1, _MOST_WINDOWS).round().astype(int)
        shown = [ends[place] for place in places]
    top = max(int(counts[end].max(initial=0)) for end in shown)
    tallest = max(int(np.bincount(counts[end]).max()) for end in shown)
    columns = min(4, len(shown))
    with new_panels(len(shown), columns, 0.7, 1.55, "DroppingCount") as (figure, panels):
        for axes, end in zip(panels, shown, strict=True):
            numbers = np.bincount(counts[end], minlength=top + 1)
            axes.stairs(
                np.where(numbers > 0, numbers, np.nan),
                np.arange(top + 2) - 0.5,
                baseline=0.5,
                fill=True,
                color=colour_of(run.summary.arm),
            )
            axes.set_yscale("log")
            axes.set_ylim(0.5, 1.5 * tallest)  # The same for all panels, which share the axis.
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.tick_params(which="minor", left=False)
            axes.xaxis.set_major_locator(whole_ticks(5))
            axes.set_title(f"window to epoch {end}")
        figure.supylabel("samples", fontsize=9)
        svg = svg_text(figure, f"Histograms of DroppingCount, {group.label}")
    caption = (
        f"The number of training samples with each DroppingCount at the end of a window, on a "
        f"logarithmic axis. DroppingCount is the number of epochs of the window in which the "
        f"sample was trained and its loss exceeded the mean loss of its batch by more than the "
        f"tolerance. Samples with the highest counts are skipped first. The last epoch of a window "
        f"counts towards the next window. Run: {run.summary.arm}, seed {run.summary.seed}."
    )
    if len(shown) < len(ends):
        caption += f" {len(shown)} of {len(ends)} windows are shown, at regular intervals."
    return Drawing("DroppingCount in each window", svg, caption)
