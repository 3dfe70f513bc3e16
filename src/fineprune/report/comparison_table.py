"""The tables of a comparison, its headline, and its rows as JSON.

A column is a pair: its header, and what returns its cell in a row.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from fineprune.experiments.arm_table import BASELINE, WATCHED, Difference, Row
from fineprune.report.table import NOTHING, Table, decimal, percent, points, table_of, whole

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
            f"better or worse if the interval excludes zero, and else the question is open; with "
            f"one seed, no claim is possible. Ratios: the sample-steps and the training time of "
            f"{method}, divided by those of the arm. Verdicts are not corrected for their number."
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
        ("predicted to save, %", lambda row: percent(row.predicted_saving)),
        ("saved, %", lambda row: points(row.time_saved)),
        ("overhead, s", lambda row: decimal(_overhead(row), 2)),
    ]
    note = (
        "Means over the seeds. Predicted: the paper's formulas 2 to 7, with the time of a step of "
        "full training, which records nothing. Saved: wall-clock time, relative to full training, "
        "paired by seed. Overhead: what the method itself records, and selecting samples; it is "
        "part of the training."
    )
    if any(_evidence(row) is not None for row in rows):
        columns.append(("evidence on labels, s", lambda row: decimal(_evidence(row), 2)))
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
    """Return rows as dicts for JSON, with values that are not rounded.

    A difference is ``{"mean": ..., "low": ..., "high": ..., "pairs": ...}``, in which ``low`` and
    ``high`` are null if there is only one pair.
    """
    dicts = []
    for row in rows:
        first = row.group.first
        values = {
            "group": row.group.label,
            "network": first.network,
            "dataset": first.dataset,
            "train_samples": first.train_samples,
            "wrong_labels": any(run.summary.suspicion is not None for run in row.group.runs),
            "evaluated_on": first.evaluated_on,
        }
        for field in dataclasses.fields(row)[1:]:
            value = getattr(row, field.name)
            if isinstance(value, Difference):
                value = {name: getattr(value, name) for name in ("mean", "low", "high", "pairs")}
            values[field.name] = value
        dicts.append(values)
    return dicts


def _overhead(row: Row) -> float | None:
    return None if row.arm == WATCHED else row.seconds_bookkeeping


def _evidence(row: Row) -> float | None:
    return row.seconds_bookkeeping if row.arm == WATCHED else None


def _seconds(value: float | None) -> str:
    # In a long run, tenths of a second are noise.
    return decimal(value, 1 if value is None or value < 1000 else 0)


def _percent(share: float) -> str:
    return f"{percent(share)} %"


def _ratio(value: float | None) -> str:
    return "an unknown share" if value is None else f"{100 * value:.0f} %"
