"""Makes tables in Markdown of the results of benchmarks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table of text, of which the first columns are aligned to the left."""
    marks = [*["---"] * left, *["---:"] * (len(headers) - left)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [headers, marks, *rows])


def show(rows: Sequence[Mapping[str, Any]], digits: int = 3) -> None:
    """Print a table whose columns are the keys of the first row."""
    headers = [key.replace("_", " ") for key in rows[0]]
    print(markdown(headers, [[_cell(value, digits) for value in row.values()] for row in rows]))
    print()


def _cell(value: Any, digits: int) -> str:
    if isinstance(value, float):
        return f"{value:,.{digits}g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value)
