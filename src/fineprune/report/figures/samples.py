"""The samples of each epoch, with the learning rate: what each arm trained."""

from collections.abc import Mapping, Sequence

import numpy as np

from fineprune.report.figures.drawing import Drawing, Titles, svg_text, titled_points
from fineprune.report.figures.evaluations import Metrics
from fineprune.report.figures.style import INK, colour_of, new_panels, whole_ticks


def draw_samples(arms: Mapping[str, Sequence[Metrics]], label: str) -> Drawing | None:
    """Draw the samples of each epoch and the learning rate; None if no epoch was trained."""
    trained = {arm: [run for run in runs if run] for arm, runs in arms.items()}
    trained = {arm: runs for arm, runs in trained.items() if runs}
    if not trained:
        return None
    columns = min(2, len(trained))
    longest = max(len(run) for runs in trained.values() for run in runs)
    rates = [line["lr"] for runs in trained.values() for line in runs[0]]
    most = max(line["samples"] for runs in trained.values() for run in runs for line in run)
    titles: Titles = {}
    with new_panels(len(trained), columns, 0.6, 1.4, "epoch") as (figure, panels):
        for number, ((arm, runs), axes) in enumerate(zip(trained.items(), panels, strict=True)):
            epochs = np.arange(1, min(map(len, runs)) + 1)
            samples = np.array(
                [[line["samples"] for line in run[: len(epochs)]] for run in runs]
            ).mean(0)
            lr = [line["lr"] for line in runs[0][: len(epochs)]]
            edges = np.arange(len(epochs) + 1) + 0.5
            axes.stairs(samples, edges, fill=True, color=colour_of(arm), alpha=0.6)
            texts = [
                f"{arm}, epoch {epoch}: {count:,.0f} samples, learning rate {rate:.4g}"
                for epoch, count, rate in zip(epochs, samples, lr, strict=True)
            ]
            titled_points(axes, epochs, samples, texts, titles, visible=False)
            axes.set_title(arm)
            axes.set_ylim(0, 1.05 * most)
            axes.set_xlim(0.5, longest + 0.5)
            axes.xaxis.set_major_locator(whole_ticks(6))
            axes.yaxis.set_major_formatter("{x:,.0f}")
            right = axes.twinx()
            rate_line = right.stairs(lr, edges, baseline=None, color=INK)
            rate_line.set_linestyle((0, (2, 1.5)))
            right.set_ylim(0, 1.05 * max(rates) or 1)
            right.spines["right"].set_visible(True)
            axes.tick_params(labelbottom=number + columns >= len(trained))
            if (number + 1) % columns == 0 or number == len(trained) - 1:
                right.set_ylabel("learning rate", fontsize=8)
            else:
                right.tick_params(labelright=False)
        figure.supylabel("samples", fontsize=9)
        svg = svg_text(figure, f"Samples per epoch and learning rate of {label}", titles)
    caption = (
        "Filled: the number of samples that each epoch trained, on the left axis. Dashed: the "
        "learning rate at its end, on the right axis."
    )
    if any(len(runs) > 1 for runs in trained.values()):
        caption += " Numbers of samples are means over the seeds."
    return Drawing("Samples per epoch, and the learning rate", svg, caption)
