"""The learning rate of each arm of a comparison, chosen by trials on held-out training samples.

The best rate differs between methods, and two methods can be compared only if each has its own. A
rate that is chosen by the test accuracy makes this accuracy too high. So each arm is first trained
with several rates and seeds on a part of the training samples, and evaluated on the others: one
comparison for each rate, in the folder ``rates`` of the comparison.
"""

import contextlib
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from fineprune.errors import InputError, RunError, TrainingDiverged
from fineprune.experiments.arm_table import mean_difference
from fineprune.experiments.compare import check_tuned, compare
from fineprune.experiments.controls import FULL, SECOND, WATCHED, default_arms, make_arms
from fineprune.experiments.planned_run import OnProgress, named
from fineprune.runs.run import read_runs
from fineprune.training.data import load_data
from fineprune.training.hardware import resolved
from fineprune.training.recipe import Recipe

# The multiples of the recipe's learning rate that are tried, in increasing order.
FACTORS = (1.0, 1.5, 2.0)

# One in so many training samples is held out, unless the recipe holds some out itself.
_ONE_IN = 10

# The accuracies of an arm with each seed, by the factor.
_Found = dict[float, list[float]]


def tuned_rates(
    recipe: Recipe,
    folder: Path,
    *,
    seeds: int,
    arms: Sequence[str] = (),
    jobs: int = 1,
    on_progress: OnProgress = lambda line, done, total: None,
) -> dict[str, float]:
    """Return the multiple of the learning rate of each arm, for ``compare``.

    The mean accuracy over the seeds after the last epoch decides, and the smaller rate if two are
    equal. A rate with which a training diverges is not chosen. Trials that are finished are kept.

    Args:
        recipe: The recipe of the comparison.
        folder: The folder of the comparison.
        seeds: The number of trials of each arm with each rate.
        arms: The names of the arms; none for those of ``default_arms``.
        jobs: The number of runs that train at the same time.
        on_progress: See ``OnProgress``.

    Raises:
        InputError: The comparison in the folder was begun without rates of its arms.
        RunError: An arm diverged with every rate.
    """
    check_tuned(folder, tuned=True)
    num_samples = load_data(resolved(recipe)).num_samples
    made = make_arms(recipe, arms or default_arms(recipe), num_samples)
    # Those that train like full training have its rate.
    rated = {arm.name: FULL if arm.name in (WATCHED, SECOND) else arm.name for arm in made}
    tried = list(dict.fromkeys(rated.values()))
    held_out = held_out_recipe(recipe, num_samples)
    found: dict[str, _Found] = {name: {} for name in tried}
    epochs = 0
    for factor in FACTORS:
        trials = folder / "rates" / f"{factor:g}"
        at_rate = held_out.replaced("training", lr=recipe.training.lr * factor)
        name = f"tuning, {factor:g} times the learning rate"
        with contextlib.suppress(TrainingDiverged):
            compare(
                at_rate,
                trials,
                title=name,
                seeds=seeds,
                arms=tried,
                jobs=jobs,
                on_progress=named(name, on_progress),
            )
        for run in read_runs([trials]):
            if run.summary.arm in found:
                found[run.summary.arm].setdefault(factor, []).append(run.summary.accuracy_last)
                epochs += run.summary.epochs
    chosen = {name: _best(name, of_arm, seeds) for name, of_arm in found.items()}
    for name, factor in chosen.items():
        on_progress(_line(name, factor, found[name], held_out.data.validation), epochs, epochs)
    return {name: chosen[other] for name, other in rated.items()}


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


def _best(arm: str, found: _Found, seeds: int) -> float:
    most = max([seeds, *map(len, found.values())])  # Of others, some trials diverged.
    finished = {factor: statistics.fmean(of) for factor, of in found.items() if len(of) == most}
    if not finished:
        tried = ", ".join(f"{factor:g}" for factor in FACTORS)
        raise RunError(
            f"the training of the arm {arm!r} diverged with {tried} times the learning rate: set a "
            f"smaller training.lr, and give another --out"
        )
    return max(finished, key=lambda factor: (finished[factor], -factor))


def _line(arm: str, chosen: float, found: _Found, held_out: int) -> str:
    """Say which rate was chosen for an arm, and how far the others differ, in points."""
    best = found[chosen]
    line = (
        f"tuning: {arm}: {chosen:g} times the learning rate, {statistics.fmean(best):.2%} on "
        f"{held_out:,} held-out samples (seeds: {len(best)})"
    )
    for factor in FACTORS:
        if len(found.get(factor, ())) < len(best):
            line += f"; {factor:g} times: diverged"
        elif factor != chosen:
            differs = mean_difference([a - b for a, b in zip(found[factor], best, strict=True)])
            line += f"; {factor:g} times: {differs.points()} points"
    return line
