"""Prints the tables of finished runs and writes their report, for several commands."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from fineprune.runs.run import Run


def show_results(
    runs: "Sequence[Run]", page: Path, fraction: float, *, as_json: bool, about: dict[str, object]
) -> None:
    """Write the report of finished runs, and print their tables and, last, their headlines."""
    # Imported here, because matplotlib and scipy would delay the start of every command.
    from fineprune.experiments.arm_table import group_rows, grouped
    from fineprune.report.comparison_table import row_dicts, terminal_tables
    from fineprune.report.facts import chosen_rates, missing, unequal
    from fineprune.report.html import write_report
    from fineprune.report.table import print_tables
    from fineprune.report.verdict import headline
    from fineprune.report.wrong_labels import found_line, found_rows
    from fineprune.runs.files import json_text

    groups = grouped(runs)
    rows = [group_rows(group, fraction) for group in groups]
    found = [row for group in groups for row in found_rows(group)]
    rates = [
        f"{group.label}: the learning rate is {chosen}"
        for group in groups
        if (chosen := chosen_rates(group.runs)) is not None
    ]
    cautions = [
        f"{group.label}: {sentence}" for group in groups for sentence in unequal(group.runs)
    ]
    headlines = {
        group.label: headline(group, of_group, fraction)
        for group, of_group in zip(groups, rows, strict=True)
    }
    absent = missing(runs)
    write_report(runs, page, fraction)
    if as_json:
        dicts = [row for of_group in rows for row in row_dicts(of_group)]
        some = {"wrong_labels": found, "unequal": cautions, "missing": absent}
        there = {name: of for name, of in some.items() if of}
        typer.echo(json_text({**about, "headlines": headlines, "rows": dicts, **there}))
        return
    console = print_tables(terminal_tables(rows))
    if found:
        typer.echo(found_line(found))
    for sentence in [*rates, *cautions, *absent]:
        console.print(sentence, highlight=False)
    typer.echo(f"report: {page}")
    for label, sentence in headlines.items():
        typer.echo(sentence if len(headlines) == 1 else f"{label}: {sentence}")
