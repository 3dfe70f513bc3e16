"""``fineprune report``."""

from pathlib import Path
from typing import Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, Margin, margin_fraction, path_option
from fineprune.cli.outputs import check_file, inputs_of_runs
from fineprune.cli.results import show_results
from fineprune.runs.run import read_runs


@exits()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="The folders of finished runs or comparisons.")
    ],
    out: Annotated[Path, path_option("The HTML file to write.")] = Path("report.html"),
    margin: Margin = 0.4,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML file about finished runs. Trains nothing.

    Example: fineprune report runs/quick-compare --out report.html
    """
    fraction = margin_fraction(margin)
    read = read_runs(runs)
    check_file("--out", out, inputs_of_runs(read))
    about = {"report": str(out), "margin": margin}
    show_results(read, out, fraction, as_json=as_json, about=about)
