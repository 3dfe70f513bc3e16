"""The tables of an inspection: wrong labels found, classes, overlaps and traits."""

import statistics
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fineprune.inspection.inspected import Inspected
from fineprune.inspection.inspected_arm import Found
from fineprune.inspection.overlap import Overlap
from fineprune.inspection.per_class import ClassRow
from fineprune.inspection.traits import Trait
from fineprune.report.table import NOTHING, Table, decimal, percent, table_of
from fineprune.runs.summary import Summary

Matrix = npt.NDArray[np.int64]

# Longer tables show the first and the last lines only.
_MOST_CLASSES = 100
_MOST_OVERLAPS = 15
_MOST_SHARES = 20
_MOST_PAIRS = 20


def suspects_table(found: Sequence[Found], total: int, samples: int) -> Table:
    """Return the table of the wrong labels that the suspects contain."""
    return table_of(
        "How many suspects have wrong labels",
        found,
        (
            ("suspects", lambda row: f"the first {row.first:,}"),
            ("wrong labels", lambda row: f"{row.wrong:,}"),
            ("precision, %", lambda row: percent(row.wrong / row.first, 1)),
            ("recall, %", lambda row: percent(row.wrong / total, 1) if total else NOTHING),
            ("wrong by chance", lambda row: f"{row.by_chance:,.0f}"),
            ("suggestions right", lambda row: f"{row.suggestions_right:,}"),
        ),
        f"It is known which labels are wrong: {total:,} of {samples:,}. Precision: the share of "
        f"the suspects whose label is wrong. Recall: the share of all wrong labels that are among "
        f"these suspects. Suggestions right: how many of the wrong labels have the label of the "
        f"dataset as their suggestion.",
    )


