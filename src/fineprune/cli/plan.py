"""``fineprune plan``."""

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fineprune.cli.exits import exits
from fineprune.cli.forecast_text import forecast_dict, forecast_text
from fineprune.cli.options import (
    AsJson,
    Changes,
    all_changes,
    path_option,
    say_ignored,
    split_changes,
)
from fineprune.cli.outputs import check_file, inputs_of
from fineprune.errors import InputError, check_at_least, check_positive
from fineprune.inspection.inspected import advice_for
from fineprune.runs.files import COMPARISON, RECIPE, SUMMARY
from fineprune.runs.run import read_run
from fineprune.training.forecast import forecast, known_training_samples
from fineprune.training.packaged_recipes import recipe_file
from fineprune.training.recipe import Recipe, make_recipe, read_recipe
from fineprune.writing import make_folder, write_atomically

# A plan takes up to sixteen bytes per sample.
_MOST_SAMPLES = 1_000_000_000

# Options that are settings of the recipe: the setting, the type, and the help.
_SETTINGS: dict[str, tuple[str, type, str]] = {
    "epochs": ("training.epochs", int, "The number of training epochs."),
    "window": ("pruning.window", int, "The number of epochs per window."),
    "milestones": (
        "training.milestones",
        str,
        "The epochs after which the learning rate falls, such as 60,120,160.",
    ),
    "windows_per_interval": (
        "pruning.windows_per_interval",
        int,
        "The number of windows between two milestones, instead of --window.",
    ),
    "start": (
        "pruning.start",
        float,
        "The paper's StartingPoint: epochs with --window, a share of each window with "
        "--windows-per-interval.",
    ),
    "attenuation": (
        "pruning.attenuation",
        float,
        "The divisor by which the start is reduced repeatedly.",
    ),
    "attenuate": (
        "pruning.attenuate",
        str,
        "When the start is reduced: per window (the paper's text) or per epoch (its listing).",
    ),
    "block": ("pruning.block", int, "The paper's PruningBlock, in epochs."),
    "count": ("pruning.count", int, "The paper's PruningCount: pruned epochs per block."),
    "prune": (
        "pruning.prune",
        str,
        "The samples that a pruned epoch skips: a share, or a whole number [0.25].",
    ),
    "save": (
        "pruning.save",
        float,
        "The share of the steps that the adaptive policy saves, instead of a schedule.",
    ),
    "batch_size": ("training.batch_size", int, "The number of samples per batch [128]."),
}


