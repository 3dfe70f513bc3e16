"""``fineprune scale``."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import (
    AsJson,
    RecipeFile,
    path_option,
    split_changes,
)
from fineprune.cli.output_paths import check_folder
from fineprune.cli.progress import progress
from fineprune.errors import InputError, check_one_of, check_positive
from fineprune.experiments import scale as scaling
from fineprune.experiments.configurations import configuration
from fineprune.experiments.scale_table import read_scaling, scale_rows
from fineprune.runs.files import REPORT
from fineprune.training.recipe import Recipe, read_recipe
from fineprune.writing import make_folder

_USUAL = ("one", "all-reduce 2", "sync 2+1", "async 1+1", "async 2+1", "async 2+2")


@exits(to_continue="run the same command again to continue")
def scale(
    recipe: RecipeFile,
    configurations: Annotated[
        list[str] | None,
        typer.Argument(
            help="The configurations, as workers+servers: one, 'all-reduce 2', "
            f"'sync 3+1 backup=1', 'async 4+3 dedicated', 'async 2+1 bound=1', 'mixed 4+2 "
            f"group=2'; also with settings: 'one lr=0.05 epochs=40 seeds=3' [{', '.join(_USUAL)}].",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, path_option("The folder of all runs [runs/<recipe>-scale].")
    ] = None,
    target_loss: Annotated[
        float | None,
        typer.Option(
            help="The training loss up to which the time is measured [the lowest loss that all "
            "configurations reach]."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="The configuration to which speedups are relative [one]."),
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
            "configurations or, without any, where scaling stops paying off.",
        ),
    ] = False,
    cluster: Annotated[
        Path | None,
        typer.Option(help="With --predict: a TOML file with [cluster], [costs] and [target]."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="With --predict: the largest number of nodes [1024].")
    ] = None,
    accelerators: Annotated[
        int | None, typer.Option(help="With --predict: the number of workers per node [1].")
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="With --predict: the bandwidth of a node's link, in Gbit/s [10]."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a recipe with several numbers of workers and servers, and compare them.

    The same command continues where it was stopped.

    Example: fineprune scale strategies one 'async 2+1'

    Example: fineprune scale strategies --predict --nodes 64 --bandwidth 25
    """
    # Imported here, because matplotlib and scipy would delay the start of every command.
    from fineprune.report.scaling.page import scale_caveats, write_scale_report
    from fineprune.report.scaling.tables import scale_tables
    from fineprune.report.table import print_tables

    words, changes = split_changes(configurations)
    made = read_recipe(recipe, changes)
    folder = out or Path("runs") / f"{recipe.stem}-scale"
    check_folder(folder)
    if target_loss is not None:
        check_positive("--target-loss", target_loss)
    flags = {"nodes": nodes, "accelerators": accelerators, "gigabits": bandwidth}
    if prediction:
        for option, value in (
            ("--baseline", baseline),
            ("--target-loss", target_loss),
            ("--same-update", same_update),
        ):
            if value:
                raise InputError(f"expected {option} without --predict, got both: leave one out")
        _predict(made, cluster, flags, words, folder, as_json=as_json)
        return
    if cluster is not None or any(value is not None for value in flags.values()):
        raise InputError("expected --predict with a description of a cluster, got none")
    chosen = [configuration(text) for text in words or _USUAL]
    if baseline is not None:
        check_one_of("--baseline", configuration(baseline).text, tuple(c.text for c in chosen))
    with progress() as update:
        scaling.scale(
            made,
            folder,
            chosen,
            title=recipe.stem,
            same_update=same_update,
            on_progress=update,
        )
    read = read_scaling(folder)
    rows = scale_rows(read.runs, target_loss, baseline)
    page = folder / REPORT
    write_scale_report(read, rows, page)
    if as_json:
        lines = [dataclasses.asdict(row) for row in rows]
        typer.echo(json.dumps({"folder": str(folder), "rows": lines}))
        return
    console = print_tables(scale_tables(rows))
    for sentence in scale_caveats(read):
        console.print(f"- {sentence}", style="dim", highlight=False)
    typer.echo(f"report: {page}")


def _predict(
    recipe: Recipe,
    file: Path | None,
    flags: dict[str, float | None],
    configurations: list[str],
    folder: Path,
    *,
    as_json: bool,
) -> None:
    """Predict configurations, print them, and write ``predicted.json``."""
    # Imported here, because torch would delay the start of every command.
    from fineprune.experiments.planner import (
        Cluster,
        Target,
        measured_costs,
        plan_cluster,
        read_cluster,
        sample_steps,
    )
    from fineprune.report.scaling.planned import planned_table
    from fineprune.report.table import print_tables
    from fineprune.runs.files import json_text, write_json
    from fineprune.training.convert import converted
    from fineprune.training.data import load_data
    from fineprune.training.hardware import resolved

    cluster, target, given = (Cluster(), Target(), {}) if file is None else read_cluster(file)
    changes = {name: value for name, value in flags.items() if value is not None}
    cluster = converted("cluster", Cluster, {**dataclasses.asdict(cluster), **changes})
    chosen = [configuration(text) for text in configurations]
    single = resolved(recipe)
    samples, saved = sample_steps(single, load_data(single).num_samples, target)
    with progress() as update:
        costs = measured_costs(single, folder / "measured", given, update)
    plan = plan_cluster(
        costs, cluster, samples=samples, target=target, saved=saved, configurations=chosen
    )
    found = {
        "cluster": cluster,
        "costs": costs,
        "target": target,
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
