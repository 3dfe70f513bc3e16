"""Training loss against time, with one line per configuration: [D] Figure 3."""

from collections import Counter
from collections.abc import Sequence

from matplotlib.figure import Figure

from fineprune.experiments.scale_table import Scaled, loss_curve
from fineprune.report.figures.accuracy_over_time import time_unit
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.style import FAINT, WIDTH, our_style
from fineprune.report.scaling.colours import COLOURS, DASHES


def draw_loss(runs: Sequence[Scaled], target_loss: float | None) -> Drawing | None:
    """Draw the mean training loss of each epoch on all data against the training time.

    The result is None if no configuration has an epoch on all data.

    Args:
        runs: The configurations and their runs.
        target_loss: The loss to mark with a dotted line; None for no line.
    """
    curves = [(scaled.configuration, *loss_curve(scaled.run)) for scaled in runs]
    curves = [curve for curve in curves if curve[1]]
    if not curves:
        return None
    unit, length = time_unit(max(seconds[-1] for _, seconds, _ in curves))
    drawn: Counter[str] = Counter()
    with our_style():
        figure = Figure((WIDTH, 3.6), layout="constrained")
        axes = figure.subplots()
        for configuration, seconds, losses in curves:
            dash = DASHES[drawn[configuration.strategy] % len(DASHES)]
            drawn[configuration.strategy] += 1
            axes.plot(
                [second / length for second in seconds],
                losses,
                color=COLOURS[configuration.strategy],
                linestyle=dash,
                label=configuration.text,
            )
        if target_loss is not None:
            axes.axhline(target_loss, color=FAINT, linewidth=0.8, linestyle=":")
        axes.set_xlabel(f"training time, {unit}")
        axes.set_xlim(left=0)
        axes.set_ylabel("mean training loss of an epoch")
        figure.legend(loc="outside upper center", ncols=4)
        svg = svg_text(figure, "Training loss against time")
    caption = (
        "Mean training loss of each epoch on all data, at the end of the epoch. The time excludes "
        "evaluation. The dotted line is the target loss of the table."
    )
    return Drawing("Training loss against time (the paper's Figure 3)", svg, caption)
