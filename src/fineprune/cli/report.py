"""``fineprune report``."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, Margin, Runs, margin_fraction, path_option
from fineprune.cli.output_paths import check_file, inputs_of
from fineprune.cli.results import show_results
from fineprune.errors import InputError
from fineprune.runs.run import read_runs
from fineprune.runs.unfinished import read_followed, state_of

_POLL_SECONDS = 1.0

# So many looks in a row may fail: files may be copied from elsewhere at the same time.
_FAILED_LOOKS = 30


@exits()
def report(
    runs: Runs,
    out: Annotated[Path, path_option("The HTML file to write.")] = Path("report.html"),
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Also show unfinished runs, and update the page until all runs are finished.",
        ),
    ] = False,
    margin: Margin = 0.4,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML file about finished runs. Trains nothing.

    With --follow, the page reloads itself while the runs train. Ctrl-C ends the command.

    Example: fineprune report runs/quick-compare --out report.html
    """
    fraction = margin_fraction(margin)
    if follow:
        _follow(runs, out, fraction)
    read = read_runs(runs)
    check_file("--out", out, inputs_of(*(run.recipe for run in read)))
    about = {"report": str(out), "margin": margin}
    show_results(read, out, fraction, as_json=as_json, about=about)


def _follow(paths: Sequence[Path], page: Path, margin: float) -> None:
    """Write the page whenever the files of the runs change, until all runs are finished."""
    # Imported here, because matplotlib and scipy would delay the start of every command.
    from fineprune.report.html import write_report

    finished, unfinished = read_followed(paths)
    recipes = [run.recipe for run in finished] + [run.recipe for run in unfinished]
    check_file("--out", page, inputs_of(*recipes))
    typer.echo(f"unfinished runs: {len(unfinished)}; following them in {page}", err=True)
    shown, failed = None, 0
    try:
        while unfinished:
            try:
                # Before the files are read, so that no change between the two is missed.
                state = state_of(paths)
                if state != shown:
                    finished, unfinished = read_followed(paths)
            except InputError:
                failed += 1
                if failed == _FAILED_LOOKS:
                    raise
            else:
                if state != shown and (finished or unfinished):
                    write_report(finished, page, margin, unfinished, reloads=bool(unfinished))
                shown, failed = state, 0
            if unfinished:
                time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        if shown is not None:
            write_report(finished, page, margin, unfinished)  # It does not load itself again.
        raise
