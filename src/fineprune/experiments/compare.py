"""Comparisons: trains every arm with every seed, and writes all runs to one folder."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fineprune.distributed.all_reduce import check_not_launched
from fineprune.errors import InputError, RunError
from fineprune.experiments.controls import (
    FIRST,
    MATCHED,
    SECOND,
    arm_recipe,
    check_arms,
    check_keeps_evidence,
    default_arms,
)
from fineprune.experiments.cooldowns import plan_curve
from fineprune.experiments.planned_run import (
    Digests,
    OnProgress,
    PlannedRun,
    check_begun_with,
    check_finished,
    check_own_folder,
    epochs_done,
    with_seed,
)
from fineprune.experiments.run_pool import train_runs
from fineprune.experiments.tuning import (
    TRIALS,
    check_can_tune,
    choose_rates,
    held_out_recipe,
    plan_trials,
    trial_result,
    untuned,
    with_chosen_rates,
)
from fineprune.runs.files import COMPARISON, RECIPE, SUMMARY, read_json, write_json
from fineprune.runs.lock import only_writer
from fineprune.runs.run import diverged_runs
from fineprune.runs.summary import LEFT_OUT, read_summary
from fineprune.training.data import Data, load_data
from fineprune.training.forecast import check_rounds
from fineprune.training.hardware import resolved
from fineprune.training.recipe import Recipe, read_written_recipe
from fineprune.training.summary import input_digests
from fineprune.writing import write_atomically

# All runs of a comparison are planned before the first one is trained.
_MOST_SEEDS = 1000


def plan_runs(
    recipe: Recipe,
    folder: Path,
    seeds: int,
    arms: Sequence[str],
    data: Data | None = None,
    *,
    curve: bool = False,
) -> list[PlannedRun]:
    """List the runs of a comparison, ordered by seed.

    In this order, a temporary slowdown of the machine affects all arms equally.

    Args:
        recipe: A recipe whose policy skips samples.
        folder: The folder of the comparison.
        seeds: The number of runs of each arm.
        arms: The names of the arms, out of ``ALL_ARMS``.
        data: The data of the recipe; None to load them.
        curve: Whether to add the trainings of ``plan_curve``.
    """
    if seeds < 1:
        raise InputError(f"expected at least one seed, got {seeds}")
    if seeds > _MOST_SEEDS:
        raise InputError(f"expected at most {_MOST_SEEDS} seeds, got {seeds}")
    whole = resolved(recipe)
    data = data or load_data(whole)
    num_samples = data.num_samples
    check_arms(recipe, arms, num_samples)
    # A shorter arm must not be left uncompiled where the others are compiled: times are compared.
    # And if the recipe is that of a run with --tune, its rate is the recipe's own here.
    recipe = recipe.replaced("run", compile=whole.run.compile, rate_factor=None)
    runs: list[PlannedRun] = []
    for number in range(seeds):
        seeded = with_seed(recipe, number)
        planned = {}
        for arm in arms:
            run_recipe = arm_recipe(seeded, arm, num_samples).replaced("run", arm=arm)
            if number == 0 and arm != MATCHED:  # It has the numbers of another arm.
                try:
                    check_rounds(run_recipe, num_samples)
                except InputError as error:
                    raise InputError(f"arm {arm!r}: {error}") from error
            planned[arm] = PlannedRun(arm, number, run_recipe, folder / f"{arm}-{number}")
        if MATCHED in planned:
            method = planned[recipe.pruning.policy]
            planned[MATCHED] = dataclasses.replace(planned[MATCHED], matches=method)
        if SECOND in planned:
            check_keeps_evidence(recipe, data.classes)
            first, again = planned[FIRST], planned[SECOND]
            made = again.recipe.replaced("data", without=str(first.folder))
            planned[SECOND] = dataclasses.replace(again, recipe=made, first=first)
        runs += planned.values()
        if curve:
            runs += plan_curve(seeded, number, folder)
    return runs


def compare(
    recipe: Recipe,
    folder: Path,
    *,
    title: str,
    seeds: int = 1,
    arms: Sequence[str] = (),
    jobs: int = 1,
    curve: bool = False,
    tune: bool = False,
    on_progress: OnProgress = lambda line, done, total: None,
) -> None:
    """Train all arms. Unfinished runs in the folder are continued, and finished ones are kept.

    Arms and seeds can be added to the comparison in the folder. Its finished runs remain part of
    the comparison, whether or not their arms and seeds are named again.

    Args:
        recipe: A recipe whose policy skips samples.
        folder: The folder to which the runs, the recipe and ``compare.json`` are written.
        title: The title of the comparison in the report.
        seeds: The number of runs of each arm.
        arms: The names of the arms, out of ``ALL_ARMS``; none for those of ``default_arms``.
        jobs: The number of runs that train at the same time and share the cores equally.
        curve: Whether to train the curve of cost against accuracy too; see
            ``experiments.cooldowns``.
        tune: Whether to choose the learning rate of each arm first; see ``experiments.tuning``. A
            rate that was chosen is kept when arms or seeds are added.
        on_progress: See ``OnProgress``.
    """
    check_not_launched("fineprune compare", "the runs")
    check_own_folder(folder, COMPARISON, "a comparison")
    if jobs < 1:
        raise InputError(f"expected at least one job, got {jobs}")
    arms = arms or default_arms(recipe)
    if tune:
        check_can_tune(recipe, arms, curve=curve)
    data = load_data(resolved(recipe))
    runs = plan_runs(recipe, folder, seeds, arms, data, curve=curve)
    digests = input_digests(recipe, data)
    with only_writer(folder):
        _check_recipe(folder, recipe)  # Other settings may be why the data are others.
        check_begun_with(folder / COMPARISON, digests, "comparison")
        _check_tuned(folder, tune=tune)
        trials, trial_digests = _plan_trials(recipe, folder, arms, data) if tune else ([], digests)
        # If there are trials, the rates of the runs are not known yet.
        unfinished = [] if trials else _unfinished(runs, folder, tune=tune)
        # What is noted of the runs that diverged, except for those that are trained again.
        planned = {run.folder.name for run in runs}
        noted = diverged_runs(folder).items()
        diverged = {path: text for path, text in noted if path not in planned}

        def list_runs(named: Sequence[PlannedRun]) -> Any:
            """Write which runs there are: those named, and those that were finished earlier."""
            about = {"version": 1, "title": title, "tuned": tune, "sha256": digests}
            listing = _listing(folder, named)
            write_json(folder / COMPARISON, about | listing | {"diverged": diverged})
            return listing["runs"]

        list_runs(runs)
        # After ``compare.json``, which says that the folder is that of a comparison.
        write_atomically(folder / RECIPE, recipe.to_toml())
        counted = [*trials, *runs]

        def told(line: str = "") -> None:
            total = sum(run.recipe.training.epochs for run in counted)
            on_progress(line, epochs_done(counted), total)

        if trials:
            untrained = [trial for trial in trials if not trial.finished()]
            later = sum(not (run.folder / SUMMARY).exists() for run in runs)
            for trial, _ in train_runs(untrained, jobs, told, later=later, may_skip_nothing=True):
                told(trial_result(trial))
                if trial.finished():
                    check_finished(trial.folder, trial_digests, "comparison")
            choose_rates(folder, trials)
            # A training that diverged has not all of its epochs.
            counted = [*(trial for trial in trials if trial.finished()), *runs]
            unfinished = _unfinished(runs, folder, tune=tune)
        for run, error in train_runs(unfinished, jobs, told):
            which = f"{run.name}, seed {run.number + 1} of {seeds}"
            if error is not None:
                diverged[run.folder.name] = f"{which} ({run.folder}): {error}"
                list_runs(runs)
                told(f"{which} diverged")
            if not run.finished():
                continue
            summary = read_summary(run.folder / SUMMARY)
            told(f"finished {which}, accuracy {summary.accuracy_last:.2%}")
            # A second training leaves out more than the comparison.
            skipped = (LEFT_OUT,) if run.name == SECOND else ()
            read = {name: digest for name, digest in digests.items() if name not in skipped}
            check_finished(run.folder, read, "comparison")
        messages = [diverged[run.folder.name] for run in runs if run.folder.name in diverged]
        if messages:
            # Reports show the finished runs, and say that others are missing.
            advice = ", and give another --out"
            if list_runs([]):
                advice += f". fineprune report {folder} shows the runs that are finished"
            raise RunError(_of_diverged(messages) + advice)


def _of_diverged(diverged: Sequence[str]) -> str:
    """Return the first message of the runs that diverged, and how many others did."""
    more = len(diverged) - 1
    others = f" ({more} other {'runs' if more > 1 else 'run'} diverged, too)" if more else ""
    return diverged[0] + others


def _plan_trials(
    recipe: Recipe, folder: Path, arms: Sequence[str], data: Data
) -> tuple[list[PlannedRun], Digests]:
    """List the runs that choose learning rates, and return the digests of what they read."""
    new = untuned(folder, recipe, arms)
    if not new:
        return [], {}
    held_out = held_out_recipe(recipe, data.num_samples)
    if held_out != recipe:
        data = load_data(resolved(held_out))
    runs = plan_runs(held_out, folder / TRIALS, 1, new, data)
    return plan_trials(runs), input_digests(held_out, data)


def _unfinished(runs: Sequence[PlannedRun], folder: Path, *, tune: bool) -> list[PlannedRun]:
    """Return the runs that are not finished, with the learning rates of their arms."""
    complete = with_chosen_rates(runs, folder) if tune else runs
    return [run for run in complete if not run.finished()]


def _check_tuned(folder: Path, *, tune: bool) -> None:
    """Check that the comparison in a folder, if any, began with or without tuning."""
    if not (folder / COMPARISON).is_file():
        return
    try:
        begun = bool(read_json(folder / COMPARISON).get("tuned"))
    except (AttributeError, InputError):
        return  # The file is damaged, and written again.
    if begun != tune:
        given, advice = ("--tune", "leave it out") if tune else ("none", "add --tune")
        raise InputError(
            f"expected {'no --tune' if tune else '--tune'}, as when the comparison in {folder} "
            f"began, got {given}: {advice}, or give another --out"
        )


def _check_recipe(folder: Path, recipe: Recipe) -> None:
    """Check that the folder of a comparison is empty, or holds one of this recipe."""
    if not (folder / RECIPE).exists():
        return
    changed = read_written_recipe(folder / RECIPE).differences(recipe)
    if changed:
        raise InputError(
            f"expected a comparison of this recipe in {folder}, got one whose {RECIPE} differs "
            f"({'; '.join(changed)}): give another --out"
        )


def _listing(folder: Path, runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """Return what ``compare.json`` lists: the runs, and those that were finished earlier."""
    listed = _finished_earlier(folder)
    listed += [
        entry
        for run in runs
        if (entry := {"arm": run.name, "seed": run.recipe.run.seed, "path": run.folder.name})
        not in listed
    ]
    return {
        "arms": list(dict.fromkeys(entry["arm"] for entry in listed)),
        "seeds": sorted({entry["seed"] for entry in listed}),
        "runs": listed,
    }


def _finished_earlier(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of the finished runs that ``compare.json`` lists.

    An unfinished run is left out, because reports need finished ones. It is listed again when its
    arm and seed are named. If the file is damaged, this is true of all runs.
    """
    if not (folder / COMPARISON).is_file():
        return []
    try:
        entries = [
            {"arm": entry["arm"], "seed": int(entry["seed"]), "path": entry["path"]}
            for entry in read_json(folder / COMPARISON)["runs"]
        ]
        return [entry for entry in entries if (folder / entry["path"] / SUMMARY).is_file()]
    except (InputError, KeyError, TypeError, ValueError):
        return []
