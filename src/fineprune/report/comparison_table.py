"""The table of a comparison: its columns, its lines, and its rows as JSON."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from fineprune.experiments.arm_table import Difference, Row
from fineprune.report.paper import paper_rows
from fineprune.report.table import NOTHING, Table, decimal, percent, points, whole

# The header of the column with the main result.
_MAIN = "last epoch, %"

_NOTE = (
    "±: half the 95 % interval, paired by seed. Best three: as in the paper, but too high, because "
    "it selects epochs on the evaluated set."
)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        header: The name of the column, with the unit.
        meaning: The explanation of the column, as a phrase.
        cell: Returns the text of the cell in a row.
        short: The name for a terminal of 80 characters, in two lines; None if the column is not
            shown there.
        part: The table of a page to which the column belongs, ``accuracy`` or ``cost``; None for
            both, because one table would be too wide.
        of: The attribute of the rows without which the column is not shown; None to show it always.
    """

    header: str
    meaning: str
    cell: Callable[[Row], str]
    short: str | None = None
    part: str | None = None
    of: str | None = None


def columns_for(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of a table with these rows."""
    return [
        column
        for column in COLUMNS
        if column.of is None or any(getattr(row, column.of) is not None for row in rows)
    ]


def _seconds(value: float | None) -> str:
    # In a long run, tenths of a second are noise.
    return decimal(value, 1 if value is None or value < 1000 else 0)


def _p_value(value: float | None) -> str:
    if value is None:
        return NOTHING
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _reached(row: Row, value: float | None, cell: Callable[[float | None], str]) -> str:
    """Format a value that exists only if the accuracy of the full run is reached."""
    if row.reaching is None:
        return NOTHING
    if row.reaching == 0:
        return "never"
    return f"in {100 * row.reaching:.0f} % of the runs" if row.reaching < 1 else cell(value)


COLUMNS = (
    Column("arm", "name of the arm", lambda row: row.arm, "arm"),
    Column(
        "seeds",
        "number of runs; the other values are means over them",
        lambda row: whole(row.seeds),
        "seeds",
    ),
    Column(
        "train, s",
        "wall-clock time of the training, including overhead and excluding evaluation",
        lambda row: _seconds(row.seconds_train),
        "train\ns",
        part="cost",
    ),
    Column(
        "time saved, %",
        "training time saved relative to the full run with the same seed",
        lambda row: percent(row.time_saved),
        "time\nsaved\N{NO-BREAK SPACE}%",
        part="cost",
    ),
    Column(
        "saved in epochs, %",
        "training time saved according to the median times per sample of the full and pruned "
        "epochs of each run; other work on the machine affects this value less",
        lambda row: percent(row.saved_in_epochs),
        part="cost",
    ),
    Column(
        "overhead, s",
        "time per run for recording losses and selecting samples",
        lambda row: decimal(row.seconds_bookkeeping, 2),
        part="cost",
    ),
    Column(
        "samples trained",
        "number of sample-steps, that is, of samples summed over the epochs; each is one pass of "
        "one sample",
        lambda row: whole(row.samples_trained),
        part="cost",
    ),
    Column("steps", "number of optimizer steps", lambda row: whole(row.steps), part="cost"),
    Column(
        "both trainings, s",
        "wall-clock time of a second training and of the first one, whose suspects it leaves out",
        lambda row: _seconds(row.seconds_of_both),
        part="cost",
        of="seconds_of_both",
    ),
    Column(
        "samples of both trainings",
        "number of sample-steps of a second training and of the first one",
        lambda row: whole(row.samples_of_both),
        part="cost",
        of="samples_of_both",
    ),
    Column(
        "skipped, %",
        "share of the full run's sample-steps that is not trained",
        lambda row: percent(row.skipped),
        "skipped\n%",
    ),
    Column(
        _MAIN,
        "accuracy after the last epoch, which is the main result",
        lambda row: percent(row.accuracy_last),
        "last\nepoch\N{NO-BREAK SPACE}%",
        part="accuracy",
    ),
    Column(
        "last vs full, points",
        "difference of the last-epoch accuracy from that of the full run, in percentage points, "
        "paired by seed, ± half the 95 % interval",
        lambda row: points(row.last_difference),
        "vs\N{NO-BREAK SPACE}full\npoints",
        part="accuracy",
    ),
    Column(
        "equivalent, p",
        "p-value of two one-sided t-tests; below 0.05, the last-epoch accuracy is equivalent to "
        "that of the full run within the margin",
        lambda row: _p_value(row.equivalence),
        "equiv\np",
        part="accuracy",
    ),
    Column(
        "best three, %",
        "mean of the best three accuracies of a run, as in the paper; it is too high in every arm, "
        "because it selects epochs on the evaluated set",
        lambda row: percent(row.accuracy_best3),
        "best\nthree\N{NO-BREAK SPACE}%",
        part="accuracy",
    ),
    Column(
        "best three vs full, points",
        "difference of the best-three accuracy from that of the full run, in percentage points",
        lambda row: points(row.best3_difference),
        part="accuracy",
    ),
    Column(
        "time to full's accuracy, s",
        "training time until an evaluation first reaches the last-epoch accuracy of the full run "
        "with the same seed; one evaluation is enough, so chance shortens it in every arm",
        lambda row: _reached(row, row.seconds_to_full, _seconds),
        part="cost",
    ),
    Column(
        "samples to full's accuracy",
        "number of sample-steps until then",
        lambda row: _reached(row, row.samples_to_full, whole),
        part="cost",
    ),
)


def comparison_table(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Return the table of one group, with the paper's results if there are any."""

    def lines(shown: Sequence[Row]) -> list[tuple[str, ...]]:
        return [tuple(column.cell(row) for column in columns) for row in shown]

    headers = tuple(column.header for column in columns)
    paper = lines(paper_rows(rows[0].group))
    return Table(title, headers, lines(rows), paper=paper, main=_MAIN)


def terminal_tables(groups: Sequence[Sequence[Row]]) -> list[Table]:
    """Return the tables with the columns that fit into 80 characters, and their explanation."""
    brief = [
        dataclasses.replace(column, header=column.short)
        for column in COLUMNS
        if column.short is not None
    ]
    tables = [
        comparison_table(
            f"{rows[0].group.label}, accuracy on the {rows[0].group.first.evaluated_on} set",
            rows,
            brief,
        )
        for rows in groups
    ]
    notes = [_NOTE, *(_cost_of_both(row) for rows in groups for row in rows if row.samples_of_both)]
    note = " ".join(notes)
    return [*tables[:-1], *(dataclasses.replace(table, note=note) for table in tables[-1:])]


def _cost_of_both(row: Row) -> str:
    """Return a sentence on the cost of a second training and of both."""
    assert row.samples_trained is not None
    return (
        f"{row.arm}: {whole(row.samples_trained)} sample-steps, {_seconds(row.seconds_train)} s; "
        f"with the first training: {whole(row.samples_of_both)}, {_seconds(row.seconds_of_both)} s."
    )


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
            "wrong_labels": first.suspicion is not None,
            "evaluated_on": first.evaluated_on,
        }
        for field in dataclasses.fields(row)[1:]:
            value = getattr(row, field.name)
            if isinstance(value, Difference):
                value = {name: getattr(value, name) for name in ("mean", "low", "high", "pairs")}
            values[field.name] = value
        dicts.append(values)
    return dicts
