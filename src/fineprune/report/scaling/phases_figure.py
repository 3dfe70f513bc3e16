"""Where the time of a step goes: what the second paper left as future work."""

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
    """Draw the workers' time by phase, and the servers'; None where no run had servers."""
    served = [row for row in rows if row.phases]
    if not served:
        return None
    places = range(len(served))
    with our_style():
        figure = Figure((WIDTH, 1.1 + 0.3 * len(served)), layout="constrained")
        of_workers, of_servers = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
        for axes, phases, title in (
            (of_workers, WORKER_PHASES, "workers"),
            (of_servers, SERVER_PHASES, "servers"),
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
            axes.set_xlabel("ms a gradient")
        of_workers.set_yticks(places, [row.configuration for row in served])
        of_workers.invert_yaxis()
        figure.legend(loc="outside upper center", ncols=9)
        svg = svg_text(figure, "Where the time of a step goes")
    caption = (
        "Seconds of all processes, by gradient that was applied. Wait is a worker between two "
        "orders; what the servers do lies within the workers' pull and wait."
    )
    return Drawing("Where a step's time goes", svg, caption)
