"""Table: a table whose cells are text, for pages and terminals."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        title: The title.
        headers: The headers of the columns. The first column contains the names of the lines.
        lines: The cells of each line.
        note: The explanation, in sentences.
        paper: The lines with a paper's results, which have the same columns.
    """

    title: str
    headers: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]
    note: str
    paper: tuple[tuple[str, ...], ...] = ()
