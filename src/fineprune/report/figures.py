"""Figures as SVG: the paper's Figures 1 to 3 of our runs, counts, and accuracy against time.

Every figure is drawn through matplotlib's objects, without pyplot and without changing its global
settings, and is the same to the byte for the same runs. Text stays text. An arm has one colour
everywhere, from palettes that colour-blind readers can tell apart, and a dash of its own for print.
"""

import contextlib
import hashlib
import html
import io
import itertools
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fineprune.experiments.statistics import Group
from fineprune.training.recipe import make_recipe
from fineprune.training.run_log import Run

# Okabe and Ito's palette, safe for colour-blind readers.
_COLOURS = {
    "full": "#333333",
    "fine-pruning": "#d55e00",
    "random": "#0072b2",
    "fewer-epochs": "#009e73",
}
_OTHER_COLOURS = ("#cc79a7", "#e69f00", "#56b4e9")
_DASHES: dict[str, Any] = {
    "random": (0, (4, 1.5)),
    "fewer-epochs": (0, (6, 1.5, 1.5, 1.5)),
}
_SAMPLE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_SAMPLE_MARKERS = "os^D"

_FULL_CELL, _PRUNED_CELL = "#e3e3e3", "#f0a45d"
_SHADE = "#fbefe4"
_INK, _FAINT = "#333333", "#999999"

_WIDTH = 7.2  # inches
_EPOCHS_A_ROW = 20
_MOST_WINDOWS = 12
_MOST_SAMPLES = 4

