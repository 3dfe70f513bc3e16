"""The table of the wrong labels that the policies found, in runs whose wrong labels are known."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from fineprune.experiments.arm_table import Group, grouped
from fineprune.report.table import NOTHING, Table, decimal, percent, whole
from fineprune.runs.run import Run

_TITLE = "Wrong labels found"

_HEADERS = (
    "arm",
    "seeds",
    "wrong labels, %",
    "ROC area",
    "average precision",
    "suspects",
    "precision, %",
    "recall, %",
    "R-precision, %",
)

_NOTE = (
    "At the end of the training, means over the seeds in which a value is defined (the precision "
    "is not if there are no suspects). ROC area: the probability that the policy "
    "suspects a wrong label more than a right one; 0.5 is chance. Suspects: the number of samples "
    "that the policy itself would skip as the most suspicious. Precision: the share of the "
    "suspects whose label is wrong. Recall: the share of the wrong labels that are among the "
    "suspects. R-precision: both of these, for as many suspects as there are wrong labels."
)


@dataclasses.dataclass(frozen=True)
class FoundRow:
    """How well the policy of one arm found the wrong labels, as means over its seeds.

    None marks a value that is not available, for example because the policy suspects no samples.

    Attributes:
        group: The label of the group that the arm belongs to.
        arm: The name of the arm.
        seeds: The number of runs.
        wrong_share: The share of the training labels that are wrong.
        roc_area: The probability that a wrong label is more suspicious than a right one.
        average_precision: The average precision of the suspicion.
        suspects: The number of samples that the policy itself calls suspicious.
        precision: The share of the suspects whose label is wrong.
        recall: The share of the wrong labels that are among the suspects.
        r_precision: The precision and recall for as many suspects as there are wrong labels.
    """

    group: str
    arm: str
    seeds: int
    wrong_share: float | None
    roc_area: float | None
    average_precision: float | None
    suspects: float | None
    precision: float | None
    recall: float | None
    r_precision: float | None


def found_rows(group: Group) -> list[FoundRow]:
    """Return one row for each arm with runs whose wrong labels are known; often there are none."""
    rows = []
    for arm in group.arms:
        found = [
            run.summary.suspicion for run in group.of(arm) if run.summary.suspicion is not None
        ]
        if not found:
            continue
        names = [field.name for field in dataclasses.fields(FoundRow)][3:]
        means = {name: _mean([getattr(figures, name) for figures in found]) for name in names}
        rows.append(FoundRow(group.label, arm, len(found), **means))
    return rows


def all_found_rows(runs: Sequence[Run]) -> list[FoundRow]:
    """Return the rows of all groups.

    Raises:
        InputError: The runs cannot be grouped; see ``arm_table.grouped``.
    """
    return [row for group in grouped(runs) for row in found_rows(group)]


def found_table(rows: Sequence[FoundRow]) -> Table:
    """Return the table of one group.

    Args:
        rows: The rows of the group.
    """
    lines = [
        (
            row.arm,
            str(row.seeds),
            percent(row.wrong_share, 1),
            decimal(row.roc_area, 3),
            decimal(row.average_precision, 3),
            whole(row.suspects),
            percent(row.precision, 1),
            percent(row.recall, 1),
            percent(row.r_precision, 1),
        )
        for row in rows
    ]
    return Table(_TITLE, _HEADERS, lines, _NOTE)


def found_line(rows: Sequence[FoundRow]) -> str:
    """Return one line for a terminal with how well each arm, perhaps of several groups, found."""
    several = len({row.group for row in rows}) > 1
    areas = (
        f"{row.arm}{f' of {row.group}' if several else ''} {decimal(row.roc_area, 3)}"
        for row in rows
        if row.roc_area is not None
    )
    return f"{_TITLE}, ROC area: {', '.join(areas) or NOTHING}"


def found_dicts(rows: Sequence[FoundRow]) -> list[dict[str, Any]]:
    """Return the rows as dicts for JSON, with values that are not rounded."""
    return [dataclasses.asdict(row) for row in rows]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
