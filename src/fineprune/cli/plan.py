"""``fineprune plan``."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, Changes, all_changes, split_changes
from fineprune.cli.outputs import check_file
from fineprune.errors import InputError, check_above, check_at_least
from fineprune.pruning.policies.full import FullData
from fineprune.pruning.policies.matched import Matched
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.pruning.savings import Savings, closed_form_pruned_epochs
from fineprune.pruning.schedule import Schedule
from fineprune.training.cost import (
    cost_is_known,
    planned_samples,
    predicted_cost,
    samples_per_step,
)
from fineprune.training.policies import takes_save
from fineprune.training.recipe import Recipe, make_recipe, read_recipe

_BAR = 40
_IF_ADAPTIVE = ", if none of them contradicts the others"
_PER_ROW = 10

# The sizes of training sets that are known without their files.
_TRAINING_IMAGES = {"cifar10": 50_000, "cifar100": 50_000}


@exits()
def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [SECTION.KEY=VALUE]...",
            help="The recipe, or no recipe but options; and more changes. One --set may be "
            "followed by several.",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="The length of the training.")] = None,
    window: Annotated[int | None, typer.Option(help="The epochs per window.")] = None,
    milestones: Annotated[
        str | None,
        typer.Option(help="The epochs after which the learning rate falls, such as 60,120,160."),
    ] = None,
    windows_per_interval: Annotated[
        int | None,
        typer.Option(help="The windows between two milestones, instead of --window."),
    ] = None,
    start: Annotated[
        float | None,
        typer.Option(
            help="The paper's StartingPoint: epochs with --window, a share of each window with "
            "--windows-per-interval."
        ),
    ] = None,
    attenuation: Annotated[
        float | None, typer.Option(help="The divisor of the start, applied again and again.")
    ] = None,
    attenuate: Annotated[
        str | None,
        typer.Option(
            help="Apply the divisor per window (as in the paper's text) or per epoch (as in its "
            "listing)."
        ),
    ] = None,
    block: Annotated[int | None, typer.Option(help="The paper's PruningBlock, in epochs.")] = None,
    count: Annotated[
        int | None, typer.Option(help="The paper's PruningCount: pruned epochs per block.")
    ] = None,
    prune: Annotated[
        float | None, typer.Option(help="The share of the samples to skip [0.25].")
    ] = None,
    save: Annotated[
        float | None,
        typer.Option(help="The share of the steps to save, instead of a schedule (adaptive)."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="The number of training samples [50000].")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="The number of samples per batch [128].")
    ] = None,
    ranks: Annotated[int, typer.Option(help="The number of processes of torchrun.")] = 1,
    step_time: Annotated[float | None, typer.Option(help="The seconds per optimizer step.")] = None,
    overhead: Annotated[
        float, typer.Option(help="The seconds of bookkeeping per pruned epoch.")
    ] = 0.0,
    svg: Annotated[Path | None, typer.Option(help="An SVG file to write the picture to.")] = None,
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Show which epochs a policy shortens, and predict what it saves, before training.

    Example: fineprune plan --epochs 200 --window 60 --start 30 --attenuation 2 --block 3 --count 2

    Example: fineprune plan --epochs 40 --milestones 12,24,32 --save 0.35
    """
    files, more = split_changes(words)
    if len(files) > 1:
        raise InputError(f"expected one recipe and section.key=value, got {' '.join(files)}")
    if svg is not None:
        check_file("--svg", svg)
    if samples is not None:
        check_at_least("--samples", samples, 1)
    if step_time is not None:
        check_above("--step-time", step_time, 0)
    check_at_least("--overhead", overhead, 0)
    training = {
        "epochs": epochs,
        "batch_size": batch_size,
        "milestones": None if milestones is None else _whole_numbers("--milestones", milestones),
    }
    whole = start is not None and windows_per_interval is None and start.is_integer()
    pruning = {
        "window": window,
        "windows_per_interval": windows_per_interval,
        "start": int(start) if whole and start is not None else start,
        "attenuation": attenuation,
        "attenuate": attenuate,
        "block": block,
        "count": count,
        "prune": prune,
    }
    recipe = Path(files[0]) if files else None
    made = _recipe(recipe, save, _given(training), _given(pruning), all_changes(changes, more))
    if made.pruning.own:
        raise InputError(
            f"expected a policy of fineprune, got {made.pruning.policy!r}: planning does not run "
            f"code of your own; use fineprune.predict_savings"
        )
    policy = made.policy()
    number = _training_samples(made, recipe is None) if samples is None else samples
    if isinstance(policy, Matched):
        _show_matched(policy, number, svg, as_json=as_json)
        return
    if isinstance(policy, FullData):
        raise InputError(
            f"expected a policy with a schedule, got policy = {made.pruning.policy!r}: "
            f'set pruning.policy = "fine-pruning"'
        )
    if not cost_is_known(made, number):
        advice = "set pruning.save" if takes_save(policy.name) else "a run's metrics show them"
        raise InputError(
            f"expected a policy whose numbers of samples are known before the training, got policy "
            f"= {policy.name!r}, whose numbers depend on the losses: {advice}"
        )
    savings = predicted_cost(made, number, ranks=ranks, step_time=step_time, overhead=overhead)
    step = samples_per_step(made, ranks=ranks)
    if not isinstance(policy, ScheduledPolicy):
        numbers = planned_samples(made, number, ranks=ranks)
        _show_numbers(made, numbers, savings, step, svg, as_json=as_json)
        return
    schedule = policy.schedule
    prunes = [
        schedule.prunes(epoch) and not policy.anneals(epoch)
        for epoch in range(made.training.epochs)
    ]
    if svg is not None:
        _write_svg(svg, prunes, schedule.boundaries)
    if as_json:
        typer.echo(json.dumps(_as_json(schedule, prunes, savings, number)))
        return
    console = Console(highlight=False)
    console.print(_picture(schedule, prunes), soft_wrap=True)
    for line in _lines(schedule, prunes, savings, number, made, step):
        console.print(line, soft_wrap=True)


