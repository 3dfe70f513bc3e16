"""The time of each phase of a step, which [D] leaves as future work."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from fineprune.experiments.scale_table import SERVER_PHASES, WORKER_PHASES, ScaleRow
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.style import WIDTH, our_style

_COLOURS = {
    "data": "#999999",
    "compute": "#333333",
    "group reduce": "#cc79a7",
    "push": "#d55e00",
    "pull": "#0072b2",
    "wait": "#e0e0e0",
    "queue": "#f0e442",
    "apply": "#009e73",
    "send": "#56b4e9",
}


def draw_phases(rows: Sequence[ScaleRow]) -> Drawing | None:
    """Draw the time of each phase of workers and servers; None if no run had servers."""
    served = [row for row in rows if row.phases]
    if not served:
        return None
    places = range(len(served))
    with our_style():
        figure = Figure((WIDTH, 1.1 + 0.3 * len(served)), layout="constrained")
        worker_axes, server_axes = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
        for axes, phases, title in (
            (worker_axes, WORKER_PHASES, "workers"),
            (server_axes, SERVER_PHASES, "servers"),
        ):
            ends = [0.0] * len(served)
            for phase in phases:
                widths = [1e3 * row.phases.get(phase, 0.0) for row in served]
                if not any(widths):
                    continue
                axes.barh(
                    places, widths, left=ends, height=0.66, color=_COLOURS[phase], label=phase
                )
                ends = [end + width for end, width in zip(ends, widths, strict=True)]
            axes.set_title(title)
            axes.set_xlabel("ms per gradient")
        worker_axes.set_yticks(places, [row.configuration for row in served])
        worker_axes.invert_yaxis()
        figure.legend(loc="outside upper center", ncols=9)
        svg = svg_text(figure, "Time of each phase of a step")
    caption = (
        "Time per applied gradient, summed over all processes. In the phase “wait”, a worker waits "
        "for its next instruction. The phases of the servers take place during the phases “pull” "
        "and “wait” of the workers."
    )
    return Drawing("Time of each phase of a step", svg, caption)
