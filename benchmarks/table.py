"""Prints the results of a benchmark as a table in Markdown."""

from typing import Any


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table whose columns are the keys of the first row."""
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(_cell, row.values())) + " |")
    print()


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else f"{value:.3g}"
