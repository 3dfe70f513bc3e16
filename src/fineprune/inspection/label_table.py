"""The table of labels that a person edits: one row per sample, the most suspicious first."""

import csv
import io

import numpy as np
import torch

from fineprune.datasets.label_file import DROP_WORD, check_class_names
from fineprune.errors import InputError
from fineprune.inspection.inspected import Inspected
from fineprune.runs.training_set import DROPPED, UNKNOWN

COLUMNS = ("key", "index", "label", "suggestion", "confidence", "score", "skipped")


def label_table(inspected: Inspected, accept: float | None = None) -> tuple[str, int]:
    """Return the labels of the whole training set, as the runs trained with them.

    Samples that the runs have recorded come first, by their scores; all others follow in their
    order. Samples that were left out stay ``drop``, and those that were held out keep their labels.
    ``skipped`` is the number of epochs of all runs that skipped the sample.

    Args:
        inspected: The runs.
        accept: The confidence, 0 to 1, with which suggestions for suspects become labels, if any.

    Returns:
        A table that ``[data] labels`` reads, as CSV with ``COLUMNS``; and the number of samples
        whose label is the suggestion.

    Raises:
        InputError: A name of a class has two meanings, or the label of a sample is not known.
    """
    training_set = inspected.training_set
    check_class_names(training_set.classes, "a table")
    unknown = np.flatnonzero(training_set.labels == UNKNOWN)
    if len(unknown):
        raise InputError(
            f"expected the label of every sample in {inspected.runs[0].path}, got none for sample "
            f"{unknown[0]}, which was not trained: give the training set an attribute targets"
        )
    file = io.StringIO(newline="")
    table = csv.writer(file, lineterminator="\n")
    table.writerow(COLUMNS)
    keys = training_set.keys or [""] * len(training_set.labels)
    name, labels, accepted = training_set.name, training_set.labels.tolist(), 0
    order, scores, suggestions = inspected.ranking.suspects()
    skipped, left = inspected.times_skipped, np.ones(len(labels), dtype=np.bool_)
    for sample, score, confidence, suggestion in zip(
        order.tolist(),
        scores.tolist(),
        torch.sigmoid(scores).tolist(),
        suggestions.tolist(),
        strict=True,
    ):
        if suggestion < 0:
            break  # It was never recorded, as all that follow.
        index = int(training_set.index[sample])
        label, left[index] = labels[index], False
        if accept is not None and score > 0 and confidence >= accept:
            label = suggestion
            accepted += 1
        suggested = name(suggestion), f"{confidence:.3f}", f"{score:.3f}", skipped[sample]
        table.writerow([keys[index], index, name(label), *suggested])
    for index in np.flatnonzero(left).tolist():
        named = DROP_WORD if labels[index] == DROPPED else name(labels[index])
        table.writerow([keys[index], index, named, "", "", "", ""])
    return file.getvalue(), accepted
