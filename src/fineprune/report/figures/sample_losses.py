"""The losses of the same samples in two runs: [P] Figure 2 for our runs."""

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.experiments.arm_table import Group
from fineprune.report.figures import style
from fineprune.report.figures.style import Drawing, our_style
from fineprune.runs.history import History, read_history
from fineprune.runs.run import Run

# So many samples are compared, evenly spread over the training set.
_COMPARED = 64

# Of the samples that are drawn.
_COLOURS, _MARKERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7"), "os^D"


def draw_sample_losses(group: Group) -> Drawing | None:
    """Draw the losses of the same samples in two runs of one arm, as in [P] Figure 2.

    Up to four samples are drawn: those with the largest difference between their last losses in the
    two runs. The result is None if no arm has two runs with a whole history.
    """
    number = group.first.train_samples
    compared = np.linspace(0, number - 1, min(number, _COMPARED)).round().astype(np.int64)
    for arm in group.arms:
        runs = group.of(arm)[:2]
        try:
            histories = [read_history(run.path, number, compared) for run in runs]
        except InputError:  # It is damaged, but a report needs the results only.
            continue
        kept = [history for history in histories if history is not None]
        if len(kept) == 2:
            return _drawn(runs, kept, compared)
    return None


@our_style()
def _drawn(runs: list[Run], histories: list[History], compared: npt.NDArray[np.int64]) -> Drawing:
    """Draw some of the compared samples, shape (n,), whose histories these are."""
    last = [_last(history.losses.astype(np.float64)) for history in histories]
    by_difference = np.argsort(-np.abs(last[0] - last[1]), kind="stable")  # NaN comes last.
    chosen = np.sort(by_difference[: len(_COLOURS)])
    figure = style.new_figure(3.2)
    panels = figure.subplots(1, 2, sharey=True, sharex=True)
    for axes, run, history in zip(panels, runs, histories, strict=True):
        epochs, losses = np.array(history.epochs), history.losses.astype(np.float64)
        for column, colour, marker in zip(chosen, _COLOURS, _MARKERS, strict=False):
            trained = np.isfinite(losses[:, column])
            axes.plot(
                epochs[trained] + 1,
                losses[trained, column],
                color=colour,
                marker=marker,
                markersize=3.5,
                markevery=max(1, int(trained.sum()) // 8),
                label=f"sample {compared[column]}",
            )
        axes.set_title(f"run with seed {run.summary.seed}")
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(style.whole_ticks(6))
    panels[0].set_ylabel("loss of the sample, nats")
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlim(0, 1.02 * runs[0].summary.epochs)
    legend = panels[0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside upper center", ncols=len(_COLOURS))
    caption = (
        f"Cross-entropy of the same training samples, as they were trained, in two runs of "
        f"{runs[0].summary.arm} that differ only in their seed. They are not chosen at random: of "
        f"{len(compared)} samples, evenly spread over the training set, these {len(chosen)} have "
        f"the last losses that differ most between the two runs."
    )
    return style.drawing(figure, "The same samples in two runs (the paper's Figure 2)", caption)


def _last(losses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the last finite loss of each sample, shape (n,), of losses of shape (epochs, n).

    NaN if there is none.
    """
    backwards = np.isfinite(losses[::-1])
    last = losses[::-1][backwards.argmax(0), np.arange(losses.shape[1])]
    return np.where(backwards.any(0), last, np.nan)
