"""``fineprune report``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, Margin, Runs, margin_fraction, path_option
from fineprune.cli.output_paths import check_file, inputs_of
from fineprune.cli.results import show_results
from fineprune.errors import InputError


@exits()
def report(
    runs: Runs,
    out: Annotated[Path, path_option("The HTML file to write.")] = Path("report.html"),
    margin: Margin = 0.4,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML file about finished runs. Trains nothing.

    The folder of a scaling experiment has the report that fineprune scale writes.

    Example: fineprune report runs/quick-compare --out report.html
    """
    # Imported here, because NumPy would delay the start of every command.
    from fineprune.runs.files import SCALING
    from fineprune.runs.run import read_runs

    fraction = margin_fraction(margin)
    if any((run / SCALING).is_file() for run in runs):
        _report_scaling(runs, out, as_json)
        return
    read = read_runs(runs)
    check_file("--out", out, inputs_of(*(run.recipe for run in read)))
    about = {"report": str(out), "margin": margin}
    show_results(read, out, fraction, as_json=as_json, about=about)


def _report_scaling(folders: list[Path], out: Path, as_json: bool) -> None:
    # Imported here, because matplotlib and scipy would delay the start of every command.
    from fineprune.experiments.scale_table import read_scaling, scale_rows
    from fineprune.report.scaling.page import write_scale_report
    from fineprune.report.scaling.tables import scale_tables
    from fineprune.report.table import print_tables

    if len(folders) > 1:
        raise InputError(
            f"expected one folder of a scaling experiment, got {len(folders)} folders: report one "
            f"after the other"
        )
    scaling = read_scaling(folders[0])
    check_file("--out", out, inputs_of(*(scaled.run.recipe for scaled in scaling.runs)))
    rows = scale_rows(scaling.runs)
    write_scale_report(scaling, rows, out)
    if as_json:
        typer.echo(json.dumps({"report": str(out), "rows": [asdict(row) for row in rows]}))
        return
    print_tables(scale_tables(rows))
    typer.echo(f"report: {out}")
