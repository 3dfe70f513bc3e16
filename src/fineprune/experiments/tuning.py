"""The learning rate of each arm of a comparison, chosen by trials on held-out training samples.

The best rate differs between methods, and two methods can be compared only if each has its own. A
rate that is chosen by the test accuracy makes this accuracy too high. So each arm is first trained
with several rates and seeds on a part of the training samples, and evaluated on the others. The
file ``rates.json`` in the folder of the comparison holds the accuracies of these trials and the
choice.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from fineprune.errors import InputError, RunError
from fineprune.experiments.controls import FULL, SECOND, WATCHED
from fineprune.experiments.planned_run import PlannedRun
from fineprune.runs.comparison import Arm
from fineprune.runs.files import RATES, SUMMARY, read_json, write_json
from fineprune.runs.summary import read_summary
from fineprune.training.recipe import Recipe

# The folder of the trials in that of the comparison.
TRIALS = "rates"

# The multiples of the recipe's learning rate that are tried, in increasing order.
FACTORS = (1.0, 1.5, 2.0)

# One in so many training samples is held out, unless the recipe holds some out itself.
_ONE_IN = 10


@dataclasses.dataclass(frozen=True)
class ChosenRate:
    """The learning rate of an arm.

    Attributes:
        factor: The chosen multiple of the recipe's learning rate.
        accuracies: The accuracy on the held-out samples after the last epoch with each seed, as a
            fraction, by the factor as text; None if the training diverged.
    """

    factor: float
    accuracies: dict[str, tuple[float | None, ...]]


@dataclasses.dataclass(frozen=True)
class ChosenRates:
    """The learning rates of the arms of a comparison.

    Attributes:
        held_out: The number of training samples that were held out to choose them.
        arms: The rate of each arm.
    """

    held_out: int = 0
    arms: dict[str, ChosenRate] = dataclasses.field(default_factory=dict)


def held_out_recipe(recipe: Recipe, num_samples: int) -> Recipe:
    """Return the recipe of the trials, which holds out a part of the training samples.

    If the recipe of the comparison holds out samples itself, it is returned.
    """
    if recipe.data.validation:
        return recipe
    if num_samples < 2:
        raise InputError(f"expected at least 2 training samples with --tune, got {num_samples}")
    held_out = max(1, num_samples // _ONE_IN)
    return dataclasses.replace(recipe, data=recipe.data.holding_out(held_out))


def untuned(folder: Path, arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms to try, which have no learning rate yet.

    An arm whose trials another one needs is among them.
    """
    known = read_rates(folder).arms
    by_rate = {rated_as(arm.name): arm for arm in reversed(arms) if arm.takes != "suspects"}
    new = [arm for name, arm in by_rate.items() if name not in known]
    needed = {arm.needs for arm in new}
    return [arm for arm in arms if arm in new or arm.name in needed]


def rated_as(arm: str) -> str:
    """Return the arm whose rate an arm has: ``full`` for those that train like it."""
    return FULL if arm in (WATCHED, SECOND) else arm


