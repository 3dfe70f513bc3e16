"""``fineprune plan``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, path_option, split_changes
from fineprune.cli.output_paths import check_file, inputs_of
from fineprune.errors import InputError, check_at_least, check_positive
from fineprune.writing import make_folder, write_atomically

if TYPE_CHECKING:
    from fineprune.training.forecast import Forecast
    from fineprune.training.recipe import Recipe

# A plan takes up to sixteen bytes per sample.
_MOST_SAMPLES = 1_000_000_000


@exits()
def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE or RUN] [SECTION.KEY=VALUE]...",
            help="A recipe and changes of its settings; or the settings alone; or the folder of a "
            "finished run, a comparison or a scaling experiment, and nothing else.",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        float | None,
        typer.Option(help="The share of the steps that the adaptive policy is to save."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="The number of training samples [50000].")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="The number of torchrun processes.")] = 1,
    step_time: Annotated[float | None, typer.Option(help="The seconds per optimizer step.")] = None,
    overhead: Annotated[
        float, typer.Option(help="The seconds of bookkeeping per pruned epoch.")
    ] = 0.0,
    svg: Annotated[Path | None, path_option("An SVG file to write the picture to.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show which epochs a policy shortens, and predict what it saves, before training.

    Example: fineprune plan quick pruning.save=0.4

    A recipe is not needed. Without one, the policy is fine-pruning, or adaptive with --save.

    Example: fineprune plan training.epochs=40 training.milestones='[12,24,32]' --save 0.35

    For finished runs, say what the evidence says of their labels.

    Example: fineprune plan runs/quick-adaptive
    """
    from fineprune.training.forecast import forecast, known_training_samples

    files, changes = split_changes(words)
    if len(files) > 1:
        raise InputError(f"expected one recipe and section.key=value, got {' '.join(files)}")
    file = Path(files[0]) if files else None
    if file is not None and _is_run(file):
        given = (save, samples, step_time, svg)
        if changes or overhead or ranks != 1 or any(value is not None for value in given):
            raise InputError(
                f"expected the folder of a run without changes or other options than --json, got "
                f"{files[0]} with some: leave them out, since its recipe says how it was trained"
            )
        _say_of_runs(file, as_json=as_json)
        return
    if samples is not None:
        check_at_least("--samples", samples, 1)
        if samples > _MOST_SAMPLES:
            raise InputError(f"expected --samples of at most {_MOST_SAMPLES:,}, got {samples:,}")
    if step_time is not None:
        check_positive("--step-time", step_time)
    check_at_least("--overhead", overhead, 0)
    if save is not None:
        named = ("pruning.policy=", "pruning.save=")
        if other := next((change for change in changes if change.startswith(named)), None):
            raise InputError(f"expected --save or {other}, got both: leave one out")
        changes += ["pruning.policy=adaptive", f"pruning.save={save}"]
    recipe = _recipe(file, changes)
    if svg is not None:
        check_file("--svg", svg, () if file is None else [file, *inputs_of(recipe.as_dict())])
    if samples is None:
        samples = known_training_samples(recipe) if files else 50_000
    made = forecast(recipe, samples, ranks=ranks, step_time=step_time, overhead=overhead)
    if svg is not None:
        # Imported here, because matplotlib and scipy would delay the command.
        from fineprune.report.figures.schedule import draw_schedule

        boundaries = () if made.schedule is None else made.schedule.boundaries
        make_folder(svg.parent)
        write_atomically(svg, draw_schedule(made.prunes, boundaries).svg)
    _show(made, as_json=as_json)


def _show(made: "Forecast", *, as_json: bool) -> None:
    from rich.console import Console

    from fineprune.cli.forecast_text import forecast_dict, forecast_text
    from fineprune.runs.files import json_text

    if as_json:
        typer.echo(json_text(forecast_dict(made)))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    # Encodings such as Latin-1 have no block.
    for line in forecast_text(made, "#" if console.options.ascii_only else "█"):
        console.print(line, soft_wrap=True)


def _is_run(given: Path) -> bool:
    """Return whether a path is the folder of runs, rather than the name of a packaged recipe."""
    from fineprune.runs.files import COMPARISON, RECIPE, SCALING, SUMMARY
    from fineprune.training.packaged_recipes import recipe_file

    if recipe_file(given) == given:
        return given.is_dir()
    return any((given / name).is_file() for name in (RECIPE, SUMMARY, COMPARISON, SCALING))


def _say_of_runs(folder: Path, *, as_json: bool) -> None:
    """Print what the evidence says of the labels of a run, or of each run of a comparison."""
    from fineprune.inspection.inspected import facts_of_run, with_evidence
    from fineprune.runs.files import json_text
    from fineprune.runs.run import read_runs

    found = {str(run.path): facts_of_run(run) for run in with_evidence(read_runs([folder]))}
    if as_json:
        typer.echo(json_text([{"run": run, "facts": facts} for run, facts in found.items()]))
        return
    for run, facts in found.items():
        if len(found) > 1:
            typer.echo(f"{run}:")
        typer.echo("\n".join(facts))


def _recipe(file: Path | None, changes: list[str]) -> "Recipe":
    """Return the recipe of the file, or a usual one without a file, with the changes."""
    from fineprune.training.recipe import make_recipe, read_recipe

    if file is not None:
        return read_recipe(file, changes)
    if not any(change.startswith("training.epochs=") for change in changes):
        raise InputError(
            f"expected a recipe, or training.epochs=... and a schedule or --save, got "
            f"{' '.join(changes) or 'neither'}"
        )
    usual: dict[str, Any] = {"policy": "fine-pruning", "prune": 0.25}
    own = any(change.startswith("pruning.policy=") for change in changes)
    return make_recipe({"pruning": {} if own else usual}, changes)
