"""Comparisons: trains every arm with every seed, and writes all runs to one folder."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fineprune.errors import InputError, RunError
from fineprune.experiments.controls import (
    FULL,
    check_keeps_evidence,
    default_arms,
    in_order,
    make_arms,
)
from fineprune.experiments.jobs import run_jobs
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
from fineprune.experiments.tuning import (
    TRIALS,
    choose_rates,
    held_out_recipe,
    plan_trials,
    rate_lines,
    read_rates,
    trial_result,
    untuned,
    with_chosen_rates,
)
from fineprune.launcher import check_not_launched
from fineprune.runs.comparison import (
    Arm,
    Comparison,
    ListedRun,
    read_comparison,
    write_comparison,
)
from fineprune.runs.files import COMPARISON, RECIPE, SUMMARY
from fineprune.runs.lock import only_writer
from fineprune.runs.run import read_run
from fineprune.runs.summary import read_summary
from fineprune.training.data import Data, load_data
from fineprune.training.forecast import check_rounds
from fineprune.training.hardware import resolved
from fineprune.training.recipe import Recipe, read_written_recipe
from fineprune.training.summary import input_digests
from fineprune.writing import write_atomically

# All runs of a comparison are planned before the first one is trained.
_MOST_SEEDS = 1000


def plan_runs(
    recipe: Recipe, folder: Path, seeds: int, arms: Sequence[Arm], data: Data
) -> list[PlannedRun]:
    """List the runs of a comparison, ordered by seed.

    In this order, a temporary slowdown of the machine affects all arms equally.

    Args:
        recipe: A recipe whose policy skips samples.
        folder: The folder of the comparison.
        seeds: The number of runs of each arm, whose seeds follow that of the recipe.
        arms: The arms, from ``make_arms``.
        data: The data of the recipe.
    """
    # A shorter arm must not be left uncompiled where the others are compiled: times are compared.
    # And if the recipe is that of a run with --tune, its rate is the recipe's own here.
    compilation = resolved(recipe).run.compile
    # An arm records more than its policy needs only if its changes say so.
    recipe = recipe.replaced("run", compile=compilation, rate_factor=None, history=False)
    runs: list[PlannedRun] = []
    for number in range(seeds):
        planned: dict[str, PlannedRun] = {}
        # An arm comes after the one that it needs.
        for arm in sorted(arms, key=lambda arm: arm.needs is not None):
            seeded = with_seed(recipe, number).replaced("run", arm=arm.name)
            made = seeded if arm.takes == "numbers" else seeded.changed(arm.changes)
            if number == 0 and arm.takes != "numbers":
                try:
                    check_rounds(made, data.num_samples)
                except InputError as error:
                    raise InputError(f"arm {arm.name!r}: {error}") from error
            if arm.takes == "suspects":
                check_keeps_evidence(recipe, data.classes)
            own = folder / f"{arm.name.replace(':', '-')}-{seeded.run.seed}"
            needs = None if arm.needs is None else planned[arm.needs]
            planned[arm.name] = PlannedRun(arm.name, made, own, needs, arm.takes)
        runs += [planned[arm.name] for arm in arms]
    return runs


def compare(
    recipe: Recipe,
    folder: Path,
    *,
    title: str,
    seeds: int = 1,
    arms: Sequence[str] = (),
    jobs: int = 1,
    tune: int = 0,
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
        arms: The names of the arms; see ``make_arms``. None for those of ``default_arms``.
        jobs: The number of runs that train at the same time and share the cores equally.
        tune: The number of seeds with which the learning rate of each arm is chosen first; 0 to
            choose none. A rate that was chosen is kept when arms or seeds are added.
        on_progress: See ``OnProgress``.
    """
    check_not_launched("fineprune compare", "the runs")
    check_own_folder(folder, COMPARISON, "a comparison")
    for name, number, most in (("seeds", seeds, _MOST_SEEDS), ("jobs", jobs, _MOST_SEEDS)):
        if not 1 <= number <= most:
            raise InputError(f"expected --{name} from 1 to {most}, got {number}")
    if not 0 <= tune <= _MOST_SEEDS:
        raise InputError(f"expected --tune from 0 to {_MOST_SEEDS} seeds, got {tune}")
    data = load_data(resolved(recipe))
    made = make_arms(recipe, arms or default_arms(recipe), data.num_samples)
    runs = plan_runs(recipe, folder, seeds, made, data)
    digests = input_digests(recipe, data)
    with only_writer(folder):
        before = _begun(folder, recipe, digests, tune)
        new = untuned(folder, made) if tune else []
        trials, trial_digests = _plan_trials(recipe, folder, new, tune, data)
        # If there are trials, the rates of the runs are not known yet.
        unfinished = [] if trials else _unfinished(runs, folder, tune)
        listed = _listed(folder, before, made, runs)
        listed = dataclasses.replace(listed, title=title, tuned=tune, sha256=dict(digests))
        write_comparison(folder, listed)
        # After ``compare.json``, which says that the folder is that of a comparison.
        write_atomically(folder / RECIPE, recipe.to_toml())
        counted = [*trials, *runs]

        def told(line: str = "") -> None:
            total = sum(run.recipe.training.epochs for run in counted)
            on_progress(line, epochs_done(counted), total)

        if trials:
            untrained = [trial for trial in trials if not trial.finished()]
            later = sum(not (run.folder / SUMMARY).exists() for run in runs)
            for ended in run_jobs(untrained, jobs, told, later=later):
                told(trial_result(ended.run))
                if ended.run.finished():
                    check_finished(ended.run, trial_digests, "comparison")
            choose_rates(folder, trials)
            for line in rate_lines(read_rates(folder)):
                told(f"tuning: {line}")
            # A training that diverged has not all of its epochs.
            counted = [*(trial for trial in trials if trial.finished()), *runs]
            unfinished = _unfinished(runs, folder, tune)
        diverged = {}
        for ended in run_jobs(unfinished, jobs, told):
            run = ended.run
            which = f"{run.name}, seed {run.recipe.run.seed}"
            for message in ended.said:
                told(f"{which}: {message}")
            if ended.diverged is not None:
                diverged[run.folder.name] = f"{which} ({run.folder}): {ended.diverged}"
                noted = {**listed.diverged, **diverged}
                write_comparison(folder, dataclasses.replace(listed, diverged=noted))
                told(f"{which} diverged")
            elif run.finished():
                told(f"finished {which}, {_result(run)}")
                check_finished(run, digests, "comparison")
        if diverged:
            # Reports show the finished runs, and say that others are missing.
            kept = _listed(folder, dataclasses.replace(listed, diverged=diverged), made, [])
            write_comparison(folder, dataclasses.replace(kept, diverged=noted))
            advice = f". fineprune report {folder} shows the runs that are finished"
            raise RunError(
                _of_diverged(list(diverged.values()))
                + ", and give another --out"
                + (advice if kept.runs else "")
            )


