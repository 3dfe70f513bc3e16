"""The table of labels that a person edits, with the suspected ones first."""

import csv
import io

import numpy as np

from fineprune.errors import InputError
from fineprune.inspection.inspected import Inspected
from fineprune.inspection.pictures import pictures_of, without_pictures
from fineprune.inspection.suspects import Suspects, number_above_chance, suspects_of

COLUMNS = ("index", "label", "suggestion", "agreement", "score")


def label_table(inspected: Inspected, most: int | None = None) -> tuple[str, int]:
    """Return the labels of the whole training set as a table that ``[data] labels`` reads.

    The suspects come first, with their suggestions; all other images follow in their order. Images
    that the run did not train on, such as those held out for validation, have their own label.

    Args:
        inspected: The run.
        most: How many suspects to list; None for those whose loss is above chance.

    Returns:
        The table as CSV with the columns ``index``, ``label``, ``suggestion``, ``agreement`` and
        ``score``, and the number of suspects.

    Raises:
        InputError: The data of the run cannot be loaded.
    """
    names, index, labels = _labels(inspected)
    if most is None:
        most = number_above_chance(inspected, len(names) or int(inspected.labels.max()) + 1)
    suspects = suspects_of(inspected, most)
    file = io.StringIO(newline="")
    table = csv.writer(file, lineterminator="\n")
    table.writerow(COLUMNS)
    for row in range(len(suspects)):
        table.writerow(_row(suspects, row, int(index[suspects.index[row]]), names))
    others = np.ones(len(labels), dtype=np.bool_)
    others[index[suspects.index]] = False
    for image in np.flatnonzero(others):
        table.writerow([image, _name(int(labels[image]), names), "", "", ""])
    return file.getvalue(), len(suspects)


def _labels(
    inspected: Inspected,
) -> tuple[tuple[str, ...], np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray]:
    """Return the names of the classes, the index of each sample, and the labels of all images."""
    if without_pictures(inspected.run):
        return (), np.arange(len(inspected.labels)), inspected.labels
    loaded = pictures_of(inspected.run)
    if len(loaded.index) != len(inspected.labels):
        raise InputError(
            f"expected the {len(inspected.labels)} training images of {inspected.run.path}, got "
            f"{len(loaded.index)}: restore the data with which it was trained"
        )
    labels = loaded.given.copy()
    labels[loaded.index] = inspected.labels
    return loaded.train.classes, loaded.index, labels


def _row(suspects: Suspects, row: int, image: int, names: tuple[str, ...]) -> list[str | int]:
    suggestion = int(suspects.suggestion[row])
    return [
        image,
        _name(int(suspects.label[row]), names),
        "" if suggestion < 0 else _name(suggestion, names),
        "" if suggestion < 0 else f"{suspects.agreement[row]:.2f}",
        f"{suspects.score[row]:.3f}",
    ]


def _name(number: int, names: tuple[str, ...]) -> str:
    return names[number] if names else str(number)
