"""The table of the wrong labels that the policies found, in runs whose wrong labels are known."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fineprune.experiments.arm_table import Group, mean_known
from fineprune.report.table import NOTHING, Table, decimal, percent, table_of, whole
from fineprune.runs.summary import Detection

_TITLE = "Wrong labels found"

_NOTE = (
    "At the end of the training, means over the seeds in which a value is defined. ROC area: the "
    "probability that the arm suspects a wrong label more than a right one; 0.5 is chance. "
    "Precision: the share of the suspects whose label is wrong. Recall: the share of the wrong "
    "labels that are suspects. R-precision: both, for as many suspects as there are wrong labels."
)


# The figures of which the rows have means. The share of wrong labels stands for their number.
_FIGURES = [field.name for field in dataclasses.fields(Detection) if field.name != "wrong"]

# How well the policy of one arm found the wrong labels: ``group``, ``arm``, ``seeds`` (the number
# of runs) and ``_FIGURES``, as means over the seeds, None if no seed has the figure.
FoundRow = dict[str, Any]


def found_rows(group: Group) -> list[FoundRow]:
    """Return one row for each arm with runs whose wrong labels are known; often there are none."""
    rows = []
    for arm in group.arms:
        found = [
            run.summary.suspicion for run in group.of(arm) if run.summary.suspicion is not None
        ]
        if not found:
            continue
        means = {name: mean_known(getattr(one, name) for one in found) for name in _FIGURES}
        rows.append({"group": group.label, "arm": arm, "seeds": len(found), **means})
    return rows


def found_table(rows: Sequence[FoundRow]) -> Table:
    """Return the table of the rows of one group."""
    return table_of(
        _TITLE,
        rows,
        (
            ("arm", lambda row: str(row["arm"])),
            ("seeds", lambda row: str(row["seeds"])),
            ("wrong labels, %", lambda row: percent(row["wrong_share"], 1)),
            ("ROC area", lambda row: decimal(row["roc_area"], 3)),
            ("suspects", lambda row: whole(row["suspects"])),
            ("precision, %", lambda row: percent(row["precision"], 1)),
            ("recall, %", lambda row: percent(row["recall"], 1)),
            ("R-precision, %", lambda row: percent(row["r_precision"], 1)),
        ),
        _NOTE,
    )


def found_line(rows: Sequence[FoundRow]) -> str:
    """Return one line for a terminal with how well each arm, perhaps of several groups, found."""
    several = len({row["group"] for row in rows}) > 1
    areas = []
    for row in rows:
        if row["roc_area"] is not None:
            group = f" of {row['group']}" if several else ""
            areas.append(f"{row['arm']}{group} {decimal(row['roc_area'], 3)}")
    return f"{_TITLE}, ROC area: {', '.join(areas) or NOTHING}"