_STYLE: Any = {  # in newer matplotlib the keys are typed one by one
    "svg.fonttype": "none",
    "svg.hashsalt": "fineprune",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.4,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Drawing:
    """A figure of the report.

    Attributes:
        title: what it shows, in a few words.
        svg: one ``<svg>`` element, well-formed XML that stands alone or in a page.
        caption: how to read it.
    """

    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class _Curve:
    """An arm's evaluations: mean, least and most over its seeds, and the mean seconds so far."""

    epochs: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    least: npt.NDArray[np.float64]
    most: npt.NDArray[np.float64]


def draw_all(group: Group) -> list[Drawing]:
    """Draw every figure that the group's runs have the data for, in the order of the report."""
    drawings = (
        draw_curves(group),
        draw_time(group),
        draw_watched(group),
        draw_schedule(group),
        draw_counts(group),
    )
    return [drawing for drawing in drawings if drawing is not None]


def draw_curves(group: Group) -> Drawing | None:
    """Draw loss and accuracy by epoch, as in the paper's Figure 1; None without evaluations."""
    kind = _evaluated_on(group)
    losses = _curves(group, f"{kind}_loss", 1)
    accuracies = _curves(group, f"{kind}_accuracy", 100)
    if not accuracies:
        return None
    longest = max(group.runs, key=lambda run: len(run.metrics))
    milestones = _milestones(longest)
    closing = _closing_phases(group)
    with _style():
        figure = Figure((_WIDTH, 7.4 if closing else 5.4), layout="constrained")
        panels = figure.subplots(
            3 if closing else 2, 1, height_ratios=(2, 3, 3) if closing else (2, 3)
        )
        for axes, curves in zip(panels, (losses, accuracies, accuracies), strict=False):
            for arm, curve in curves.items():
                _plot(axes, arm, curve.epochs, curve)
            axes.set_xlim(0.5, len(longest.metrics) + 0.5)
            axes.xaxis.set_major_locator(_whole_ticks(11))
            axes.set_ylabel(f"{kind} accuracy, %")
        for axes in panels[:2]:
            _shade(axes, _prunes(group))
            for milestone in milestones:
                axes.axvline(milestone + 0.5, color=_FAINT, linewidth=0.8, linestyle=(0, (1, 2)))
        panels[0].set_ylabel(f"{kind} loss, nats")
        panels[0].set_ylim(bottom=0, top=_top(losses))
        panels[1].set_ylim(*_accuracy_limits(accuracies, _tenths(group)))
        if closing:
            panels[2].set_xlim(left=min(closing.values()))
            panels[2].set_ylim(*_accuracy_limits(accuracies, closing))
            panels[2].set_title("the same, after the last fall of the rate")
        panels[-1].set_xlabel("epoch")
        _legend(figure, accuracies, shaded=any(_prunes(group)))
        svg = _svg(figure, f"Loss and accuracy of {group.label} by epoch")
    caption = f"Loss and accuracy on the {kind} set, in the epochs that were evaluated."
    if _seeds(group) > 1:
        caption += " Lines are means over the seeds, bands reach from the least to the most."
    if milestones:
        named = _listed(milestones)
        caption += f" Dotted: the learning rate falls, after epoch{_s(milestones)} {named}"
        caption += " (in proportion where an arm is shorter)." if _shorter(group) else "."
    if any(_prunes(group)):
        caption += " Shaded: epochs that skip samples."
    caption += " The accuracy's axis fits what follows the first tenth of the training."
    return Drawing("Loss and accuracy (the paper's Figure 1)", svg, caption)


def draw_time(group: Group) -> Drawing | None:
    """Draw accuracy against the seconds of training so far; None without evaluations."""
    kind = _evaluated_on(group)
    curves = _curves(group, f"{kind}_accuracy", 100)
    if not curves:
        return None
    unit, length = _time_unit(max(curve.seconds[-1] for curve in curves.values()))
    with _style():
        figure = Figure((_WIDTH, 3.4), layout="constrained")
        axes = figure.subplots()
        for arm, curve in curves.items():
            _plot(axes, arm, curve.seconds / length, curve)
            axes.plot(
                curve.seconds[-1] / length,
                curve.mean[-1],
                marker="o",
                markersize=4,
                color=_colour(arm),
                zorder=4,
            )
        axes.set_xlabel(f"training time, {unit}")
        axes.set_xlim(left=0)
        axes.set_ylabel(f"{kind} accuracy, %")
        axes.set_ylim(*_accuracy_limits(curves, _tenths(group)))
        _legend(figure, curves)
        svg = _svg(figure, f"Accuracy of {group.label} against training time")
    caption = (
        f"Accuracy on the {kind} set against the wall-clock time of the training so far, overhead "
        f"inside, evaluation apart. A dot ends each arm."
    )
    return Drawing("Accuracy against time", svg, caption)


def draw_watched(group: Group) -> Drawing | None:
    """Draw the same samples' losses in two runs of one arm, as in the paper's Figure 2.

    Of the watched samples these are the up to four whose last losses differ the most between the
    runs. None where no arm has two runs that watched the same samples.
    """
    pair = _watched_pair(group)
    if pair is None:
        return None
    runs, tracks = pair
    last = {index: [track[index][1][-1] for track in tracks] for index in tracks[0]}
    apart = sorted(last, key=lambda index: (-abs(last[index][0] - last[index][1]), index))
    chosen = sorted(apart[:_MOST_SAMPLES])
    with _style():
        figure = Figure((_WIDTH, 3.2), layout="constrained")
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
            axes.set_title(f"run with seed {run.summary['seed']}")
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(_whole_ticks(6))
        panels[0].set_ylabel("loss of the sample, nats")
        panels[0].set_ylim(bottom=0)
        panels[0].set_xlim(0, 1.02 * runs[0].summary["epochs"])
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=_MOST_SAMPLES)
        svg = _svg(figure, f"Losses of the same samples in two runs of {group.label}")
    caption = (
        f"Cross-entropy of the same training samples in two runs of {runs[0].summary['arm']} that "
        f"differ in their seed only, without augmentation. They were not drawn at random: of the "
        f"{len(last)} watched samples, these {len(chosen)} have the last losses that differ the "
        f"most between the two runs."
    )
    return Drawing("The same samples in two runs (the paper's Figure 2)", svg, caption)


def draw_schedule(group: Group) -> Drawing | None:
    """Draw the schedule of the group's first run that prunes; None where none does."""
    run = _first_pruned(group)
    if run is None:
        return None
    prunes = [bool(line["pruned"]) for line in run.metrics]
    svg = _schedule_svg(prunes, _boundaries(run), f"Schedule of {group.label}")
    caption = (
        f"Each cell is an epoch. {sum(prunes)} of {len(prunes)} skip samples, the others train on "
        f"all. Behind a thick line the counts start again from zero."
    )
    return Drawing("The schedule (the paper's Figure 3)", svg, caption)


