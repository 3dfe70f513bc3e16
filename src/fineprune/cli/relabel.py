"""``fineprune relabel``."""

from pathlib import Path
from typing import Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import path_option
from fineprune.cli.outputs import check_file
from fineprune.errors import InputError
from fineprune.runs.files import write_atomically
from fineprune.runs.run import read_run


@exits()
def relabel(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    out: Annotated[Path, path_option("The table to write; it must not exist.")] = Path(
        "labels.csv"
    ),
    most: Annotated[
        int | None,
        typer.Option(help="How many suspects to list; by default those with a loss above chance."),
    ] = None,
) -> None:
    """Write the labels of a run's data to a table, with suspected wrong labels first.

    Edit the column "label" (a class, or "drop" to leave an image out), and train with
    data.labels = "labels.csv". Nothing is changed automatically.

    Example: fineprune relabel runs/first --out labels.csv
    """
    # Imported here, because torch would delay the start of every command.
    from fineprune.inspection.inspected import read_inspected
    from fineprune.inspection.relabel import label_table

    check_file("--out", out)
    if out.exists():
        raise InputError(
            f"expected a new file for --out, got {out}, which may have been edited: give another "
            f"name, or move it away"
        )
    if most is not None and most < 0:
        raise InputError(f"expected --most to be at least 0, got {most}")
    text, suspects = label_table(read_inspected([read_run(run)])[0], most)
    write_atomically(out, text)
    typer.echo(f"labels: {out} ({suspects} suspects first)")