def _with_setting_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb one option per setting; it receives the given ones as its first argument."""

    @functools.wraps(verb)
    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in _SETTINGS}
        verb({name: value for name, value in given.items() if value is not None}, **values)

    words, *others = list(inspect.signature(verb).parameters.values())[1:]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, typer.Option(help=text)],
        )
        for name, (_, kind, text) in _SETTINGS.items()
    ]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (words, *options, *others)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


@_with_setting_options
@exits()
def plan(
    settings: dict[str, Any],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE or RUN] [SECTION.KEY=VALUE]...",
            help="A recipe and changes of its settings; or no recipe, but the options below; or "
            "the folder of a finished run, and nothing else.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="The number of training samples [50000].")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="The number of torchrun processes.")] = 1,
    step_time: Annotated[
        float | None,
        typer.Option(help="The seconds per optimizer step, of one worker if they do not wait."),
    ] = None,
    overhead: Annotated[
        float, typer.Option(help="The seconds of bookkeeping per pruned epoch.")
    ] = 0.0,
    svg: Annotated[Path | None, path_option("An SVG file to write the picture to.")] = None,
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Show which epochs a policy shortens, and predict what it saves, before training.

    Example: fineprune plan --epochs 200 --window 60 --start 30 --attenuation 2 --block 3 --count 2

    With --save, the policy is adaptive, and saves this share.

    Example: fineprune plan --epochs 40 --milestones 12,24,32 --save 0.35

    For a finished run, say which means of saving fits best, given the evidence on its labels.

    Example: fineprune plan runs/quick-fine-pruning
    """
    files, more = split_changes(words)
    if len(files) > 1:
        raise InputError(f"expected one recipe and section.key=value, got {' '.join(files)}")
    file = Path(files[0]) if files else None
    if file is not None and _is_run(file):
        others = {
            "--samples": samples is not None,
            "--step-time": step_time is not None,
            "--overhead": overhead,
            "--ranks": ranks != 1,
            "--svg": svg,
            "changes of settings": settings or more or changes,
        }
        if given := [name for name, value in others.items() if value]:
            raise InputError(
                f"expected the folder of a run without other options than --json, got {files[0]} "
                f"with {' and '.join(given)}: leave them out, since its recipe says how it was "
                f"trained"
            )
        advice = advice_for(read_run(file))
        told = [json.dumps({"run": str(file), "advice": advice})] if as_json else advice
        typer.echo("\n".join(told))
        return
    if samples is not None:
        check_at_least("--samples", samples, 1)
        if samples > _MOST_SAMPLES:
            raise InputError(f"expected --samples of at most {_MOST_SAMPLES:,}, got {samples:,}")
    if step_time is not None:
        check_positive("--step-time", step_time)
    check_at_least("--overhead", overhead, 0)
    changed = all_changes(changes, more)
    recipe = _recipe(file, settings, changed)
    if svg is not None:
        check_file("--svg", svg, () if file is None else [file, *inputs_of(recipe.as_dict())])
    if samples is None:
        samples = known_training_samples(recipe) if files else 50_000
    made = forecast(recipe, samples, ranks=ranks, step_time=step_time, overhead=overhead)
    if svg is not None:
        # Imported here, because matplotlib and scipy would delay the start of every command.
        from fineprune.report.figures.schedule import schedule_svg

        boundaries = () if made.schedule is None else made.schedule.boundaries
        make_folder(svg.parent)
        write_atomically(svg, schedule_svg(made.prunes, boundaries))
    say_ignored(recipe, changed)
    if as_json:
        typer.echo(json.dumps(forecast_dict(made)))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    # Encodings such as Latin-1 have no block.
    for line in forecast_text(made, "#" if console.options.ascii_only else "█"):
        console.print(line, soft_wrap=True)


def _is_run(given: Path) -> bool:
    """Return whether a path is the folder of a run, rather than the name of a packaged recipe."""
    if recipe_file(given) == given:
        return given.is_dir()
    return any((given / name).is_file() for name in (RECIPE, SUMMARY, COMPARISON))


def _recipe(file: Path | None, settings: dict[str, Any], changes: list[str]) -> Recipe:
    """Return the recipe of the file, or a usual one without a file, with the given settings."""
    schedule = [name for name in settings if _SETTINGS[name][0].startswith("pruning.")]
    if "save" in settings:
        if schedule != ["save"]:
            other = next(name for name in schedule if name != "save").replace("_", "-")
            raise InputError(f"expected --save or a schedule, got --save and --{other}")
        if file is None and "epochs" not in settings:
            raise InputError("expected --epochs with --save, got none")
    elif file is None and "epochs" not in settings:
        raise InputError("expected a recipe, or --epochs with --window and --start, got neither")
    given = ["pruning.policy=adaptive"] if "save" in settings else []
    for name, value in settings.items():
        if name == "milestones":
            value = _whole_numbers(value)
        elif name == "prune":
            value = _number(value)
        elif name == "start" and "windows_per_interval" not in settings and value.is_integer():
            value = int(value)
        given.append(f"{_SETTINGS[name][0]}={json.dumps(value)}")
    if file is not None:
        return read_recipe(file, [*changes, *given])
    return make_recipe({"pruning": {"policy": "fine-pruning", "prune": 0.25}}, [*given, *changes])


def _number(text: str) -> float:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise InputError(
            f"expected --prune as a share in [0, 1) or a whole number of samples, got {text!r}"
        ) from None


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(
            f"expected --milestones to be whole numbers separated by commas, such as 60,120,160, "
            f"got {text!r}"
        ) from error
