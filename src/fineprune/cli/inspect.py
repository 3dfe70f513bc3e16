"""``fineprune inspect``."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, Runs, path_option
from fineprune.cli.output_paths import check_distinct, check_file, inputs_of
from fineprune.errors import InputError
from fineprune.runs.files import finite
from fineprune.runs.run import read_runs
from fineprune.writing import make_folder

if TYPE_CHECKING:
    from fineprune.inspection.inspected_arm import InspectedArm

# How many suspects of the one arm are printed.
_SUSPECTS = 5


@exits()
def inspect(
    runs: Runs,
    out: Annotated[Path, path_option("The HTML file to write.")] = Path("inspect.html"),
    most: Annotated[
        int | None,
        typer.Option(
            help="The number of suspects to review [the estimated number of wrong labels, at "
            "least 20]."
        ),
    ] = None,
    network: Annotated[
        bool,
        typer.Option(
            help="Pass the samples through the trained network, to show its final predictions and "
            "the nearest neighbours."
        ),
    ] = True,
    csv: Annotated[
        Path | None, path_option("Also write one row per sample to this CSV file.")
    ] = None,
    parquet: Annotated[
        Path | None, path_option("Also write one row per sample to this Parquet file.")
    ] = None,
    own_data: Annotated[
        bool,
        typer.Option(
            "--own-data",
            help="Run the code of user-defined data, to show samples, and of a user-defined "
            "network, to pass samples through it.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which samples were skipped, and which labels are probably wrong. Trains nothing.

    The runs must have kept the history of their samples (run.history, which is on by default).

    Example: fineprune inspect runs/quick-compare --out inspect.html --csv samples.csv
    """
    if most is not None and most < 1:
        raise InputError(f"expected --most to be at least 1, got {most}")
    check_distinct(out=out, csv=csv, parquet=parquet)
    read = read_runs(runs)
    for option, path in (("--out", out), ("--csv", csv), ("--parquet", parquet)):
        if path is not None:
            check_file(option, path, inputs_of(*(run.recipe for run in read)))
    # Imported here, because scipy would delay the start of every command.
    from fineprune.inspection.inspected import read_inspected
    from fineprune.inspection.sample_table import sample_columns, write_csv, write_parquet
    from fineprune.report.inspection import write_inspection

    inspected = read_inspected(read)
    if csv is not None or parquet is not None:
        columns = sample_columns(inspected)
        for path, write in ((csv, write_csv), (parquet, write_parquet)):
            if path is not None:
                make_folder(path.parent)
                write(columns, path)
    summary = write_inspection(inspected, out, most=most, network=network, own_data=own_data)
    if as_json:
        typer.echo(json.dumps(finite({"page": str(out), **dataclasses.asdict(summary)})))
        return
    # A comparison trains its method before the controls that skip samples too.
    shown = next((arm for arm in summary.arms if arm.skipped), summary.arms[0])
    others = len(summary.arms) - 1
    for line in _lines(shown):
        typer.echo(line)
    also = f", with {others} more {'arm' if others == 1 else 'arms'}" if others else ""
    typer.echo(f"page: {out}{also}")


def _lines(arm: "InspectedArm") -> Iterator[str]:
    """Yield what the command prints about the run that stands for an arm."""
    yield (
        f"{arm.name}: {arm.skipped:.1%} of the sample-steps skipped; {arm.suspects:,} of "
        f"{arm.samples:,} labels are suspected"
    )
    if arm.found:
        # Among as many suspects as there are wrong labels, or nearly so many.
        found = min(arm.found, key=lambda found: abs(found.first - (arm.wrong_labels or 0)))
        as_many = "as many as labels are wrong, " if found.first == arm.wrong_labels else ""
        yield (
            f"  of the first {found.first:,} suspects, {as_many}{found.wrong:,} have a wrong label "
            f"({found.by_chance:,.0f} by chance); {found.suggestions_right:,} suggestions are right"
        )
    for suspect in arm.first[:_SUSPECTS]:
        suggestion = f", perhaps {suspect.suggestion}" if suspect.suggestion is not None else ""
        name = suspect.index if suspect.key is None else f"{suspect.key} ({suspect.index})"
        yield f"  suspect {name}: labelled {suspect.label}{suggestion}"
