"""Loss and accuracy against epochs: [P] Figure 1 for our runs."""

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fineprune.experiments.arm_table import Group
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.evaluations import (
    Curve,
    accuracy_limits,
    average_curves,
    evaluated_on,
    first_tenths,
    plot_curve,
)
from fineprune.report.figures.schedule import prunes_by_epoch
from fineprune.report.figures.style import (
    FAINT,
    SHADE,
    WIDTH,
    arm_legend,
    our_style,
    whole_ticks,
)
from fineprune.runs.run import Run


def draw_curves(group: Group) -> Drawing | None:
    """Draw loss and accuracy against epochs, as in [P] Figure 1; None if there are no evaluations.

    If the learning rate of every arm falls at milestones, a third panel shows the accuracy after
    the last one.
    """
    kind = evaluated_on(group)
    losses = average_curves(group, f"{kind}_loss", 1)
    accuracies = average_curves(group, f"{kind}_accuracy", 100)
    if not accuracies:
        return None
    longest = max(group.runs, key=lambda run: len(run.metrics))
    milestones = _milestones(longest)
    closing = _closing_phases(group)
    with our_style():
        figure = Figure((WIDTH, 7.4 if closing else 5.4), layout="constrained")
        panels = figure.subplots(
            3 if closing else 2, 1, height_ratios=(2, 3, 3) if closing else (2, 3)
        )
        for axes, curves in zip(panels, (losses, accuracies, accuracies), strict=False):
            for arm, curve in curves.items():
                plot_curve(axes, arm, curve.epochs, curve)
            axes.set_xlim(0.5, len(longest.metrics) + 0.5)
            axes.xaxis.set_major_locator(whole_ticks(11))
            axes.set_ylabel(f"{kind} accuracy, %")
        for axes in panels[:2]:
            _shade(axes, prunes_by_epoch(group))
            for milestone in milestones:
                axes.axvline(milestone + 0.5, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)))
        panels[0].set_ylabel(f"{kind} loss, nats")
        panels[0].set_ylim(bottom=0, top=_top(losses))
        panels[1].set_ylim(*accuracy_limits(accuracies, first_tenths(group)))
        if closing:
            panels[2].set_xlim(left=min(closing.values()))
            panels[2].set_ylim(*accuracy_limits(accuracies, closing))
            panels[2].set_title("accuracy after the last decrease of the learning rate")
        panels[-1].set_xlabel("epoch")
        arm_legend(figure, accuracies, shaded=any(prunes_by_epoch(group)))
        svg = svg_text(figure, f"Loss and accuracy of {group.label} by epoch")
    caption = f"Loss and accuracy on the {kind} set, after each evaluated epoch."
    if _seeds(group) > 1:
        caption += " Lines are means over the seeds; bands extend from the minimum to the maximum."
    if milestones:
        plural = "s" if len(milestones) > 1 else ""
        caption += " Dotted lines: the learning rate decreases after "
        caption += f"epoch{plural} {_listed(milestones)}"
        if _lengths_differ(group):
            caption += " (earlier, in proportion, in arms with fewer epochs)"
        caption += "."
    if any(prunes_by_epoch(group)):
        caption += " Shaded: epochs that skip samples."
    caption += " The accuracy axis is scaled to the values after the first tenth of the training."
    return Drawing("Loss and accuracy (the paper's Figure 1)", svg, caption)


def _shade(axes: Axes, prunes: Sequence[bool]) -> None:
    spans = []
    epoch = 0.5
    for pruned, stretch in itertools.groupby(prunes):
        length = len(list(stretch))
        if pruned:
            spans.append((epoch, length))
        epoch += length
    axes.broken_barh(
        spans, (0, 1), transform=axes.get_xaxis_transform(), facecolor=SHADE, linewidth=0, zorder=0
    )


def _top(curves: dict[str, Curve]) -> float | None:
    values = np.concatenate([curve.most for curve in curves.values()]) if curves else np.empty(0)
    values = values[np.isfinite(values)]
    return 1.05 * float(values.max()) if len(values) and values.max() > 0 else None


def _closing_phases(group: Group) -> dict[str, float]:
    """Return the first epoch after the last decrease of the learning rate for each arm.

    The result is empty if the learning rate of any arm does not fall at milestones.
    """
    falls = {arm: _milestones(group.of(arm)[0])[-1:] for arm in group.arms}
    if not all(falls.values()):
        return {}
    return {arm: fall[0] + 1.0 for arm, fall in falls.items()}


def _milestones(run: Run) -> list[int]:
    training = run.recipe.get("training", {})
    return list(training.get("milestones", ())) if training.get("schedule") == "milestones" else []


def _lengths_differ(group: Group) -> bool:
    return len({run.summary.epochs for run in group.runs}) > 1


def _seeds(group: Group) -> int:
    return max(len(group.of(arm)) for arm in group.arms)


def _listed(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last