def _result(run: PlannedRun) -> str:
    """Return what a run reached and, if full training with its seed is finished, what it saved."""
    # Imported here, because scipy takes long.
    from fineprune.experiments.arm_table import formulas

    summary = read_summary(run.folder / SUMMARY)
    said = f"accuracy {summary.accuracy_last:.2%}"
    full = run.folder.with_name(f"{FULL}-{summary.seed}")
    if run.name == FULL or not (full / SUMMARY).exists():
        return said
    whole = read_summary(full / SUMMARY)
    if summary.samples_trained >= whole.samples_trained:
        return said  # It saves nothing.
    predicted = formulas(read_run(run.folder), read_run(full)).saving
    saved = 1 - summary.seconds_train / whole.seconds_train
    return f"{said}, saved {saved:.1%} of the time (predicted {predicted:.1%})"


def _of_diverged(diverged: Sequence[str]) -> str:
    """Return the first message of the runs that diverged, and how many others did."""
    more = len(diverged) - 1
    others = f" ({more} other {'runs' if more > 1 else 'run'} diverged, too)" if more else ""
    return diverged[0] + others


def _plan_trials(
    recipe: Recipe, folder: Path, arms: Sequence[Arm], seeds: int, data: Data
) -> tuple[list[PlannedRun], Digests]:
    """List the runs that choose learning rates, and return the digests of what they read."""
    if not arms:
        return [], {}
    held_out = held_out_recipe(recipe, data.num_samples)
    if held_out != recipe:
        data = load_data(resolved(held_out))
    own = make_arms(held_out, [arm.name for arm in arms], data.num_samples)
    runs = plan_runs(held_out, folder / TRIALS, seeds, own, data)
    return plan_trials(runs), input_digests(held_out, data)


def _unfinished(runs: Sequence[PlannedRun], folder: Path, tune: int) -> list[PlannedRun]:
    """Return the runs that are not finished, with the learning rates of their arms."""
    complete = with_chosen_rates(runs, folder) if tune else runs
    return [run for run in complete if not run.finished()]


def _begun(folder: Path, recipe: Recipe, digests: Digests, tune: int) -> Comparison | None:
    """Return the comparison in a folder, after checking that it can go on; None without one."""
    if (folder / RECIPE).exists():  # Other settings may be why the data are others.
        changed = read_written_recipe(folder / RECIPE).differences(recipe)
        if changed:
            raise InputError(
                f"expected a comparison of this recipe in {folder}, got one whose {RECIPE} differs "
                f"({'; '.join(changed)}): give another --out"
            )
    check_begun_with(folder / COMPARISON, digests, "comparison")
    try:
        before = read_comparison(folder) if (folder / COMPARISON).is_file() else None
    except InputError:
        return None  # The file is damaged, and written again.
    if before is not None and before.tuned != tune:
        wanted = f"--tune {before.tuned}" if before.tuned else "no --tune"
        raise InputError(
            f"expected {wanted}, as when the comparison in {folder} began, got "
            f"{f'--tune {tune}' if tune else 'none'}: give the same, or another --out"
        )
    return before


def _listed(
    folder: Path, before: Comparison | None, arms: Sequence[Arm], runs: Sequence[PlannedRun]
) -> Comparison:
    """Return what ``compare.json`` lists: runs, and those that were finished earlier.

    A run that is neither is left out, because reports need finished ones. It is listed again when
    its arm and seed are named.
    """
    named = [
        ListedRun(arm=run.name, seed=run.recipe.run.seed, path=run.folder.name) for run in runs
    ]
    earlier = [
        run
        for run in (before.runs if before else ())
        if run in named or (folder / run.path / SUMMARY).is_file()
    ]
    known = {arm.name: arm for arm in (*(before.arms if before else ()), *arms)}
    all_runs = tuple(dict.fromkeys((*earlier, *named)))
    used = in_order([known[name] for name in dict.fromkeys(run.arm for run in all_runs)])
    paths = {run.path for run in named}
    noted = before.diverged if before else {}
    return Comparison(
        title="" if before is None else before.title,
        tuned=0 if before is None else before.tuned,
        sha256={} if before is None else before.sha256,
        arms=tuple(used),
        runs=all_runs,
        diverged={path: text for path, text in noted.items() if path not in paths},
    )
