"""Prints the tables of finished runs and writes their report, for several commands."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from fineprune.experiments.scale_table import Scaling
    from fineprune.runs.run import Run


def show_results(
    runs: "Sequence[Run]", page: Path, fraction: float, *, as_json: bool, about: dict[str, object]
) -> None:
    """Write the report of finished runs, and print their results and, last, their headlines."""
    # Imported here, because matplotlib and scipy would delay the start of every command.
    from fineprune.experiments.arm_table import group_rows, grouped
    from fineprune.report.comparison import write_report
    from fineprune.report.comparison_table import (
        found_line,
        found_rows,
        headline,
        results_table,
        row_dicts,
    )
    from fineprune.report.facts import cautions, chosen_rates
    from fineprune.report.table import print_tables
    from fineprune.runs.files import json_text

    groups = grouped(runs)
    rows = {group.label: group_rows(group, fraction) for group in groups}
    found = [row for group in groups for row in found_rows(group)]
    said = [f"{group.label}: {line}" for group in groups for line in cautions(group.runs)]
    headlines = {label: headline(of_group) for label, of_group in rows.items()}
    write_report(runs, page, fraction)
    if as_json:
        dicts = [row for of_group in rows.values() for row in row_dicts(of_group)]
        some = {"wrong_labels": found, "cautions": said}
        there = {name: of for name, of in some.items() if of}
        typer.echo(json_text({**about, "headlines": headlines, "rows": dicts, **there}))
        return
    tables = [results_table(of_group, fraction) for of_group in rows.values()]
    note = "The page explains the columns."
    console = print_tables(
        [
            replace(table, title=f"{label}, {of_group[0].group.first.evaluated_on} set", note=note)
            for (label, of_group), table in zip(rows.items(), tables, strict=True)
        ]
    )
    if found:
        typer.echo(found_line(found))
    for row in itertools.chain.from_iterable(rows.values()):
        if row.samples_of_both is not None:
            said.append(
                f"{row.arm}, with the first training: {row.samples_of_both:,.0f} sample-steps."
            )
    for group in groups:
        if (rates := chosen_rates(group.runs)) is not None:
            said.append(f"{group.label}: the learning rate is {rates}.")
    for sentence in said:
        console.print(sentence, highlight=False)
    typer.echo(f"report: {page}")
    for label, sentence in headlines.items():
        typer.echo(sentence if len(headlines) == 1 else f"{label}: {sentence}")


def show_scaling(
    scaling: "Scaling",
    page: Path,
    target_loss: float | None = None,
    *,
    as_json: bool,
    about: Mapping[str, object],
) -> None:
    """Write the report of a scaling experiment, and print its tables."""
    from fineprune.experiments.scale_table import scale_rows
    from fineprune.report.scaling.page import scale_caveats, write_scale_report
    from fineprune.report.scaling.tables import scale_tables
    from fineprune.report.table import print_tables
    from fineprune.runs.files import json_text

    rows = scale_rows(scaling.runs, target_loss)
    write_scale_report(scaling, rows, page)
    if as_json:
        typer.echo(json_text({**about, "rows": rows}))
        return
    console = print_tables(scale_tables(rows))
    for sentence in scale_caveats(scaling):
        console.print(f"- {sentence}", style="dim", highlight=False)
    typer.echo(f"report: {page}")
