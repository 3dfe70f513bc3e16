"""``fineprune relabel``."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, path_option
from fineprune.cli.output_paths import check_file
from fineprune.errors import InputError
from fineprune.inspection.inspected import read_inspected
from fineprune.inspection.relabel import label_table
from fineprune.runs.files import RECIPE
from fineprune.runs.run import read_run
from fineprune.writing import make_folder, write_atomically


@exits()
def relabel(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="The folders of finished runs on the same labels, such as several seeds."
        ),
    ],
    out: Annotated[Path, path_option("The table to write; it must not exist.")] = Path(
        "labels.csv"
    ),
    most: Annotated[
        int | None,
        typer.Option(help="The number of suspects to list [the estimated number of wrong labels]."),
    ] = None,
    accept: Annotated[
        float | None,
        typer.Option(help="Accept suggestions with at least this agreement, such as 0.9."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the labels of a run's data to a table, with suspected wrong labels first.

    Edit the column "label" (a class, or "drop" to leave a sample out), and train with the command
    that is printed. Without --accept, no label is changed. The evidence of several runs is summed.

    Example: fineprune relabel runs/first --out labels.csv
    """
    check_file("--out", out)
    if out.suffix != ".csv":  # ``data.labels`` reads others as something else.
        raise InputError(
            f"expected a .csv file for --out, which data.labels reads as a table, got {out}: give "
            f"a name such as {out.with_suffix('.csv')}"
        )
    if out.exists():
        raise InputError(
            f"expected a new file for --out, got {out}, which may have been edited: give another "
            f"name, or move it away"
        )
    if most is not None and most < 0:
        raise InputError(f"expected --most to be at least 0, got {most}")
    if accept is not None and not 0 < accept <= 1:
        raise InputError(f"expected --accept above 0 and at most 1, got {accept:g}")
    folders = [run.resolve() for run in runs]
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise InputError(f"expected each run once, since evidence is added, got {twice[0]} twice")
    read = [read_run(run) for run in runs]
    table = label_table(read_inspected(read), most, accept)
    make_folder(out.parent)
    write_atomically(out, table.text)
    settings = [f"data.labels={out}"]
    settings += [
        f"data.{name}=none"
        for name in ("label_noise", "label_noise_map")
        if read[0].recipe.get("data", {}).get(name) is not None
    ]
    # "." and ".." are no names to add to.
    trained = runs[0] if runs[0].name not in ("", "..") else runs[0].resolve()
    command = ["fineprune", "train", str(runs[0] / RECIPE), "--out", f"{trained}-relabelled"]
    to_train = shlex.join([*command, "--set", *settings])
    if as_json:
        figures = {"suspects": table.suspects, "accepted": table.accepted}
        typer.echo(json.dumps({"file": str(out), **figures, "command": to_train}))
        return
    accepted = "" if accept is None else f", {table.accepted:,} suggestions accepted"
    typer.echo(f"labels: {out} ({table.suspects:,} suspects first{accepted})")
    if most is None and not table.suspects:
        typer.echo(
            "no label is estimated to be wrong, perhaps because the network has learned wrong "
            "labels by heart: --most 50 lists the 50 most suspicious ones"
        )
    typer.echo(f"train with it: {to_train}")
