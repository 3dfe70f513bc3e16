"""``fineprune report``."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson
from fineprune.experiments.arm_table import table_rows
from fineprune.report.html import write_report
from fineprune.report.tables import rich_table, row_dicts
from fineprune.runs.files import read_runs


@exits()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of comparisons.")],
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write finished runs up as one self-contained HTML file. Trains nothing.

    Example: fineprune report runs/digits-compare --out report.html
    """
    read = read_runs(runs)
    rows = table_rows(read)
    write_report(read, out)
    if as_json:
        typer.echo(json.dumps({"report": str(out), "rows": row_dicts(rows)}))
        return
    Console().print(rich_table(rows))
    typer.echo(f"report: {out}")
