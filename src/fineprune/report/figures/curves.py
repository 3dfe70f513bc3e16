"""Loss and accuracy against epochs: [P] Figure 1 for our runs."""

from fineprune.experiments.arm_table import Group
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.evaluations import average_curves
from fineprune.report.figures.style import arm_legend, line_of, new_figure, whole_ticks


def draw_curves(group: Group) -> Drawing | None:
    """Draw loss and accuracy against epochs, as in [P] Figure 1; None without evaluations."""
    kind = group.first.evaluated_on
    losses, accuracies = average_curves(group, "loss"), average_curves(group, "accuracy", 100)
    if not accuracies:
        return None
    with new_figure(5.4) as figure:
        panels = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
        for axes, curves in zip(panels, (losses, accuracies), strict=True):
            for arm, curve in curves.items():
                line, least, most = line_of(arm), curve.values.min(0), curve.values.max(0)
                axes.plot(curve.epochs, curve.mean, zorder=3, **line, **curve.marker)
                if (most > least).any():
                    band = {"color": line["color"], "alpha": 0.15, "linewidth": 0}
                    axes.fill_between(curve.epochs, least, most, **band)
        panels[0].set_ylabel(f"{kind} loss, nats")
        panels[0].set_ylim(bottom=0)
        panels[1].set_ylabel(f"{kind} accuracy, %")
        panels[1].set_xlim(0.5, max(run.summary.epochs for run in group.runs) + 0.5)
        panels[1].xaxis.set_major_locator(whole_ticks(11))
        panels[1].set_xlabel("epoch")
        arm_legend(figure, accuracies)
        svg = svg_text(figure, f"Loss and accuracy of {group.label} by epoch")
    caption = f"Loss and accuracy on the {kind} set, after each evaluated epoch."
    if len(group.runs) > len(group.arms):
        caption += " Lines are means over the seeds; bands extend from the minimum to the maximum."
    return Drawing("Loss and accuracy (the paper's Figure 1)", svg, caption)
