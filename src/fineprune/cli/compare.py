"""``fineprune compare``."""

from pathlib import Path
from typing import Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import (
    AsJson,
    Changes,
    Margin,
    RecipeFile,
    Seeds,
    margin_fraction,
    path_option,
)
from fineprune.cli.output_paths import check_folder
from fineprune.cli.progress import progress


@exits(to_continue="run the same command again to continue")
def compare(
    recipe: RecipeFile,
    changes: Changes = None,
    out: Annotated[
        Path | None, path_option("The folder of all runs [runs/<recipe>-compare].")
    ] = None,
    seeds: Seeds = 1,
    arms: Annotated[
        str | None,
        typer.Option(
            help="The arms, separated by commas [full, the recipe's policy and its controls]."
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, max=1000, help="The number of runs to train at the same time.")
    ] = 1,
    tune: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            metavar="SEEDS",
            help="First choose the learning rate of each arm with so many seeds, on held-out "
            "training samples, from 1, 1.5 and 2 times that of the recipe.",
            show_default=False,
        ),
    ] = 0,
    margin: Margin = 0.4,
    as_json: AsJson = False,
) -> None:
    """Train a recipe and its controls, print their table and write a report.

    The same command continues a comparison that was stopped. With more --seeds or other --arms, it
    adds runs to the comparison; finished runs are kept and reported.

    Example: fineprune compare quick --arms full,adaptive --seeds 2
    """
    from fineprune.cli.results import show_results
    from fineprune.experiments import compare as comparing
    from fineprune.experiments.tuning import tuned_rates
    from fineprune.runs.files import REPORT
    from fineprune.runs.run import read_runs
    from fineprune.training.recipe import read_recipe

    fraction = margin_fraction(margin)
    made = read_recipe(recipe, changes or ())
    folder = out or Path("runs") / f"{recipe.stem}-compare"
    check_folder(folder)
    named = [] if arms is None else [arm.strip() for arm in arms.split(",")]
    with progress() as update:
        rates = {}
        if tune:
            rates = tuned_rates(made, folder, seeds=tune, arms=named, jobs=jobs, on_progress=update)
        comparing.compare(
            made,
            folder,
            title=recipe.stem,
            seeds=seeds,
            arms=named,
            jobs=jobs,
            rates=rates,
            on_progress=update,
        )
    about = {"folder": str(folder), "margin": margin}
    show_results(read_runs([folder]), folder / REPORT, fraction, as_json=as_json, about=about)