def draw_counts(group: Group) -> Drawing | None:
    """Draw a histogram of DroppingCount for each window; None where no run kept counts."""
    run, counts = next(
        ((run, counts) for run in group.runs if (counts := run.counts())), (None, {})
    )
    if run is None:
        return None
    ends = sorted(counts)
    counted = _counted_epochs(run, ends)
    shown = ends
    if len(ends) > _MOST_WINDOWS:
        places = np.linspace(0, len(ends) - 1, _MOST_WINDOWS).round().astype(int)
        shown = [ends[place] for place in places]
    top = max(int(counts[end].max(initial=0)) for end in shown)
    columns = min(4, len(shown))
    rows = math.ceil(len(shown) / columns)
    with _style():
        figure = Figure((_WIDTH, 0.7 + 1.55 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes in panels.flat[len(shown) :]:
            axes.set_visible(False)
        for axes, end in zip(panels.flat, shown, strict=False):
            numbers = np.bincount(counts[end], minlength=top + 1)
            axes.stairs(
                np.where(numbers > 0, numbers, np.nan),
                np.arange(top + 2) - 0.5,
                baseline=0.5,
                fill=True,
                color=_colour(run.summary["arm"]),
            )
            axes.set_yscale("log")
            axes.set_ylim(bottom=0.5)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.tick_params(which="minor", left=False)
            axes.xaxis.set_major_locator(_whole_ticks(5))
            axes.set_title(counted[end])
        figure.supxlabel("DroppingCount", fontsize=9)
        figure.supylabel("samples", fontsize=9)
        svg = _svg(figure, f"Histograms of DroppingCount, {group.label}")
    caption = (
        f"How many training samples have each DroppingCount at the end of a window: the number of "
        f"its epochs in which the sample was trained and its loss lay above its batch's mean (and "
        f"the tolerance). The highest are skipped first. An epoch that ends a window counts in the "
        f"next one. Run: {run.summary['arm']}, seed {run.summary['seed']}; the number of "
        f"samples is on a logarithmic axis."
    )
    if len(shown) < len(ends):
        caption += f" {len(shown)} of {len(ends)} windows are shown, evenly spread."
    return Drawing("What was counted, window by window", svg, caption)


def schedule_svg(prunes: Sequence[bool], boundaries: Sequence[int] = ()) -> str:
    """Draw a schedule as rows of numbered epochs, as in the paper's Figure 3.

    Args:
        prunes: for each epoch, whether it skips samples.
        boundaries: epochs, from 1, at whose end the counts are cleared.

    Returns:
        One ``<svg>`` element.

    Raises:
        ValueError: there is no epoch.
    """
    if not prunes:
        raise ValueError("expected a schedule of at least one epoch, got none")
    return _schedule_svg(prunes, boundaries, "Schedule")


def _schedule_svg(prunes: Sequence[bool], boundaries: Sequence[int], label: str) -> str:
    columns = min(_EPOCHS_A_ROW, len(prunes))
    rows = math.ceil(len(prunes) / columns)
    gap, legend = 1.25, 0.9  # heights of a row and of the legend, in cells
    cell = _WIDTH / (_EPOCHS_A_ROW + 0.4)  # inches
    with _style():
        figure = Figure((_WIDTH, cell * (rows * gap + legend)))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(-0.2, _EPOCHS_A_ROW + 0.2)
        axes.set_ylim(rows * gap, -legend)
        axes.set_axis_off()
        places = [
            (epoch % columns, epoch // columns * gap, bool(prunes[epoch]))
            for epoch in range(len(prunes))
        ]
        for pruned, colour in ((False, _FULL_CELL), (True, _PRUNED_CELL)):
            cells = [
                Rectangle((x + 0.03, y), 0.94, 1)
                for x, y, is_pruned in places
                if is_pruned is pruned
            ]
            axes.add_collection(PatchCollection(cells, facecolor=colour, edgecolor="none"))
        for number, (x, y, _) in enumerate(places, start=1):
            axes.text(x + 0.5, y + 0.52, str(number), ha="center", va="center", fontsize=8)
        for boundary in boundaries:
            x, y, _ = places[boundary - 1]
            axes.plot([x + 1, x + 1], [y - 0.1, y + 1.1], color=_INK, linewidth=2.2)
        key: list[Any] = [
            Patch(facecolor=_FULL_CELL, label="trains on all samples"),
            Patch(facecolor=_PRUNED_CELL, label="skips samples"),
        ]
        if boundaries:
            key.append(
                Line2D([], [], color=_INK, linewidth=2.2, label="window ends, counts are cleared")
            )
        axes.legend(
            handles=key,
            loc="upper left",
            bbox_to_anchor=(0, 1),
            ncols=3,
            borderaxespad=0.2,
            borderpad=0,
        )
        return _svg(figure, f"{label}: {sum(map(bool, prunes))} of {len(prunes)} epochs pruned")


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Draw in our style whatever the user's own settings are, and leave these as they were."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def _svg(figure: Figure, label: str) -> str:
    """Write a figure as one element that stands beside others in a page: no id is used twice."""
    buffer = io.StringIO()
    unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure)
    figure.savefig(buffer, format="svg", metadata=unsaid)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip() + "\n"
    prefix = "f" + hashlib.sha256((label + text).encode()).hexdigest()[:8]
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))

    def renamed(match: re.Match[str]) -> str:
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]+)"', renamed, text)
    text = re.sub(r'((?:url\(|href=")#)', rf"\g<1>{prefix}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)


def _curves(group: Group, key: str, scale: float) -> dict[str, _Curve]:
    """Average the evaluations of each arm over its seeds, where all of them were evaluated."""
    curves = {}
    for arm in group.arms:
        tracks = [_track(run, key) for run in group.of(arm)]
        epochs = sorted(set.intersection(*(set(track) for track in tracks)))
        if not epochs:
            continue
        values = scale * np.array([[track[epoch][0] for epoch in epochs] for track in tracks])
        seconds = np.array([[track[epoch][1] for epoch in epochs] for track in tracks])
        curves[arm] = _Curve(
            np.array(epochs),
            seconds.mean(0),
            values.mean(0),
            values.min(0),
            values.max(0),
        )
    return curves


def _track(run: Run, key: str) -> dict[int, tuple[float, float]]:
    """Map each evaluated epoch, from 1, to the value and the training seconds so far."""
    seconds = itertools.accumulate(line["seconds"] for line in run.metrics)
    return {
        line["epoch"] + 1: (line[key], so_far)
        for line, so_far in zip(run.metrics, seconds, strict=True)
        if line.get(key) is not None
    }


def _plot(axes: Axes, arm: str, x: npt.NDArray[Any], curve: _Curve) -> None:
    colour = _colour(arm)
    if (curve.most > curve.least).any():
        axes.fill_between(x, curve.least, curve.most, color=colour, alpha=0.15, linewidth=0)
    alone: dict[str, Any] = {"marker": "o", "markersize": 4} if len(x) == 1 else {}
    axes.plot(x, curve.mean, color=colour, linestyle=_DASHES.get(arm, "-"), zorder=3, **alone)


def _shade(axes: Axes, prunes: Sequence[bool]) -> None:
    spans = []
    epoch = 0.5
    for pruned, stretch in itertools.groupby(prunes):
        length = len(list(stretch))
        if pruned:
            spans.append((epoch, length))
        epoch += length
    axes.broken_barh(
        spans, (0, 1), transform=axes.get_xaxis_transform(), facecolor=_SHADE, linewidth=0, zorder=0
    )


def _whole_ticks(most: int) -> MaxNLocator:
    return MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10])


