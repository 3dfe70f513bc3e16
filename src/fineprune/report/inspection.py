"""The page of an inspection: the labels to review, and the classes, in one HTML file."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from fineprune.errors import InputError
from fineprune.inspection.inspected import Inspected
from fineprune.inspection.shown_samples import shown_samples
from fineprune.report.facts import distinct, facts
from fineprune.report.page import Facts, Fold, write_page
from fineprune.report.table import Table, percent, table_of, whole


class ClassRow(NamedTuple):
    """A class: its training samples, the suspects among them, and the share of skipped steps.

    The accuracy is the share of its evaluated samples that the last epoch recognised, if known.
    """

    name: str
    samples: int
    suspects: int
    skipped: float
    accuracy: float | None


def class_rows(inspected: Inspected) -> list[ClassRow]:
    """Return one row per class."""
    number = inspected.watch.num_classes
    labels = inspected.training_set.trained_labels
    suspected = (inspected.ranking.scores > 0).cpu().numpy()
    epochs = sum(run.summary.epochs for run in inspected.runs)
    samples = np.bincount(labels, minlength=number)
    suspects = np.bincount(labels[suspected], minlength=number)
    skipped = np.bincount(labels, weights=inspected.times_skipped, minlength=number)
    shares = skipped / np.maximum(samples, 1) / epochs
    columns = (part.tolist() for part in (samples, suspects, shares))
    rows = zip(inspected.classes, *columns, inspected.recognised(), strict=True)
    return [ClassRow(*row) for row in rows]


def write_inspection(
    inspected: Inspected, path: Path, *, most: int | None = None, own_data: bool = False
) -> list[ClassRow]:
    """Write a page on which a person reviews the suspects of runs, as one HTML file.

    Args:
        inspected: The runs.
        path: The HTML file. A missing folder is made, and an old file is replaced atomically.
        most: The number of samples to list; None for all suspects up to 500.
        own_data: Whether the code of user-defined data may be run to show its samples.

    Returns:
        What the page says of each class.
    """
    show, notes = None, []
    try:
        show = shown_samples(inspected, own_data=own_data)
    except InputError as error:
        notes.append(f"The samples themselves are not shown: {str(error).rstrip('.')}.")
    rows = class_rows(inspected)
    titles = distinct(run.title for run in inspected.runs)
    write_page(
        path,
        f"Labels of {titles[0] if len(titles) == 1 else f'{len(inspected.runs)} runs'}",
        [
            Markup(inspected.review(most, show, notes)),  # It has escaped all names.
            Fold("The classes", [_class_table(rows)]),
            Fold("What was run", [Facts(facts(inspected.runs))]),
        ],
    )
    return rows


def _class_table(rows: list[ClassRow]) -> Table:
    return table_of(
        "Classes",
        rows,
        (
            ("class", lambda row: row.name),
            ("training samples", lambda row: whole(row.samples)),
            ("suspects", lambda row: whole(row.suspects)),
            ("skipped, %", lambda row: percent(row.skipped, 1)),
            ("accuracy, %", lambda row: percent(row.accuracy, 1)),
        ),
        "Skipped: the share of the sample-steps of the training samples with this label. Accuracy: "
        "the share of the evaluated samples of this class that the last epoch recognised.",
    )
