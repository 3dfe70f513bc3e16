"""``fineprune train``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, Changes, RecipeFile, path_option
from fineprune.cli.output_paths import check_folder
from fineprune.cli.progress import progress

if TYPE_CHECKING:
    from fineprune.runs.summary import Summary


@exits(to_continue="add --resume to continue", launched=True)
def train(
    recipe: RecipeFile,
    changes: Changes = None,
    out: Annotated[Path | None, path_option("The run folder [runs/<recipe>-<policy>].")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the checkpoint in the run folder.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe and write its run folder. Under torchrun, the processes train together.

    Example: fineprune train quick run.seed=1 --out runs/first
    """
    from fineprune.launch.follow_parent import follow_parent_if_told
    from fineprune.launcher import launched
    from fineprune.runs.files import SUMMARY, json_text
    from fineprune.training.recipe import read_recipe
    from fineprune.training.trainer import train as train_recipe

    follow_parent_if_told()
    made = read_recipe(recipe, changes or ())
    if (ignored := made.distributed.without_effect) and not launched().rank:
        typer.echo(f"fineprune: {ignored}", err=True)
    folder = out or Path("runs") / f"{recipe.stem}-{made.pruning.policy.replace(':', '-')}"
    check_folder(folder)
    was_finished = (folder / SUMMARY).exists()
    epochs = made.training.epochs
    with progress() as update:

        def on_epoch(metrics: dict[str, Any]) -> None:
            update(_line(metrics), metrics["epoch"] + 1, epochs)

        summary = train_recipe(made, folder, resume=resume, on_epoch=on_epoch)
    if launched().rank:
        return
    if as_json:
        typer.echo(json_text(summary))
        return
    done = f"{folder} was finished already" if was_finished else f"written to {folder}"
    typer.echo(
        f"accuracy {summary.accuracy_last:.2%} ({summary.evaluated_on}), "
        f"{summary.skipped_share:.1%} skipped, {summary.seconds_train:.1f} s; {done}"
    )
    if summary.suspicion is not None:
        typer.echo(_wrong_labels(summary))


def _line(metrics: dict[str, Any]) -> str:
    found = [metrics[f"{kind}_accuracy"] for kind in ("test", "validation")]
    shown = "".join(f", accuracy {accuracy:.2%}" for accuracy in found if accuracy is not None)
    loss = "none" if metrics["train_loss"] is None else f"{metrics['train_loss']:.4f}"
    return (
        f"epoch {metrics['epoch'] + 1}: loss {loss}{shown}, {metrics['samples']} samples in "
        f"{metrics['seconds']:.2f} s"
    )


def _wrong_labels(summary: "Summary") -> str:
    """Say how many training labels are wrong, and how well they are found."""
    found = summary.suspicion
    assert found is not None
    right, all_found = found.precision or 0, found.recall or 0
    return (
        f"{found.wrong:,} of {summary.train_samples:,} labels are wrong; of "
        f"{found.suspects or 0:,} suspects {right:.0%} are wrong, which is {all_found:.0%} of the "
        f"wrong ones"
    )