def plan_trials(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the trials of runs with the recipe of ``held_out_recipe``: each with each factor."""
    return [_trial(run, factor) for factor in FACTORS for run in runs]


def with_chosen_rates(runs: Sequence[PlannedRun], folder: Path) -> list[PlannedRun]:
    """Return the runs of a comparison with the learning rates that were chosen for their arms."""
    arms = read_rates(folder).arms

    def chosen(run: PlannedRun) -> PlannedRun:
        needs = None if run.needs is None else chosen(run.needs)
        factor = arms[rated_as(run.name)].factor
        return dataclasses.replace(_at_rate(run, factor), needs=needs)

    return [chosen(run) for run in runs]


def choose_rates(folder: Path, trials: Sequence[PlannedRun]) -> None:
    """Choose the learning rate of each arm, and write them to ``rates.json``.

    The mean accuracy over the seeds after the last epoch decides, and the smaller rate if two are
    equal. A rate with which a training diverged is not chosen. The rate of an arm that has one
    already is not changed.
    """
    known = read_rates(folder).arms
    accuracies: dict[str, dict[float, list[float | None]]] = {}
    for trial in trials:
        of_arm = accuracies.setdefault(rated_as(trial.name), {})
        of_arm.setdefault(_factor(trial), []).append(trial_accuracy(trial))
    chosen = {arm: _best(arm, found) for arm, found in accuracies.items() if arm not in known}
    rates = ChosenRates(trials[0].recipe.data.validation, {**known, **chosen})
    write_json(folder / RATES, rates)


def rate_lines(rates: ChosenRates) -> Iterator[str]:
    """Yield for each arm which rate was chosen, and how far the others differ, in points."""
    # Imported here, because scipy takes long.
    from fineprune.experiments.arm_table import mean_difference

    for name, rate in rates.arms.items():
        best = _known(rate.accuracies[f"{rate.factor:g}"])
        line = (
            f"{name}: {rate.factor:g} times the learning rate, {statistics.fmean(best):.2%} on "
            f"{rates.held_out:,} held-out samples (seeds: {len(best)})"
        )
        for factor, found in rate.accuracies.items():
            if None in found:
                line += f"; {factor} times: diverged"
            elif factor != f"{rate.factor:g}":
                differs = mean_difference([a - b for a, b in zip(_known(found), best, strict=True)])
                line += f"; {factor} times: {differs.points()} points"
        yield line


def trial_accuracy(trial: PlannedRun) -> float | None:
    """Return the accuracy of a trial on the held-out samples; None if its training diverged."""
    file = trial.folder / SUMMARY
    return read_summary(file).accuracy_last if file.exists() else None


def trial_result(trial: PlannedRun) -> str:
    """Return a line of text on a trial that has been trained."""
    name = f"{trial.name}, seed {trial.recipe.run.seed}, {_factor(trial):g} times the learning rate"
    accuracy = trial_accuracy(trial)
    if accuracy is None:
        return f"tuning: {name} diverged"
    return f"tuning: finished {name}, accuracy {accuracy:.2%} on held-out samples"


def read_rates(folder: Path) -> ChosenRates:
    """Read the learning rates that were chosen in a comparison; there may be none yet."""
    file = folder / RATES
    return read_json(file, ChosenRates) if file.exists() else ChosenRates()


def _trial(run: PlannedRun, factor: float) -> PlannedRun:
    needs = None if run.needs is None else _trial(run.needs, factor)
    folder = run.folder.with_name(f"{run.folder.name}-{factor:g}")
    # Nobody looks at the samples of a trial.
    recipe = run.recipe.replaced("run", history=False)
    return _at_rate(dataclasses.replace(run, recipe=recipe, folder=folder, needs=needs), factor)


def _at_rate(run: PlannedRun, factor: float) -> PlannedRun:
    recipe = run.recipe.replaced("training", lr=run.recipe.training.lr * factor)
    return dataclasses.replace(run, recipe=recipe.replaced("run", rate_factor=factor))


def _factor(trial: PlannedRun) -> float:
    factor = trial.recipe.run.rate_factor
    assert factor is not None
    return factor


def _known(accuracies: Sequence[float | None]) -> list[float]:
    return [accuracy for accuracy in accuracies if accuracy is not None]


def _best(arm: str, accuracies: dict[float, list[float | None]]) -> ChosenRate:
    finished = {
        factor: statistics.fmean(_known(found))
        for factor, found in accuracies.items()
        if None not in found
    }
    if not finished:
        tried = ", ".join(f"{factor:g}" for factor in accuracies)
        raise RunError(
            f"the training of the arm {arm!r} diverged with {tried} times the learning rate: set a "
            f"smaller training.lr, and give another --out"
        )
    factor = max(finished, key=lambda factor: (finished[factor], -factor))
    return ChosenRate(factor, {f"{tried:g}": tuple(found) for tried, found in accuracies.items()})
