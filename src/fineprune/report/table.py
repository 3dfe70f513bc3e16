"""Table: a table of text, and how it is shown in a terminal."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

from fineprune.experiments.arm_table import Difference

NOTHING = "-"

# If a table is too wide for a terminal, the names of its lines may be broken at their hyphens into
# parts of at least this width.
_NAME_WIDTH = 13

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Table:
    """A table of text, whose first column names the lines.

    The note explains it in sentences. Lines with a paper's results have the same columns.
    """

    title: str
    headers: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]
    note: str = ""
    paper: Sequence[tuple[str, ...]] = ()


def table_of(
    title: str,
    rows: Iterable[_Row],
    columns: Sequence[tuple[str, Callable[[_Row], str]]],
    note: str = "",
    paper: Sequence[tuple[str, ...]] = (),
) -> Table:
    """Return a table of rows, whose columns are a header and what returns the cell of a row."""
    lines = [tuple(cell(row) for _, cell in columns) for row in rows]
    return Table(title, tuple(header for header, _ in columns), lines, note, paper)


def print_tables(tables: Iterable[Table]) -> Console:
    """Print tables, as wide as the terminal allows, and return it for what stands below them."""
    console = Console(markup=False, emoji=False)
    for table in tables:
        console.print(rich_table(table, console.width))
    return console


def rich_table(table: Table, width: int) -> TerminalTable:
    """Return a table for a terminal of a width.

    If it is wider, texts are broken between words, and the names of the lines at their hyphens. If
    even this is too wide, each cell has a line of its own: parts of numbers would be misread.
    """
    columns: list[Sequence[str]] = list(zip(table.headers, *table.lines, *table.paper, strict=True))
    if _width(columns) > width:
        names = _narrow(columns[0], r"[ \n]|(?<=-)", _NAME_WIDTH)
        columns = [names, *(_narrow(column, r"[ \n]", 0) for column in columns[1:])]
    rich = TerminalTable(
        title=Text(table.title),
        caption=Text(table.note),
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    if _width(columns) > width:
        return _one_cell_per_line(table, rich)
    headers, *lines = zip(*columns, strict=True)
    for place, header in enumerate(headers):
        rich.add_column(Text(header), justify="right" if place else "left", overflow="fold")
    for place, line in enumerate(lines):
        style = "dim" if place >= len(table.lines) else ""
        rich.add_row(*(Text(cell, style=style) for cell in line))
    return rich


def _one_cell_per_line(table: Table, rich: TerminalTable) -> TerminalTable:
    """Fill a table for a terminal that is narrower than the lines of the table."""
    first, *others = (header.replace("\n", " ") for header in table.headers)
    rich.add_column(Text(first), overflow="fold")
    rich.add_column("", justify="right", no_wrap=True)
    for name, *cells in [*table.lines, *table.paper]:
        rich.add_row(Text(name, style="bold"), "")
        for header, cell in zip(others, cells, strict=True):
            rich.add_row(Text(f"  {header}"), Text(cell.replace("\n", " ")))
    return rich


def _width(columns: Iterable[Sequence[str]]) -> int:
    """Return the width of a table, in which there is a space around each column."""
    widths = (max(len(part) for cell in column for part in cell.split("\n")) for column in columns)
    return sum(width + 1 for width in widths) + 1


def _narrow(column: Sequence[str], breaks: str, least: int) -> list[str]:
    """Break the texts of a column where a pattern allows it, so that it is as wide as one part."""
    width = max(least, *(len(part) for text in column for part in re.split(breaks, text)))
    return [textwrap.fill(text, width, break_on_hyphens="-" in breaks) for text in column]


def number(value: float | None, form: str, missing: str = NOTHING) -> str:
    """Format a number that may be missing."""
    return missing if value is None else format(value, form)


def whole(value: float | None) -> str:
    """Format a number as a whole number."""
    return number(value, ",.0f")


def decimal(value: float | None, digits: int) -> str:
    """Format a number with some digits after the point."""
    return number(value, f",.{digits}f")


def percent(value: float | None, digits: int = 2) -> str:
    """Format a fraction as a percentage, without the sign."""
    return NOTHING if value is None else f"{100 * value:.{digits}f}"


def points(difference: Difference | None) -> str:
    """Format a difference of fractions in percentage points, with half its 95 % interval if any."""
    return NOTHING if difference is None else difference.points()
