"""The table of a comparison, for the terminal, as Markdown and as JSON."""

import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fineprune.experiments.arm_table import Difference, Row
from fineprune.report.paper import paper_rows

NOTHING = "-"

_ARM_WIDTH = 13  # Of the column in a terminal, in characters.

_NOTES = (
    "Accuracy on the {sets} set. Time saved: relative to full, paired by seed. Saved in epochs: "
    "from the median epoch times of each run. Points: percentage points, paired by seed, ± half "
    "the 95 % interval. Equivalent: p-value of the test that the difference is within the margin. "
    "Best three: mean of the best three evaluations, as in the paper; it is too "
    "high, because it selects epochs on the evaluated set."
)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        header: The name of the column, with the unit.
        meaning: The explanation of the column, as a phrase.
        cell: Returns the text of the cell in a row.
        short: The name for a terminal of 80 characters, with line breaks; None if the column is not
            shown there.
        part: The part of the table to which the column belongs, ``accuracy`` or ``cost``; None for
            both parts.
    """

    header: str
    meaning: str
    cell: Callable[[Row], str]
    short: str | None = None
    part: str | None = None


def _count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    # In a long run, tenths of a second are noise.
    return NOTHING if value is None else f"{value:,.{1 if value < 1000 else 0}f}"


def percent(value: float | None, digits: int = 2) -> str:
    """Format a fraction as a percentage, without the sign."""
    return NOTHING if value is None else f"{100 * value:.{digits}f}"


def points(difference: Difference | None) -> str:
    """Format a difference of fractions in percentage points, with half its 95 % interval if any."""
    if difference is None:
        return NOTHING
    text = f"{100 * difference.mean:+.2f}"
    if difference.half_width is None:
        return text
    return f"{text} ±{100 * difference.half_width:.2f}"


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
        lambda row: NOTHING if row.seeds is None else str(row.seeds),
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
        "time\nsaved\n%",
        part="cost",
    ),
    Column(
        "saved in epochs, %",
        "training time saved according to the median times of the full and pruned epochs of each "
        "run; other work on the machine affects this value less",
        lambda row: percent(row.saved_in_epochs),
        "saved\nin\nepochs\n%",
        part="cost",
    ),
    Column(
        "overhead, s",
        "time per run for recording losses and selecting samples",
        lambda row: (
            NOTHING if row.seconds_bookkeeping is None else f"{row.seconds_bookkeeping:.2f}"
        ),
        part="cost",
    ),
    Column(
        "samples trained",
        "number of sample-steps, that is, of samples summed over the epochs; each is one backward "
        "pass of one sample",
        lambda row: _count(row.samples_trained),
        part="cost",
    ),
    Column(
        "forward passes",
        "number of forward passes of one sample; larger than “samples trained” if the policy "
        "computes losses of samples that it then skips",
        lambda row: _count(row.forward_samples),
        part="cost",
    ),
    Column("steps", "number of optimizer steps", lambda row: _count(row.steps), part="cost"),
    Column(
        "skipped, %",
        "share of the full run's sample-steps that is not trained",
        lambda row: percent(row.skipped),
        "samples\nskipped\n%",
    ),
    Column(
        "last epoch, %",
        "accuracy after the last epoch, which is the main result",
        lambda row: percent(row.accuracy_last),
        "last\nepoch\n%",
        part="accuracy",
    ),
    Column(
        "last vs full, points",
        "difference of the last-epoch accuracy from that of the full run, in percentage points, "
        "paired by seed, ± half the 95 % interval",
        lambda row: points(row.last_difference),
        "last\nvs full\npoints",
        part="accuracy",
    ),
    Column(
        "equivalent, p",
        "p-value of two one-sided t-tests; below 0.05, the last-epoch accuracy is equivalent to "
        "that of the full run within the margin",
        lambda row: _p_value(row.equivalence),
        "equi-\nval.\np",
        part="accuracy",
    ),
    Column(
        "best three, %",
        "mean of the best three accuracies of a run, as in the paper; it is too high in every arm, "
        "because it selects epochs on the evaluated set",
        lambda row: percent(row.accuracy_best3),
        "best\nthree\n%",
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
        lambda row: _reached(row, row.samples_to_full, _count),
        part="cost",
    ),
)


# The columns of each part, in which the first ones are repeated: one table would be too wide.
PARTS = {
    part: tuple(column for column in COLUMNS if column.part in (None, part))
    for part in ("accuracy", "cost")
}


def rich_table(rows: Sequence[Row]) -> Table:
    """Return the table for the terminal. The paper's results, if any, follow each group."""
    groups = _groups(rows)
    sets = " or ".join(dict.fromkeys(str(row.evaluated_on) for row in rows))
    table = Table(
        title=Text(groups[0][0].group) if len(groups) == 1 else None,
        caption=Text(_NOTES.format(sets=sets)),
        box=box.SIMPLE_HEAD,
        padding=0,  # The box separates columns by a space; more does not fit into 80 characters.
        pad_edge=False,
        caption_justify="left",
    )
    columns = [column for column in COLUMNS if column.short is not None]
    for column in columns:
        header = Text(column.short or "")
        if column is COLUMNS[0]:
            table.add_column(header, min_width=_ARM_WIDTH)
        else:
            table.add_column(header, justify="right", no_wrap=True)
    for group in groups:
        if len(groups) > 1:
            table.add_section()
            table.add_row(Text(group[0].group, style="bold"))
        for row in [*group, *paper_rows(group[0])]:
            style = "dim" if row.seeds is None else ""
            cells = [column.cell(row) for column in columns]
            cells[0] = textwrap.fill(cells[0], _ARM_WIDTH)  # Breaks names at their hyphens.
            table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def markdown_table(rows: Sequence[Row]) -> str:
    """Return the table as Markdown, with a heading before each group if there are several."""
    groups = _groups(rows)
    parts = []
    for group in groups:
        lines = [f"**{_escaped(_heading(group))}**", ""] if len(groups) > 1 else []
        lines.append(_line(column.header for column in COLUMNS))
        lines.append(_line("---" if column is COLUMNS[0] else "---:" for column in COLUMNS))
        for row in [*group, *paper_rows(group[0])]:
            lines.append(_line(_escaped(column.cell(row)) for column in COLUMNS))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def row_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows as dicts for JSON, with the values of ``Row``, which are not rounded.

    A difference is ``{"mean": ..., "low": ..., "high": ..., "pairs": ...}``, in which ``low`` and
    ``high`` are null if there is only one pair.
    """
    dicts = []
    for row in rows:
        values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        for name, value in values.items():
            if isinstance(value, Difference):
                values[name] = {
                    "mean": value.mean,
                    "low": value.low,
                    "high": value.high,
                    "pairs": value.pairs,
                }
        dicts.append(values)
    return dicts


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    return [list(group) for _, group in itertools.groupby(rows, lambda row: row.group)]


def _heading(rows: Sequence[Row]) -> str:
    return f"{rows[0].group}, accuracy on the {rows[0].evaluated_on} set"


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
