"""Prints the tables of finished runs and writes their report, for several commands."""

import json
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from fineprune.runs.run import Run


def show_results(
    runs: Sequence[Run], page: Path, fraction: float, *, as_json: bool, about: dict[str, object]
) -> None:
    """Write the report of finished runs, and print their tables.

    Args:
        runs: The runs, which may belong to several groups.
        page: The HTML file to write.
        fraction: The margin of the equivalence test, as a fraction.
        as_json: Whether to print JSON instead of tables.
        about: Further entries of the JSON, which come first.

    Raises:
        InputError: The runs cannot be compared.
    """
    # Imported here, because matplotlib and scipy would delay the start of every command.
    from fineprune.experiments.arm_table import table_rows
    from fineprune.report.html import write_report
    from fineprune.report.tables import rich_table, row_dicts
    from fineprune.report.wrong_labels import all_found_rows, found_dicts, found_table

    rows = table_rows(runs, fraction)
    found = all_found_rows(runs)
    write_report(runs, page, fraction)
    if as_json:
        wrong_labels = {"wrong_labels": found_dicts(found)} if found else {}
        typer.echo(json.dumps({**about, "rows": row_dicts(rows), **wrong_labels}))
        return
    Console().print(rich_table(rows))
    if found:
        Console().print(found_table(found))
    typer.echo(f"report: {page}")
