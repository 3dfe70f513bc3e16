"""``fineprune train``."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import (
    AsJson,
    Changes,
    MoreChanges,
    RecipeFile,
    all_changes,
    path_option,
    say_ignored,
)
from fineprune.cli.output_paths import check_folder
from fineprune.cli.progress import progress
from fineprune.distributed.all_reduce import is_main
from fineprune.launch.follow_parent import follow_parent_if_told
from fineprune.runs.files import SUMMARY
from fineprune.runs.summary import Detection, Summary
from fineprune.training import loop
from fineprune.training.recipe import read_recipe


@exits(to_continue="add --resume to continue")
def train(
    recipe: RecipeFile,
    more: MoreChanges = None,
    out: Annotated[Path | None, path_option("The run folder [runs/<recipe>-<policy>].")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the checkpoint in the run folder.")
    ] = False,
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Train a recipe and write its run folder. Under torchrun, the processes train together.

    Example: fineprune train quick --set run.seed=1 --out runs/first
    """
    follow_parent_if_told()
    changed = all_changes(changes, more)
    made = read_recipe(recipe, changed)
    say_ignored(made, changed)
    folder = out or Path("runs") / f"{recipe.stem}-{made.pruning.policy.replace(':', '-')}"
    check_folder(folder)
    was_finished = (folder / SUMMARY).exists()
    epochs = made.training.epochs
    with progress() as update:

        def on_epoch(metrics: dict[str, Any]) -> None:
            update(_line(metrics), metrics["epoch"] + 1, epochs)

        summary = loop.train(made, folder, resume=resume, on_epoch=on_epoch)
    if not is_main():
        return
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(summary)))
        return
    done = f"{folder} was finished already" if was_finished else f"written to {folder}"
    top5 = "" if summary.top5_last is None else f" (top-5: {summary.top5_last:.2%})"
    typer.echo(
        f"last-epoch accuracy {summary.accuracy_last:.2%}{top5} on the "
        f"{summary.evaluated_on} set, "
        f"{summary.skipped_share:.2%} of the sample-steps skipped, "
        f"{summary.seconds_train:.1f} s of training; {done}"
    )
    if summary.suspicion is not None:
        typer.echo(_wrong_labels(summary, summary.suspicion))


def _line(metrics: dict[str, Any]) -> str:
    accuracy = metrics["test_accuracy"]
    if accuracy is None:
        accuracy = metrics["validation_accuracy"]
    shown = "" if accuracy is None else f", accuracy {accuracy:.2%}"
    loss = metrics["train_loss"]
    return (
        f"epoch {metrics['epoch'] + 1}: loss {'none' if loss is None else f'{loss:.4f}'}{shown}, "
        f"{metrics['samples']} samples in {metrics['seconds']:.2f} s"
    )


def _wrong_labels(summary: Summary, found: Detection) -> str:
    """Say how many training labels are wrong, and how well they are found."""
    samples = summary.train_samples
    line = f"{found.wrong:,} of {samples:,} training labels are wrong"
    if not 0 < found.wrong < samples:
        return line
    if found.roc_area is None:
        return f"{line}; the policy {summary.policy} suspects no samples"
    line += f"; they are found with a ROC area of {found.roc_area:.3f}"
    if found.precision is None:
        return line
    return (
        f"{line}; {found.precision:.1%} of the {found.suspects:,} suspects are wrong, which "
        f"are {found.recall:.1%} of the wrong labels"
    )
