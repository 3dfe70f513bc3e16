"""The learning rate of each arm of a comparison, chosen by trials on held-out training samples.

The best rate differs between methods, and two methods can be compared only if each has its own. A
rate that is chosen by the test accuracy makes this accuracy too high. So each arm is first trained
with several rates on a part of the training samples, and evaluated on the others. The file
``rates.json`` in the folder of the comparison holds the accuracies of these trials and the choice.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from fineprune.errors import InputError, RunError
from fineprune.experiments.controls import MATCHED, MULTIPLES, SECOND
from fineprune.experiments.planned_run import PlannedRun
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
        accuracies: The accuracy on the held-out samples after the last epoch, as a fraction, by the
            factor as text; None if the training diverged.
    """

    factor: float
    accuracies: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class ChosenRates:
    """The learning rates of the arms of a comparison.

    Attributes:
        held_out: The number of training samples that were held out to choose them.
        arms: The rate of each arm.
    """

    held_out: int
    arms: Mapping[str, ChosenRate]


def check_can_tune(recipe: Recipe, arms: Sequence[str], *, curve: bool) -> None:
    """Check that the learning rates of all arms can be chosen."""
    if curve:
        raise InputError(
            "expected --tune or --curve, got both: the trainings of the curve share one learning "
            "rate, so train it into another --out"
        )
    if SECOND in arms:
        raise InputError(
            f"expected no arm {SECOND!r} with --tune, got {', '.join(arms)}: leave it out"
        )
    multiples = [arm for arm in arms if arm in MULTIPLES]
    if multiples:
        raise InputError(
            f"expected no arms with --tune whose learning rate is a multiple of another arm's, got "
            f"{', '.join(multiples)}: leave them out"
        )


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


def untuned(folder: Path, recipe: Recipe, arms: Sequence[str]) -> list[str]:
    """Return the arms that have no learning rate yet.

    The method is also returned with its control ``matched``, whose trials repeat the numbers of
    samples of its trials.
    """
    known = read_rates(folder).arms
    new = [arm for arm in arms if arm not in known]
    return [arm for arm in arms if arm in new or (MATCHED in new and arm == recipe.pruning.policy)]


def plan_trials(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the trials of some arms: each run with each multiple of its learning rate.

    There is one run of each arm, with the recipe of ``held_out_recipe``.
    """
    return [_trial(run, factor) for factor in FACTORS for run in runs]


def with_chosen_rates(runs: Sequence[PlannedRun], folder: Path) -> list[PlannedRun]:
    """Return the runs of a comparison with the learning rates that were chosen for their arms."""
    arms = read_rates(folder).arms

    def chosen(run: PlannedRun) -> PlannedRun:
        matches = None if run.matches is None else chosen(run.matches)
        return dataclasses.replace(_at_rate(run, arms[run.name].factor), matches=matches)

    return [chosen(run) for run in runs]


def choose_rates(folder: Path, trials: Sequence[PlannedRun]) -> None:
    """Choose the learning rate of each arm, and write them to ``rates.json``.

    The accuracy after the last epoch decides, and the smaller rate if two are equal. The rate of an
    arm that has one already is not changed. A trial without a summary diverged.
    """
    known = read_rates(folder).arms
    accuracies: dict[str, dict[float, float | None]] = {}
    for trial in trials:
        accuracies.setdefault(trial.name, {})[_factor(trial)] = trial_accuracy(trial)
    chosen = {arm: _best(arm, found) for arm, found in accuracies.items() if arm not in known}
    rates = ChosenRates(trials[0].recipe.data.validation, {**known, **chosen})
    write_json(folder / RATES, {"version": 1, **dataclasses.asdict(rates)})


def trial_accuracy(trial: PlannedRun) -> float | None:
    """Return the accuracy of a trial on the held-out samples; None if its training diverged."""
    file = trial.folder / SUMMARY
    return read_summary(file).accuracy_last if file.exists() else None


def trial_result(trial: PlannedRun) -> str:
    """Return a line of text on a trial that has been trained."""
    name = f"{trial.name} with {_factor(trial):g} times the learning rate"
    accuracy = trial_accuracy(trial)
    if accuracy is None:
        return f"tuning: {name} diverged"
    return f"tuning: finished {name}, accuracy {accuracy:.2%} on held-out samples"


def read_rates(folder: Path) -> ChosenRates:
    """Read the learning rates that were chosen in a comparison; there may be none yet."""
    file = folder / RATES
    if not file.exists():
        return ChosenRates(0, {})
    content = read_json(file)
    try:
        arms = {
            arm: ChosenRate(float(rate["factor"]), dict(rate["accuracies"]))
            for arm, rate in content["arms"].items()
        }
        return ChosenRates(int(content["held_out"]), arms)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"expected the learning rate of each arm in {file}, cannot read it: {error!r}: restore "
            f"the file, or remove it to choose the rates again"
        ) from error


def _trial(run: PlannedRun, factor: float) -> PlannedRun:
    matches = None if run.matches is None else _trial(run.matches, factor)
    folder = run.folder.with_name(f"{run.name}-{factor:g}")
    # Nobody looks at the samples of a trial.
    recipe = run.recipe.replaced("run", history=False)
    trial = dataclasses.replace(run, recipe=recipe, folder=folder, matches=matches)
    return _at_rate(trial, factor)


def _at_rate(run: PlannedRun, factor: float) -> PlannedRun:
    recipe = run.recipe.replaced("training", lr=run.recipe.training.lr * factor)
    return dataclasses.replace(run, recipe=recipe.replaced("run", rate_factor=factor))


def _factor(trial: PlannedRun) -> float:
    factor = trial.recipe.run.rate_factor
    assert factor is not None
    return factor


def _best(arm: str, accuracies: Mapping[float, float | None]) -> ChosenRate:
    finished = {factor: found for factor, found in accuracies.items() if found is not None}
    if not finished:
        tried = ", ".join(f"{factor:g}" for factor in accuracies)
        raise RunError(
            f"the training of the arm {arm!r} diverged with {tried} times the learning rate: set a "
            f"smaller training.lr, and give another --out"
        )
    factor = max(finished, key=lambda factor: (finished[factor], -factor))
    return ChosenRate(factor, {f"{tried:g}": found for tried, found in accuracies.items()})
