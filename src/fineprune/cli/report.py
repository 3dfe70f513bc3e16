"""``fineprune report``."""

from pathlib import Path
from typing import Annotated

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, Margin, Runs, margin_fraction, path_option
from fineprune.cli.output_paths import check_file, inputs_of
from fineprune.cli.results import show_results, show_scaling
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
    from fineprune.experiments.scale_table import read_scaling

    if len(folders) > 1:
        raise InputError(
            f"expected one folder of a scaling experiment, got {len(folders)} folders: report one "
            f"after the other"
        )
    scaling = read_scaling(folders[0])
    check_file("--out", out, inputs_of(*(scaled.run.recipe for scaled in scaling.runs)))
    show_scaling(scaling, out, as_json=as_json, about={"report": str(out)})
