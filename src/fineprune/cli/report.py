"""``fineprune report``."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, Margin, margin_fraction
from fineprune.cli.outputs import check_file
from fineprune.runs.run import read_runs


@exits()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="The folders of finished runs or comparisons.")
    ],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    margin: Margin = 0.4,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML file about finished runs. Trains nothing.

    Example: fineprune report runs/quick-compare --out report.html
    """
    # Imported here, because matplotlib and scipy would delay the start of every command.
    from fineprune.experiments.arm_table import table_rows
    from fineprune.report.html import write_report
    from fineprune.report.tables import rich_table, row_dicts

    fraction = margin_fraction(margin)
    check_file("--out", out)
    read = read_runs(runs)
    rows = table_rows(read, fraction)
    write_report(read, out, fraction)
    if as_json:
        answer = {"report": str(out), "margin": margin, "rows": row_dicts(rows)}
        typer.echo(json.dumps(answer))
        return
    Console().print(rich_table(rows))
    typer.echo(f"report: {out}")
