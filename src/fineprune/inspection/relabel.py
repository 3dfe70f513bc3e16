"""The table of labels that a person edits, with the suspected ones first."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fineprune.datasets.label_file import DROP_WORD, check_class_names
from fineprune.errors import InputError
from fineprune.inspection.inspected import Inspected
from fineprune.inspection.suspects import suspects_of
from fineprune.runs.training_set import DROPPED, UNKNOWN, TrainingSet

COLUMNS = ("key", "index", "label", "suggestion", "agreement", "score")


@dataclass(frozen=True)
class LabelTable:
    """A table of labels that ``[data] labels`` reads.

    Attributes:
        text: The table as CSV, with ``COLUMNS``.
        suspects: The number of samples at its top that are suspected.
        accepted: The number of these whose label is the suggestion already.
    """

    text: str
    suspects: int
    accepted: int


def label_table(
    runs: Sequence[Inspected], most: int | None = None, accept: float | None = None
) -> LabelTable:
    """Return the labels of the whole training set, as the runs trained with them.

    The suspects come first, with their suggestions; all other samples follow in their order.
    Samples that were left out stay ``drop``, and those that were held out keep their labels.

    Args:
        runs: Runs on the same labels, whose evidence is added.
        most: How many suspects to list; None for those that are called suspicious.
        accept: Suggestions with at least this agreement become labels, 0 to 1; None for none.
    """
    training_set = _common(runs)
    check_class_names(training_set.classes, "a table")
    unknown = np.flatnonzero(training_set.labels == UNKNOWN)
    if len(unknown):
        raise InputError(
            f"expected the label of every sample in {runs[0].run.path}, got none for sample "
            f"{unknown[0]}, which was not trained: give the training set an attribute targets"
        )
    ranked = suspects_of(*runs)
    suspects = ranked.at(slice(ranked.number if most is None else most))
    file = io.StringIO(newline="")
    table = csv.writer(file, lineterminator="\n")
    table.writerow(COLUMNS)
    keys = training_set.keys or [""] * len(training_set.labels)
    name, accepted = training_set.name, 0
    # The agreement is rounded: 9 of 10 is below 0.9 in float32.
    for index, score, label, suggestion, agreement in zip(
        training_set.index[suspects.index].tolist(),
        suspects.score.tolist(),
        runs[0].labels[suspects.index].tolist(),
        suspects.suggestion.tolist(),
        suspects.agreement.tolist(),
        strict=True,
    ):
        if accept is not None and suggestion >= 0 and round(agreement, 6) >= accept:
            label = suggestion
            accepted += 1
        suggested = ("", "") if suggestion < 0 else (name(suggestion), f"{agreement:.2f}")
        table.writerow([keys[index], index, name(label), *suggested, f"{score:.3f}"])
    others = np.ones(len(training_set.labels), dtype=np.bool_)
    others[training_set.index[suspects.index]] = False
    for sample in np.flatnonzero(others).tolist():
        label = int(training_set.labels[sample])
        named = DROP_WORD if label == DROPPED else name(label)
        table.writerow([keys[sample], sample, named, "", "", ""])
    return LabelTable(file.getvalue(), len(suspects), accepted)


def _common(runs: Sequence[Inspected]) -> TrainingSet:
    """Return the training set of all runs."""
    first = runs[0].training_set()
    for run in runs[1:]:
        other = run.training_set()
        same = (
            np.array_equal(first.index, other.index)
            and np.array_equal(first.labels, other.labels)
            and (first.classes, first.keys) == (other.classes, other.keys)
        )
        if not same:
            raise InputError(
                f"expected runs on the same samples and labels, got different ones in "
                f"{run.run.path} and {runs[0].run.path}: relabel one after the other"
            )
    return first