def class_table(
    rows: Sequence[ClassRow], names: Sequence[str], evaluated_on: str, beside_full: bool
) -> Table:
    """Return the table of the classes, beside those of the ``full`` run if there is one."""
    shown, left_out = list(rows), ""
    if len(rows) > _MOST_CLASSES:
        ordered = sorted(rows, key=lambda row: -row.skipped)
        shown = ordered[: _MOST_CLASSES // 2] + ordered[-_MOST_CLASSES // 2 :]
        left_out = (
            f" Only the {_MOST_CLASSES // 2} classes that were skipped most and the "
            f"{_MOST_CLASSES // 2} that were skipped least are shown, of {len(rows):,}."
        )
    columns: list[tuple[str, Callable[[ClassRow], str]]] = [
        ("class", lambda row: names[row.number]),
        ("training samples", lambda row: f"{row.samples:,}"),
        ("skipped, %", lambda row: percent(row.skipped, 1)),
        ("accuracy, %", lambda row: percent(row.accuracy, 1)),
    ]
    note = (
        f"Skipped: the share of the sample-steps of the training samples with this label. "
        f"Accuracy: the share of the samples of this class in the {evaluated_on} set that the "
        f"network recognised after the last epoch.{left_out}"
    )
    if beside_full:
        columns += [
            ("accuracy of full, %", lambda row: percent(row.full_accuracy, 1)),
            ("difference, points", _points),
        ]
        note += " Full: the run with the same network and seed that skips nothing."
    return table_of("Classes", shown, columns, note)


def _points(row: ClassRow) -> str:
    if row.accuracy is None or row.full_accuracy is None:
        return NOTHING
    return f"{100 * (row.accuracy - row.full_accuracy):+.1f}"


def confused_pairs(matrix: Matrix, full: Matrix | None, names: Sequence[str]) -> Table:
    """Return the pairs of classes that are confused most often.

    Args:
        matrix: How often each label (row) was predicted as each class (column); int64, shape
            (classes, classes).
        full: The same for the ``full`` run with the same seed; None without such a run.
        names: The name of each class.
    """
    errors = matrix - np.diag(np.diag(matrix))
    order = np.argsort(-errors, axis=None, kind="stable")[:_MOST_PAIRS]
    pairs = [divmod(int(pair), len(matrix)) for pair in order if errors.flat[pair] > 0]
    columns: list[tuple[str, Callable[[tuple[int, int]], str]]] = [
        ("class", lambda pair: names[pair[0]]),
        ("recognised as", lambda pair: names[pair[1]]),
        ("samples", lambda pair: f"{matrix[pair]:,}"),
        ("share of the class, %", lambda pair: percent(matrix[pair] / matrix[pair[0]].sum(), 1)),
    ]
    if full is not None:
        columns.append(("samples in full", lambda pair: f"{full[pair]:,}"))
    note = f"The {len(pairs)} most frequent errors after the last epoch."
    return table_of("Classes that are confused most often", pairs, columns, note)


def overlap_table(title: str, overlaps: Sequence[Overlap], runs: Sequence[Inspected]) -> Table:
    """Return the table of overlaps, as means over the pairs of runs of one kind.

    The networks, arms and seeds of two runs are the kind of the pair.
    """
    summaries = {run.name: run.run.summary for run in runs}
    for kind_of in (_particular, _general):  # If there are too many kinds, they are summed up.
        kinds: dict[str, list[Overlap]] = {}
        for overlap in overlaps:
            kind = kind_of(summaries[overlap.one], summaries[overlap.other])
            kinds.setdefault(kind, []).append(overlap)
        if len(kinds) <= _MOST_OVERLAPS:
            break
    lines = []
    for kind, members in kinds.items():
        values = [member.jaccard for member in members]
        correlations = [m.rank_correlation for m in members if m.rank_correlation is not None]
        lines.append(
            (
                kind,
                f"{len(members)}",
                f"{statistics.fmean(values):.3f}",
                f"{min(values):.3f} to {max(values):.3f}" if len(values) > 1 else NOTHING,
                f"{statistics.fmean(m.by_chance for m in members):.3f}",
                f"{statistics.fmean(correlations):+.2f}" if correlations else NOTHING,
            )
        )
    sizes = sorted({overlap.size for overlap in overlaps})
    taken = " or ".join(f"{size:,}" for size in sizes)
    return Table(
        title,
        ("runs", "pairs", "overlap", "range", "by chance", "rank correlation"),
        lines,
        f"Overlap: the Jaccard index of the first {taken} samples of both runs (a tenth of all), "
        f"that is, the size of their intersection divided by that of their union; the mean over "
        f"the pairs of runs. By chance: the value that is expected for two random sets of this "
        f"size. Rank correlation: Spearman's, over all samples.",
    )


def _particular(one: Summary, other: Summary) -> str:
    arms = sorted(f"{summary.network} {summary.arm}" for summary in (one, other))
    return f"{arms[0]}, {_differ(one, other)}" if arms[0] == arms[1] else " and ".join(arms)


def _general(one: Summary, other: Summary) -> str:
    if one.network == other.network:
        if one.arm == other.arm:
            return f"same network and arm, {_differ(one, other)}"
        return "same network, different arms"
    return "different networks, same arm" if one.arm == other.arm else "different networks and arms"


def _differ(one: Summary, other: Summary) -> str:
    return "the same seed" if one.seed == other.seed else "different seeds"


def trait_table(traits: Sequence[Trait], chosen: str) -> Table:
    """Return the table of the properties of pictures, which are called such as ``most skipped``."""
    return table_of(
        "Properties of the pictures",
        traits,
        (
            ("property", lambda trait: trait.name),
            (chosen, lambda trait: _mean(trait.chosen)),
            ("all others", lambda trait: _mean(trait.others)),
            ("difference, standard deviations", lambda trait: f"{trait.difference:+.2f}"),
        ),
        "Means over at most 2,000 pictures of each group. Brightness and contrast: the mean and "
        "the standard deviation of the grey values, from 0 to 1. Sharpness: the standard deviation "
        "of the Laplacian of the grey values. File size: as PNG.",
    )


def share_table(
    labels: npt.NDArray[np.int64], top: npt.NDArray[np.int64], names: Sequence[str], chosen: str
) -> Table:
    """Return the table of the share that each class has in some samples, and in all of them.

    Args:
        labels: The label of each sample; int64, shape (N,).
        top: The indices of the chosen samples; int64, shape (n,).
        names: The name of each class.
        chosen: What they are called, such as ``most skipped``.
    """
    shares = np.bincount(labels[top], minlength=len(names)) / len(top)
    every = np.bincount(labels, minlength=len(names)) / len(labels)
    numbers = list(range(len(names)))
    note = (
        "The share of each label in both groups; the ratio is 1 if the class makes no difference."
    )
    if len(numbers) > _MOST_SHARES:
        half = _MOST_SHARES // 2
        by_excess = sorted(numbers, key=lambda number: every[number] - shares[number])
        numbers = by_excess[:half] + by_excess[-half:]
        note += (
            f" Only the {half} classes with the largest excess and the {half} with the smallest "
            f"are shown, of {len(names):,}."
        )
    lines = [
        (
            names[number],
            percent(shares[number], 1),
            percent(every[number], 1),
            f"{shares[number] / every[number]:.2f}" if every[number] else NOTHING,
        )
        for number in numbers
    ]
    return Table("Their labels", ("class", f"{chosen}, %", "all samples, %", "ratio"), lines, note)


def _mean(value: float) -> str:
    return decimal(value, 0 if abs(value) >= 100 else 3)