def _whole_numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(
            f"expected {option} to be whole numbers separated by commas, such as 60,120,160, "
            f"got {text!r}"
        ) from error


def _recipe(
    file: Path | None,
    save: float | None,
    training: dict[str, Any],
    pruning: dict[str, Any],
    changes: list[str],
) -> Recipe:
    if save is not None:
        if pruning:
            option = "--" + next(iter(pruning)).replace("_", "-")
            raise InputError(f"expected --save or a schedule, got --save and {option}")
        if file is None and "epochs" not in training:
            raise InputError("expected --epochs with --save, got none")
        pruning = {"policy": "adaptive", "save": save}
    given = [f"training.{key}={json.dumps(value)}" for key, value in training.items()]
    given += [f"pruning.{key}={json.dumps(value)}" for key, value in pruning.items()]
    if file is not None:
        return read_recipe(file, [*changes, *given])
    if "epochs" not in training:
        raise InputError("expected a recipe, or --epochs with --window and --start, got neither")
    base = {"pruning": {"policy": "fine-pruning", "prune": 0.25}}
    return make_recipe(base, [*given, *changes])


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _training_samples(recipe: Recipe, plain: bool) -> int:
    if plain:
        return 50_000
    data = recipe.data
    if data.labels is not None:
        raise InputError(
            f"expected --samples with data.labels, got none: give the number of training samples "
            f"that {data.labels} does not leave out"
        )
    if data.name in ("digits", "synthetic"):
        assert data.train_size is not None
        return data.train_size - data.validation
    if data.name == "images":
        # Counting millions of files may take a minute, and they need not be on this machine.
        raise InputError(
            f"expected --samples with image files, {data.train}, got none: give the number of "
            f"training images"
        )
    if data.name not in _TRAINING_IMAGES:
        # The data set would tell, but asking it would run the user's code, which planning does not.
        raise InputError(
            f"expected --samples with data of your own, {data.name}, got none: give the "
            f"number of training samples"
        )
    return data.limited(_TRAINING_IMAGES[data.name] - data.validation)


def _show_numbers(
    recipe: Recipe,
    numbers: list[int],
    savings: Savings,
    step: int,
    svg: Path | None,
    *,
    as_json: bool,
) -> None:
    most = max(numbers)
    if svg is not None:
        _write_svg(svg, [number < most for number in numbers])
    if as_json:
        typer.echo(json.dumps({"kept": numbers, "saving": savings.saving, "steps": savings.steps}))
        return
    adaptive = recipe.pruning.policy == "adaptive"
    typer.echo(f"samples per epoch{_IF_ADAPTIVE if adaptive else ''}:")
    _show_bars(numbers)
    for line in _totals(savings, recipe, step):
        typer.echo(line)


