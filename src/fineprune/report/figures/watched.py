"""The losses of the same samples in two runs: [P] Figure 2 for our runs."""

from matplotlib.figure import Figure

from fineprune.experiments.arm_table import Group
from fineprune.report.figures.drawing import Drawing, svg_text
from fineprune.report.figures.style import WIDTH, our_style, whole_ticks
from fineprune.runs.run import Run

_MOST_SAMPLES = 4
_SAMPLE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_SAMPLE_MARKERS = "os^D"


def draw_watched(group: Group) -> Drawing | None:
    """Draw the losses of the same samples in two runs of one arm, as in [P] Figure 2.

    Up to four of the watched samples are drawn: those with the largest difference between their
    last losses in the two runs. The result is None if no arm has two runs that watched the same
    samples.
    """
    pair = _watched_pair(group)
    if pair is None:
        return None
    runs, tracks = pair
    last = {index: [track[index][1][-1] for track in tracks] for index in tracks[0]}
    by_difference = sorted(last, key=lambda index: (-abs(last[index][0] - last[index][1]), index))
    chosen = sorted(by_difference[:_MOST_SAMPLES])
    with our_style():
        figure = Figure((WIDTH, 3.2), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True, sharex=True)
        for axes, run, track in zip(panels, runs, tracks, strict=True):
            for index, colour, marker in zip(
                chosen, _SAMPLE_COLOURS, _SAMPLE_MARKERS, strict=False
            ):
                axes.plot(
                    *track[index],
                    color=colour,
                    marker=marker,
                    markersize=3.5,
                    markevery=max(1, len(track[index][0]) // 8),
                    label=f"sample {index}",
                )
            axes.set_title(f"run with seed {run.summary.seed}")
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(whole_ticks(6))
        panels[0].set_ylabel("loss of the sample, nats")
        panels[0].set_ylim(bottom=0)
        panels[0].set_xlim(0, 1.02 * runs[0].summary.epochs)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=_MOST_SAMPLES)
        svg = svg_text(figure, f"Losses of the same samples in two runs of {group.label}")
    caption = (
        f"Cross-entropy of the same training samples, without augmentation, in two runs of "
        f"{runs[0].summary.arm} that differ only in their seed. The samples are not a random "
        f"selection: of the {len(last)} watched samples, these {len(chosen)} have the last losses "
        f"that differ most between the two runs."
    )
    return Drawing("The same samples in two runs (the paper's Figure 2)", svg, caption)


def _watched_pair(
    group: Group,
) -> tuple[list[Run], list[dict[str, tuple[list[int], list[float]]]]] | None:
    """Return two runs of one arm, and the losses in each of the samples that both watched."""
    for arm in group.arms:
        runs = group.of(arm)[:2]
        if len(runs) < 2:
            continue
        tracks = [_watched(run) for run in runs]
        common = sorted(tracks[0].keys() & tracks[1].keys(), key=int)
        if common:
            return runs, [{index: track[index] for index in common} for track in tracks]
    return None


def _watched(run: Run) -> dict[str, tuple[list[int], list[float]]]:
    """Return the evaluated epochs, counted from 1, and the losses of each watched sample."""
    tracks: dict[str, tuple[list[int], list[float]]] = {}
    for line in run.metrics:
        for index, loss in (line.get("watched") or {}).items():
            epochs, losses = tracks.setdefault(index, ([], []))
            epochs.append(line["epoch"] + 1)
            losses.append(loss)
    return tracks
