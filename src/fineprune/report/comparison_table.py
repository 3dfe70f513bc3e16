"""The tables of a comparison, its headline, and its rows as JSON."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from fineprune.experiments.arm_table import BASELINE, WATCHED, Group, Row, mean_known
from fineprune.report.table import NOTHING, Table, decimal, percent, points, table_of, whole
from fineprune.runs.summary import Detection

Column = tuple[str, Callable[[Row], str]]

# What a headline says for each verdict on the other arms.
_SAID = {
    "better": "better than",
    "worse": "worse than",
    "equal": "equal to",
    "open": "not distinguishable from",
}


def results_table(rows: Sequence[Row], margin: float) -> Table:
    """Return the table of the accuracies, in which the method is compared with every other arm."""
    method = rows[0].group.method
    columns: list[Column] = [
        ("arm", lambda row: row.arm),
        ("seeds", lambda row: whole(row.seeds)),
        ("last epoch, %", lambda row: percent(row.accuracy_last)),
    ]
    note = f"Accuracy on the {rows[0].group.first.evaluated_on} set after the last epoch."
    if method is not None and len(rows) > 1:
        columns += [
            (f"{method} minus arm, points", lambda row: points(row.difference)),
            ("verdict", lambda row: row.verdict or NOTHING),
            ("steps ratio", lambda row: decimal(row.cost, 2)),
            ("time ratio", lambda row: decimal(row.time, 2)),
        ]
        note += (
            f" Differences are paired by seed, ± half the 95 % interval. Verdict: {method} is "
            f"equal if two one-sided t-tests reject a difference of {100 * margin:g} points, "
            f"better or worse if the interval excludes zero, and else the question is open; one "
            f"seed allows no claim. Verdicts are not corrected for their number. Ratios: the "
            f"sample-steps and the training time of {method}, divided by those of the arm."
        )
    return table_of("Results", rows, columns, note)


def cost_table(rows: Sequence[Row]) -> Table:
    """Return the table of what each arm costs."""
    columns: list[Column] = [
        ("arm", lambda row: row.arm),
        ("sample-steps", lambda row: whole(row.samples_trained)),
        ("skipped, %", lambda row: percent(row.skipped)),
        ("steps", lambda row: whole(row.steps)),
        ("training, s", lambda row: _seconds(row.seconds_train)),
        (
            "predicted to save, %",
            lambda row: percent(row.predicted_saving if row.skipped else None),
        ),
        ("saved, %", lambda row: points(row.time_saved if row.skipped else None)),
        ("overhead, s", lambda row: NOTHING if row.arm == WATCHED else decimal(row.overhead, 2)),
    ]
    note = (
        "Means over the seeds. Predicted: the paper's formulas 2 to 7, with the time of a step of "
        "full training, which records nothing. Saved: wall-clock time, relative to full training, "
        "paired by seed. Overhead: what the method spends on recording and on selecting "
        "samples, beyond the order of the samples and the mean of their losses, which full "
        "training needs as well."
    )
    if any(row.arm == WATCHED for row in rows):
        of_watched = "evidence on labels, s"
        columns.append(
            (of_watched, lambda r: decimal(r.overhead, 2) if r.arm == WATCHED else NOTHING)
        )
    if any(row.samples_of_both is not None for row in rows):
        columns.append(("sample-steps of both", lambda row: whole(row.samples_of_both)))
        note += " Both: a second training and the first one, whose suspects it leaves out."
    return table_of("Cost", rows, columns, note)


def headline(rows: Sequence[Row]) -> str:
    """Return what a comparison showed in one sentence, which claims no more than the table."""
    by_arm = {row.arm: row for row in rows}
    method = rows[0].group.method
    full = by_arm.get(BASELINE)
    if method is None or len(rows) == 1:
        return f"{rows[0].arm}: {_percent(rows[0].accuracy_last)} after the last epoch."
    said = f"{method}: {_percent(by_arm[method].accuracy_last)}"
    if full is not None and full.difference is not None:
        if full.difference.half_width is None:
            said += f" beside {_percent(full.accuracy_last)} of full training"
        else:
            said += f", {points(full.difference)} points against full training"
        said += f" at {_ratio(full.cost)} of its sample-steps and {_ratio(full.time)} of its time"
    claims = [
        f"{phrase} {', '.join(arms)}"
        for verdict, phrase in _SAID.items()
        if (arms := [row.arm for row in rows if row.verdict == verdict])
    ]
    return f"{said}: {'; '.join(claims)}." if claims else f"{said}; the seeds allow no claim."


def row_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows as dicts for JSON, with values that are not rounded."""
    names = [field.name for field in dataclasses.fields(Row) if field.name != "group"]
    of_group = ("network", "dataset", "train_samples", "evaluated_on")
    return [
        {
            "group": row.group.label,
            **{name: getattr(row.group.first, name) for name in of_group},
            **{name: getattr(row, name) for name in names},
        }
        for row in rows
    ]


# How well the policy of an arm found the wrong labels: ``group``, ``arm``, ``seeds`` (their number)
# and the figures of ``Detection``, as means over the seeds, None if no seed has the figure.
FoundRow = dict[str, Any]


def found_rows(group: Group) -> list[FoundRow]:
    """Return one row for each arm with runs whose wrong labels are known; often there are none."""
    rows = []
    # The share of wrong labels stands for their number.
    names = [field.name for field in dataclasses.fields(Detection) if field.name != "wrong"]
    for arm in group.arms:
        found = [of for run in group.of(arm) if (of := run.summary.suspicion) is not None]
        if found:
            means = {name: mean_known(getattr(one, name) for one in found) for name in names}
            rows.append({"group": group.label, "arm": arm, "seeds": len(found), **means})
    return rows


def found_table(rows: Sequence[FoundRow]) -> Table:
    """Return the table of the rows of one group."""
    return table_of(
        "Wrong labels found",
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
        "At the end of the training, means over the seeds in which a value is defined. ROC area: "
        "the probability that the arm suspects a wrong label more than a right one; 0.5 is chance. "
        "Precision: the share of the suspects whose label is wrong. Recall: the share of the wrong "
        "labels that are suspects. R-precision: both, for as many suspects as there are wrong "
        "labels.",
    )


def found_line(rows: Sequence[FoundRow]) -> str:
    """Return one line for a terminal with how well each arm, perhaps of several groups, found."""
    several = len({row["group"] for row in rows}) > 1
    areas = [
        f"{row['arm']}{' of ' + row['group'] if several else ''} {decimal(row['roc_area'], 3)}"
        for row in rows
        if row["roc_area"] is not None
    ]
    return f"Wrong labels found, ROC area: {', '.join(areas) or NOTHING}"


def _seconds(value: float | None) -> str:
    # In a long run, tenths of a second are noise.
    return decimal(value, 1 if value is None or value < 1000 else 0)


def _percent(share: float) -> str:
    return f"{percent(share)} %"


def _ratio(value: float | None) -> str:
    return "an unknown share" if value is None else f"{100 * value:.0f} %"