def _show_matched(policy: Matched, samples: int, svg: Path | None, *, as_json: bool) -> None:
    """Show the numbers of a control, which are those of the run that it repeats."""
    policy.bind(samples)
    numbers = list(policy.numbers)
    skipped = 1 - sum(numbers) / (samples * len(numbers))
    if svg is not None:
        _write_svg(svg, [number < samples for number in numbers])
    if as_json:
        typer.echo(json.dumps({"kept": numbers, "num_samples": samples, "skipped_share": skipped}))
        return
    typer.echo("samples per epoch, as in the run that this control repeats, chosen at random:")
    _show_bars(numbers)
    typer.echo(f"samples: {sum(numbers):,} of {samples * len(numbers):,} ({skipped:.2%} skipped)")
    weights = set(policy.mean_weights)
    if weights != {1.0}:
        typer.echo(f"weights: {min(weights):.3g} to {max(weights):.3g}, the same within an epoch")


def _show_bars(numbers: Sequence[int]) -> None:
    """Print how many samples each epoch keeps, in one line for epochs with the same number."""
    most = max(numbers)
    for number, equal in itertools.groupby(enumerate(numbers, 1), key=lambda pair: pair[1]):
        epochs = [epoch for epoch, _ in equal]
        name = f"{epochs[0]}" if len(epochs) == 1 else f"{epochs[0]}-{epochs[-1]}"
        bar = "█" * max(1, round(_BAR * number / most))
        typer.echo(f"{name:>9} {bar:<{_BAR}} {number:,}")


def _write_svg(file: Path, prunes: Sequence[bool], boundaries: Sequence[int] = ()) -> None:
    # Imported here, because matplotlib and scipy would delay the start of every command.
    from fineprune.report.figures import schedule_svg

    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(schedule_svg(prunes, boundaries), encoding="utf-8")


def _closed_form(schedule: Schedule) -> int | None:
    return None if isinstance(schedule.window, tuple) else closed_form_pruned_epochs(schedule)


def _as_json(
    schedule: Schedule, prunes: list[bool], savings: Savings, samples: int
) -> dict[str, Any]:
    return {
        "epochs": schedule.epochs,
        "pruned_epochs": schedule.pruned_epochs(),
        "closed_form_pruned_epochs": _closed_form(schedule),
        "prunes": prunes,
        "clears_after": list(schedule.boundaries),
        "num_samples": samples,
        "skipped_share": savings.skipped_share,
        "saving": savings.saving,
        **dataclasses.asdict(savings),
    }


def _picture(schedule: Schedule, prunes: list[bool]) -> Text:
    """Return numbered epochs, from 1 as in the paper's Figure 3, the pruned ones in brackets."""
    picture = Text()
    for epoch in range(schedule.epochs):
        number = f"{epoch + 1}".rjust(3)
        if prunes[epoch]:
            picture.append(f"[{number}]", style="black on orange1")
        else:
            picture.append(f" {number} ", style="black on grey74")
        picture.append("|" if schedule.clears(epoch) else " ")
        if (epoch + 1) % _PER_ROW == 0 or epoch == schedule.epochs - 1:
            picture.append("\n")
    return picture


def _lines(
    schedule: Schedule,
    prunes: list[bool],
    savings: Savings,
    samples: int,
    recipe: Recipe,
    step: int,
) -> list[str]:
    closed = _closed_form(schedule)
    pruned = schedule.pruned_epochs()
    annealed = pruned - sum(prunes)
    lines = [
        "in brackets: pruned epochs; | counts are cleared after this epoch",
        f"pruned epochs: {pruned} of {schedule.epochs} by Algorithm 2"
        + (f", {annealed} of which anneal keeps whole" if annealed else "")
        + ("" if closed is None else f" (the paper's closed form, formula 3 or 4: {closed})"),
        f"samples: {savings.samples:,} of {savings.samples_full:,} "
        f"({savings.skipped_share:.2%} skipped, {samples:,} per full epoch)",
    ]
    return lines + _totals(savings, recipe, step)


def _totals(savings: Savings, recipe: Recipe, step: int) -> list[str]:
    """Return the lines about the steps, each of which trains ``step`` samples."""
    batch = recipe.training.batch_size
    size = f" in batches of {batch}"
    if step != batch:
        size = f", each of {step:,} samples ({step // batch} x {batch})"
    lines = [f"steps: {savings.steps:,} of {savings.steps_full:,}{size}"]
    if savings.time is None:
        lines.append(f"predicted saving: {savings.saving:.2%} of the steps (--step-time for hours)")
    else:
        lines.append(
            f"predicted time: {savings.time:,.1f} s of {savings.time_full:,.1f} s, "
            f"{savings.saving:.2%} saved"
        )
    return lines