def _legend(figure: Figure, arms: Iterable[str], shaded: bool = False) -> None:
    handles: list[Any] = [
        Line2D([], [], color=_colour(arm), linestyle=_DASHES.get(arm, "-"), label=arm)
        for arm in arms
    ]
    if shaded:
        handles.append(Patch(facecolor=_SHADE, label="pruned epochs"))
    figure.legend(handles=handles, loc="outside upper center", ncols=6)


def _accuracy_limits(curves: dict[str, _Curve], since: dict[str, float]) -> tuple[float, float]:
    """Fit the axis to the arms' accuracies from an epoch on: earlier ones would flatten them."""
    values = np.concatenate(
        [
            bound[curve.epochs >= min(since[arm], curve.epochs[-1])]
            for arm, curve in curves.items()
            for bound in (curve.least, curve.most)
        ]
    )
    values = values[np.isfinite(values)]
    if not len(values):
        return 0, 100
    margin = max(0.06 * float(values.max() - values.min()), 0.1)
    return max(0, float(values.min()) - margin), min(100.5, float(values.max()) + margin)


def _tenths(group: Group) -> dict[str, float]:
    """Return for each arm the epoch in which the first tenth of its training ends."""
    return {arm: group.of(arm)[0].summary["epochs"] / 10 for arm in group.arms}


