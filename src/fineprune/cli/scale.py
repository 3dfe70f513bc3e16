"""``fineprune scale``."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, RecipeFile, Seeds, path_option, split_changes
from fineprune.cli.output_paths import check_folder
from fineprune.cli.progress import progress
from fineprune.cli.results import show_scaling
from fineprune.errors import InputError, check_positive
from fineprune.writing import make_folder

if TYPE_CHECKING:
    from fineprune.training.recipe import Recipe

_USUAL = ("one", "all-reduce 2", "sync 2+1", "async 1+1", "async 2+1", "async 2+2")


@exits(to_continue="run the same command again to continue")
def scale(
    recipe: RecipeFile,
    configurations: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIGURATION]... [SECTION.KEY=VALUE]...",
            help="The configurations, as workers+servers: one, 'all-reduce 2', "
            f"'sync 3+1 backup=1', 'async 4+3 dedicated', 'async 2+1 bound=1', 'mixed 4+2 "
            f"group=2'; also with a learning rate: 'one lr=0.05' [{', '.join(_USUAL)}]. Speedups "
            "are relative to the first. And changes of the recipe's settings.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, path_option("The folder of all runs [runs/<recipe>-scale].")
    ] = None,
    seeds: Seeds = 1,
    target_loss: Annotated[
        float | None,
        typer.Option(
            help="The training loss up to which the time is measured [the lowest loss that all "
            "configurations reach]."
        ),
    ] = None,
    same_update: Annotated[
        bool,
        typer.Option(
            "--same-update",
            help="Divide the batch size by the number of gradients that an update averages. By "
            "default, each worker trains batches of the recipe's size.",
        ),
    ] = False,
    prediction: Annotated[
        bool,
        typer.Option(
            "--predict",
            help="Measure steps on this machine with two short runs, and predict the "
            "configurations or, without any, where scaling stops paying off, on a cluster that "
            "cluster.KEY=VALUE and costs.KEY=VALUE describe.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe with several numbers of workers and servers, and compare them.

    The same command continues where it was stopped.

    Example: fineprune scale strategies one 'async 2+1'

    Example: fineprune scale strategies --predict cluster.nodes=64 cluster.gigabits=25
    """
    # Imported here, because torch would delay the start of every command.
    from fineprune.experiments.configurations import configuration
    from fineprune.experiments.scale import scale as scale_runs
    from fineprune.experiments.scale_table import read_scaling
    from fineprune.runs.files import REPORT
    from fineprune.training.recipe import read_recipe

    words, changes = split_changes(configurations)
    folder = out or Path("runs") / f"{recipe.stem}-scale"
    if target_loss is not None:
        check_positive("--target-loss", target_loss)
    if prediction:
        others = {
            "--seeds": seeds > 1,
            "--target-loss": target_loss,
            "--same-update": same_update,
        }
        if given := next((option for option, value in others.items() if value), None):
            raise InputError(f"expected {given} without --predict, got both: leave one out")
        described = [change for change in changes if change.startswith(("cluster.", "costs."))]
        made = read_recipe(recipe, [change for change in changes if change not in described])
        check_folder(folder)
        _predict(made, described, words, folder, as_json=as_json)
        return
    made = read_recipe(recipe, changes)
    check_folder(folder)
    chosen = [configuration(text) for text in words or _USUAL]
    with progress() as update:
        scale_runs(
            made,
            folder,
            chosen,
            title=recipe.stem,
            seeds=seeds,
            same_update=same_update,
            on_progress=update,
        )
    about = {"folder": str(folder)}
    show_scaling(read_scaling(folder), folder / REPORT, target_loss, as_json=as_json, about=about)


def _predict(
    recipe: "Recipe", settings: list[str], configurations: list[str], folder: Path, *, as_json: bool
) -> None:
    """Predict configurations, print them, and write ``predicted.json``."""
    from fineprune.experiments.configurations import configuration
    from fineprune.experiments.planner import described, measured_costs, plan_cluster, sample_steps
    from fineprune.report.scaling.tables import planned_table
    from fineprune.report.table import print_tables
    from fineprune.runs.files import json_text, write_json
    from fineprune.training.data import load_data
    from fineprune.training.hardware import resolved

    cluster, given = described(settings)
    chosen = [configuration(text) for text in configurations]
    single = resolved(recipe)
    samples, saved = sample_steps(single, load_data(single).num_samples)
    with progress() as update:
        costs = measured_costs(single, folder / "measured", given, update)
    plan = plan_cluster(costs, cluster, samples=samples, saved=saved, configurations=chosen)
    found = {
        "cluster": asdict(cluster),
        "costs": asdict(costs),
        "rows": plan.rows,
        "stops": [row.configuration for row in plan.stops],
        "recommended": plan.recommended.configuration,
    }
    make_folder(folder)
    write_json(folder / "predicted.json", found)
    if as_json:
        typer.echo(json_text({"folder": str(folder), **found}))
        return
    print_tables([planned_table(plan)])
    typer.echo(f"recommended: {plan.recommended.configuration}")
    typer.echo(f"all predictions: {folder / 'predicted.json'}")
