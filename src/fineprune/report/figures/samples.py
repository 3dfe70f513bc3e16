"""The samples of each epoch, with the learning rate: what each arm trained."""

import numpy as np

from fineprune.experiments.arm_table import Group
from fineprune.report.figures import style
from fineprune.report.figures.style import Drawing, our_style


@our_style()
def draw_samples(group: Group) -> Drawing:
    """Draw the samples of each epoch and the learning rate."""
    metrics = {arm: [run.metrics for run in group.of(arm)] for arm in group.arms}
    columns = min(2, len(metrics))
    longest = max(run.summary.epochs for run in group.runs)
    highest = max(line["lr"] for runs in metrics.values() for line in runs[0])
    most = max(line["samples"] for runs in metrics.values() for run in runs for line in run)
    figure, panels = style.new_panels(len(metrics), columns, 0.6, 1.4, "epoch", "samples")
    for number, ((arm, runs), axes) in enumerate(zip(metrics.items(), panels, strict=True)):
        samples = np.mean([[line["samples"] for line in run] for run in runs], axis=0)
        edges = np.arange(len(samples) + 1) + 0.5
        axes.stairs(samples, edges, fill=True, color=style.colour_of(arm), alpha=0.6)
        axes.set_title(arm)
        axes.set_ylim(0, 1.05 * most)
        axes.set_xlim(0.5, longest + 0.5)
        axes.xaxis.set_major_locator(style.whole_ticks(6))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        right = axes.twinx()
        rates = [line["lr"] for line in runs[0]]
        rate = right.stairs(rates, edges, baseline=None, color=style.INK)
        rate.set_linestyle((0, (2, 1.5)))
        right.set_ylim(0, 1.05 * highest or 1)
        right.spines["right"].set_visible(True)
        axes.tick_params(labelbottom=number + columns >= len(metrics))
        if (number + 1) % columns == 0 or number == len(metrics) - 1:
            right.set_ylabel("learning rate", fontsize=8)
        else:
            right.tick_params(labelright=False)
    caption = (
        "Filled: the number of samples that each epoch trained, on the left axis, as a mean over "
        "the seeds. Dashed: the learning rate at its end, on the right axis."
    )
    return style.drawing(figure, "Samples per epoch, and the learning rate", caption)
