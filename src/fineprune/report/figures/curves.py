"""Loss and accuracy against epochs: [P] Figure 1 for our runs."""

from fineprune.experiments.arm_table import Group
from fineprune.report.facts import listed
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.evaluations import (
    accuracy_limits,
    average_curves,
    metrics_by_arm,
    plot_curve,
)
from fineprune.report.figures.style import FAINT, arm_legend, new_figure, whole_ticks


def draw_curves(group: Group) -> Drawing | None:
    """Draw loss and accuracy against epochs, as in [P] Figure 1; None without evaluations."""
    kind, arms = group.first.evaluated_on, metrics_by_arm(group)
    losses = average_curves(arms, f"{kind}_loss", 1)
    accuracies = average_curves(arms, f"{kind}_accuracy", 100)
    if not accuracies:
        return None
    longest = max(group.runs, key=lambda run: len(run.metrics))
    training = longest.recipe.get("training", {})
    decays = training.get("schedule") == "milestones"
    milestones = list(training.get("milestones", ())) if decays else []
    with new_figure(5.4) as figure:
        panels = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
        for axes, curves in zip(panels, (losses, accuracies), strict=True):
            for arm, curve in curves.items():
                plot_curve(axes, arm, curve)
            for milestone in milestones:
                axes.axvline(milestone + 0.5, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)))
        panels[0].set_ylabel(f"{kind} loss, nats")
        panels[0].set_ylim(bottom=0)
        panels[1].set_ylabel(f"{kind} accuracy, %")
        panels[1].set_ylim(*accuracy_limits(accuracies, 0.1))
        panels[1].set_xlim(0.5, len(longest.metrics) + 0.5)
        panels[1].xaxis.set_major_locator(whole_ticks(11))
        panels[1].set_xlabel("epoch")
        arm_legend(figure, accuracies)
        svg = svg_text(figure, f"Loss and accuracy of {group.label} by epoch")
    caption = f"Loss and accuracy on the {kind} set, after each evaluated epoch."
    if len(group.runs) > len(group.arms):
        caption += " Lines are means over the seeds; bands extend from the minimum to the maximum."
    if milestones:
        plural = "s" if len(milestones) > 1 else ""
        caption += " Dotted lines: the learning rate decreases after "
        caption += f"epoch{plural} {listed(milestones)}"
        if len({run.summary.epochs for run in group.runs}) > 1:
            caption += " (earlier, in proportion, in arms with fewer epochs)"
        caption += "."
    caption += " The accuracy axis is scaled to the values after the first tenth of the training."
    return Drawing("Loss and accuracy (the paper's Figure 1)", svg, caption)
