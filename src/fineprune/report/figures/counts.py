"""Histograms of ``DroppingCount``, one for each window."""

import logging

import numpy as np
from matplotlib.ticker import FuncFormatter

from fineprune.errors import InputError
from fineprune.experiments.arm_table import Group
from fineprune.report.figures import style
from fineprune.report.figures.style import Drawing, our_style

_LOGGER = logging.getLogger(__name__)

_MOST_WINDOWS = 12


@our_style()
def draw_counts(group: Group) -> Drawing | None:
    """Draw a histogram of ``DroppingCount`` for each window; None if no run stored its counts.

    It is also None, with a warning, if the counts are damaged: a report needs the results only.
    """
    try:
        found = ((run, counts) for run in group.runs if (counts := run.counts()))
        run, counts = next(found, (None, {}))
    except InputError as error:
        _LOGGER.warning("no DroppingCount is drawn: %s", error)
        return None
    if run is None:
        return None
    ends = sorted(counts)
    places = np.linspace(0, len(ends) - 1, min(len(ends), _MOST_WINDOWS)).round().astype(int)
    shown = [ends[place] for place in places]
    top = max(int(counts[end].max(initial=0)) for end in shown)
    tallest = max(int(np.bincount(counts[end]).max()) for end in shown)
    figure, panels = style.new_panels(
        len(shown), min(4, len(shown)), 0.7, 1.55, "DroppingCount", "samples"
    )
    for axes, end in zip(panels, shown, strict=True):
        numbers = np.bincount(counts[end], minlength=top + 1)
        axes.stairs(
            np.where(numbers > 0, numbers, np.nan),
            np.arange(top + 2) - 0.5,
            baseline=0.5,
            fill=True,
            color=style.colour_of(run.summary.arm),
        )
        axes.set_yscale("log")
        axes.set_ylim(0.5, 1.5 * tallest)  # The same for all panels, which share the axis.
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.tick_params(which="minor", left=False)
        axes.xaxis.set_major_locator(style.whole_ticks(5))
        axes.set_title(f"window to epoch {end}")
    caption = (
        f"The number of training samples with each DroppingCount at the end of a window: in how "
        f"many of its epochs the loss of the sample exceeded the mean of its batch. Samples with "
        f"the highest counts are skipped first. Run: {run.summary.arm}, seed {run.summary.seed}."
    )
    if len(shown) < len(ends):
        caption += f" {len(shown)} of {len(ends)} windows are shown, at regular intervals."
    return style.drawing(figure, "DroppingCount in each window", caption)
