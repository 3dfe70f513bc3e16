"""``fineprune inspect``."""

import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, Runs, path_option
from fineprune.cli.output_paths import check_file, inputs_of
from fineprune.errors import InputError
from fineprune.runs.files import RECIPE, json_text
from fineprune.runs.run import read_runs
from fineprune.writing import make_folder, write_atomically

if TYPE_CHECKING:
    from fineprune.inspection.inspected import Inspected

# How many suspects are printed.
_SUSPECTS = 5


@exits()
def inspect(
    runs: Runs,
    out: Annotated[Path, path_option("The HTML file to write.")] = Path("inspect.html"),
    most: Annotated[
        int | None,
        typer.Option(help="List so many samples on the page [all suspects, at most 500]."),
    ] = None,
    labels: Annotated[
        Path | None,
        path_option("Also write the labels to this table, which must not exist."),
    ] = None,
    accept: Annotated[
        float | None,
        typer.Option(help="In the table, accept suggestions with this confidence, such as 0.9."),
    ] = None,
    own_data: Annotated[
        bool,
        typer.Option("--own-data", help="Run the code of user-defined data, to show samples."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which labels are probably wrong, on a page to review them. Trains nothing.

    The evidence of several runs on the same labels, as of a comparison, is added. Edit the column
    "label" of the table (a class, or "drop" to leave a sample out), and train with the command that
    is printed. Without --accept, no label is changed.

    Example: fineprune inspect runs/quick-compare --labels labels.csv --accept 0.9
    """
    if most is not None and most < 1:
        raise InputError(f"expected --most to be at least 1, got {most}")
    _check_table(labels, accept)
    if labels is not None and labels.resolve() == out.resolve():
        raise InputError(f"expected --out and --labels to be two files, got {out} for both")
    read = read_runs(runs)
    for option, path in (("--out", out), ("--labels", labels)):
        if path is not None:
            check_file(option, path, inputs_of(*(run.recipe for run in read)))
    # Imported here, because torch would delay the start of every command.
    from fineprune.inspection.inspected import read_inspected
    from fineprune.inspection.label_table import label_table
    from fineprune.report.inspection import write_inspection

    inspected = read_inspected(read)
    told: dict[str, Any] = {}
    if labels is not None:
        text, accepted = label_table(inspected, accept)
        make_folder(labels.parent)
        write_atomically(labels, text)
        command = _training_with(labels, inspected)
        told = {"labels": str(labels), "accepted": accepted, "command": command}
    classes = write_inspection(inspected, out, most=most, own_data=own_data)
    told = {
        "page": str(out),
        "runs": [str(run.path) for run in inspected.runs],
        "samples": inspected.watch.num_samples,
        "suspects": inspected.ranking.num_suspects,
        "first": list(_first(inspected)),
        "classes": [row._asdict() for row in classes],
        "facts": inspected.facts(),
        **told,
    }
    if as_json:
        typer.echo(json_text(told))
        return
    for line in told["facts"]:
        typer.echo(line)
    for suspect in told["first"]:
        name = suspect["index"] if suspect["key"] is None else suspect["key"]
        typer.echo(
            f"  suspect {name}: labelled {suspect['label']}, perhaps {suspect['suggestion']} "
            f"({suspect['confidence']:.0%})"
        )
    if labels is not None:
        typer.echo(f"labels: {labels}, with {told['accepted']:,} suggestions accepted")
        edit = "" if told["accepted"] else "edit its column label, and "
        typer.echo(f"{edit}train with it: {told['command']}")
    typer.echo(f"page: {out}")


def _check_table(labels: Path | None, accept: float | None) -> None:
    if accept is not None and labels is None:
        raise InputError("expected --labels with --accept, got no table: add --labels labels.csv")
    if accept is not None and not 0 < accept <= 1:
        raise InputError(f"expected --accept above 0 and at most 1, got {accept:g}")
    if labels is None:
        return
    if labels.suffix != ".csv":  # ``data.labels`` reads others as something else.
        raise InputError(
            f"expected a .csv file for --labels, which data.labels reads as a table, got {labels}: "
            f"give a name such as {labels.with_suffix('.csv')}"
        )
    if labels.exists():
        raise InputError(
            f"expected a new file for --labels, got {labels}, which may have been edited: give "
            f"another name, or move it away"
        )


def _first(inspected: "Inspected") -> Iterator[dict[str, Any]]:
    """Yield what is printed of the first suspects."""
    training_set, ranking = inspected.training_set, inspected.ranking
    number = min(ranking.num_suspects, _SUSPECTS)
    for sample, score, suggestion in zip(
        *(part[:number].tolist() for part in ranking.suspects()), strict=True
    ):
        yield {
            "index": int(training_set.index[sample]),
            "key": training_set.key(sample),
            "label": training_set.name(int(training_set.trained_labels[sample])),
            "suggestion": training_set.name(suggestion),
            "score": score,
            "confidence": 1 / (1 + math.exp(-score)),
        }


def _training_with(labels: Path, inspected: "Inspected") -> str:
    """Return the command that trains the first run again with a table of labels."""
    run = inspected.runs[0]
    folder = run.path if run.path.name not in ("", "..") else run.path.resolve()
    settings = [f"data.labels={labels}"]
    settings += [
        f"data.{name}=none"
        for name in ("label_noise", "label_noise_map")
        if run.recipe.get("data", {}).get(name) is not None
    ]
    recipe = str(run.path / RECIPE)
    return shlex.join(["fineprune", "train", recipe, "--out", f"{folder}-relabelled", *settings])