def _closing_phases(group: Group) -> dict[str, float]:
    """Return for each arm the first epoch after its rate's last fall; empty where one has none."""
    falls = {arm: _milestones(group.of(arm)[0])[-1:] for arm in group.arms}
    if not all(falls.values()):
        return {}
    return {arm: fall[0] + 1.0 for arm, fall in falls.items()}


def _top(curves: dict[str, _Curve]) -> float | None:
    values = np.concatenate([curve.most for curve in curves.values()]) if curves else np.empty(0)
    values = values[np.isfinite(values)]
    return 1.05 * float(values.max()) if len(values) and values.max() > 0 else None


def _watched_pair(
    group: Group,
) -> tuple[list[Run], list[dict[str, tuple[list[int], list[float]]]]] | None:
    for arm in group.arms:
        runs = group.of(arm)[:2]
        if len(runs) < 2:
            continue
        tracks = [_watched(run) for run in runs]
        both = sorted(tracks[0].keys() & tracks[1].keys(), key=int)
        if both:
            return runs, [{index: track[index] for index in both} for track in tracks]
    return None


def _watched(run: Run) -> dict[str, tuple[list[int], list[float]]]:
    tracks: dict[str, tuple[list[int], list[float]]] = {}
    for line in run.metrics:
        for index, loss in (line.get("watched") or {}).items():
            epochs, losses = tracks.setdefault(index, ([], []))
            epochs.append(line["epoch"] + 1)
            losses.append(loss)
    return tracks


def _first_pruned(group: Group) -> Run | None:
    return next((run for run in group.runs if any(line["pruned"] for line in run.metrics)), None)


def _prunes(group: Group) -> list[bool]:
    run = _first_pruned(group)
    return [] if run is None else [bool(line["pruned"]) for line in run.metrics]


def _counted_epochs(run: Run, ends: Sequence[int]) -> dict[int, str]:
    """Name the epochs whose marks the counts of each window hold.

    A boundary's epoch clears the counts before it adds its own marks, so it opens the next window.
    """
    boundaries = _boundaries(run)
    named = {}
    for first, end in itertools.pairwise([1, *ends]):
        last = end - 1 if end in boundaries else end
        named[end] = f"epochs {first} to {max(first, last)}"
    return named


def _boundaries(run: Run) -> tuple[int, ...]:
    if not {"window", "windows_per_interval"} & run.recipe.get("pruning", {}).keys():
        return ()  # skips samples, but by no schedule
    return make_recipe(run.recipe).schedule().boundaries


def _milestones(run: Run) -> list[int]:
    training = run.recipe.get("training", {})
    return list(training.get("milestones", ())) if training.get("schedule") == "milestones" else []


def _shorter(group: Group) -> bool:
    return len({run.summary["epochs"] for run in group.runs}) > 1


def _evaluated_on(group: Group) -> str:
    return str(group.runs[0].summary["evaluated_on"])


def _seeds(group: Group) -> int:
    return max(len(group.of(arm)) for arm in group.arms)


def _colour(arm: str) -> str:
    # By a checksum, not by place: the same in every report.
    other = _OTHER_COLOURS[zlib.crc32(arm.encode()) % len(_OTHER_COLOURS)]
    return _COLOURS.get(arm, other)


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds < 300:
        return "seconds", 1
    return ("minutes", 60) if seconds < 2 * 3600 else ("hours", 3600)


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _s(many: Sequence[object]) -> str:
    return "" if len(many) == 1 else "s"
