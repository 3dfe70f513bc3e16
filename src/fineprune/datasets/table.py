"""Tables in CSV files that a person or a program has written."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from fineprune.errors import InputError, explaining


def table_rows(
    file: Path, needed: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each row, for messages, and its values of some columns.

    Columns may come in any order, beside others. Values are separated by commas, semicolons or
    tabs, as by spreadsheets of different countries. Rows without any of these values are left out.

    Args:
        file: The table, in UTF-8, whose first line names the columns.
        needed: The columns that there must be.
        optional: Further columns, whose values are "" if they are missing.

    Raises:
        InputError: It is no such table. OSError, UnicodeError: it cannot be read.
    """
    with (
        file.open(encoding="utf-8-sig", newline="") as opened,
        explaining(f"expected a table in {file}, cannot read it", csv.Error),
    ):
        separator = max(",;\t", key=opened.readline().count)
        opened.seek(0)
        table = csv.reader(opened, delimiter=separator)
        header = [name.strip() for name in next(table, [])]
        there = [*needed, *(name for name in optional if name in header)]
        if any(header.count(name) != 1 for name in there):
            raise InputError(
                f"expected one column for each of {' and '.join(there)} in the first line of "
                f"{file}, got {', '.join(header) or 'none'}"
            )
        columns = [header.index(name) if name in header else -1 for name in (*needed, *optional)]
        for row in table:
            place = f"line {table.line_num} of {file}"
            if row and len(row) != len(header):
                raise InputError(
                    f"expected {len(header)} values in {place}, as in its first line, got "
                    f"{len(row)}"
                )
            values = [row[column] if column >= 0 else "" for column in columns] if row else []
            if any(value and not value.isspace() for value in values):
                yield place, values
