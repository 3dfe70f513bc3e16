"""Comparisons: trains every arm with every seed, and writes all runs to one folder."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from fineprune.errors import InputError, TrainingDiverged
from fineprune.experiments.controls import (
    FULL,
    MATCHED,
    SECOND,
    check_keeps_evidence,
    default_arms,
    in_order,
    make_arms,
)
from fineprune.experiments.jobs import reached, run_jobs
from fineprune.experiments.planned_run import (
    OnProgress,
    PlannedRun,
    check_begun_with,
    check_same_recipe,
    read_begun,
    teller,
    with_seed,
)
from fineprune.runs.comparison import Arm, Comparison, ListedRun, write_comparison
from fineprune.runs.files import COMPARISON, RECIPE, SUMMARY
from fineprune.runs.lock import only_writer
from fineprune.runs.run import read_run
from fineprune.training.data import Data, load_data
from fineprune.training.forecast import check_rounds
from fineprune.training.hardware import resolved
from fineprune.training.recipe import Recipe, read_written_recipe
from fineprune.training.results import input_digests
from fineprune.writing import write_atomically


def plan_runs(
    recipe: Recipe,
    folder: Path,
    seeds: int,
    arms: Sequence[Arm],
    data: Data,
    rates: Mapping[str, float] = MappingProxyType({}),
) -> list[PlannedRun]:
    """List the runs of a comparison by seed, so that a slow machine affects all arms equally.

    Args:
        recipe: A recipe whose policy skips samples.
        folder: The folder of the runs.
        seeds: The number of runs of each arm, whose seeds follow that of the recipe.
        arms: The arms, from ``make_arms``.
        data: The data of the recipe.
        rates: The multiple of the recipe's learning rate of each arm, from ``tuned_rates``.
    """
    # A shorter arm must not be left uncompiled where the others are compiled: times are compared.
    # And if the recipe is that of a run with --tune, its rate is the recipe's own here.
    compilation = resolved(recipe).run.compile
    # An arm records more than its policy needs only if its changes say so.
    recipe = recipe.replaced("run", compile=compilation, rate_factor=None, history=False)
    runs: list[PlannedRun] = []
    for number in range(seeds):
        planned: dict[str | None, PlannedRun] = {}
        # An arm comes after the one that it needs.
        for arm in sorted(arms, key=lambda arm: arm.needs is not None):
            made = with_seed(recipe, number).replaced("run", arm=arm.name)
            if rates:
                lr = made.training.lr * rates[arm.name]
                made = made.replaced("run", rate_factor=rates[arm.name]).replaced("training", lr=lr)
            if arm.name != MATCHED:  # Its numbers of samples are not known yet.
                made = made.changed(arm.changes)
                try:
                    check_rounds(made, data.num_samples)
                except InputError as error:
                    raise InputError(f"arm {arm.name!r}: {error}") from error
            if arm.name == SECOND:
                check_keeps_evidence(recipe, data.classes)
            own = folder / f"{arm.name.replace(':', '-')}-{made.run.seed}"
            planned[arm.name] = PlannedRun(arm.name, made, own, planned.get(arm.needs))
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
    rates: Mapping[str, float] = MappingProxyType({}),
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
        rates: The multiple of the recipe's learning rate of each arm, from ``tuned_rates``.
        on_progress: See ``OnProgress``.

    Raises:
        TrainingDiverged: A run diverged, now or before. All others are finished.
    """
    check_tuned(folder, tuned=bool(rates))
    data = load_data(resolved(recipe))
    made = make_arms(recipe, arms or default_arms(recipe), data.num_samples)
    runs = plan_runs(recipe, folder, seeds, made, data, rates)
    digests = input_digests(recipe, data)
    with only_writer(folder):
        before = read_begun(folder / COMPARISON, Comparison, "a comparison")
        if (folder / RECIPE).exists():  # Other settings may be why the data are others.
            check_same_recipe(read_written_recipe(folder / RECIPE), recipe, folder, "a comparison")
        if before is not None:
            check_begun_with(before.sha256, digests, folder)
        listed = _listing(folder, before, made, runs)
        listed = dataclasses.replace(listed, title=title, tuned=bool(rates), sha256=dict(digests))
        for run in runs:
            run.finished()  # It checks the folder before anything is written.
        write_comparison(folder, listed)
        # After ``compare.json``, which says that the folder is that of a comparison.
        write_atomically(folder / RECIPE, recipe.to_toml())
        diverged = dict(listed.diverged)
        trained = [run for run in runs if run.folder.name not in diverged]
        tell = teller(trained, on_progress)
        for run, reason in run_jobs(trained, digests, tell, jobs=jobs, result=_result):
            diverged[run.folder.name] = f"{run.label} ({run.folder}): {reason}"
            listed = dataclasses.replace(listed, diverged=dict(diverged))
            write_comparison(folder, listed)
        failed = [diverged[run.folder.name] for run in runs if run.folder.name in diverged]
        if failed:
            # Reports show the finished runs, and say that others are missing.
            kept = tuple(run for run in listed.runs if (folder / run.path / SUMMARY).is_file())
            write_comparison(folder, dataclasses.replace(listed, runs=kept))
            more = f" ({len(failed) - 1} more diverged, too)" if failed[1:] else ""
            shown = f". fineprune report {folder} shows the runs that are finished" if kept else ""
            raise TrainingDiverged(f"{failed[0]}{more}, and give another --out{shown}")


def check_tuned(folder: Path, *, tuned: bool) -> None:
    """Check that a comparison that was begun with rates of its arms, or without, goes on so."""
    before = read_begun(folder / COMPARISON, Comparison, "a comparison")
    if before is not None and before.tuned != tuned:
        raise InputError(
            f"expected {'--tune' if before.tuned else 'no --tune'}, as when the comparison in "
            f"{folder} began, got {'it' if tuned else 'none'}: give the same, or another --out"
        )


def _result(folder: Path) -> str:
    """Return what a run reached and, if full training with its seed is finished, what it saved."""
    # Imported here, because scipy takes long.
    from fineprune.experiments.arm_table import formulas

    run = read_run(folder)
    full = folder.with_name(f"{FULL}-{run.summary.seed}")
    if folder == full or not (full / SUMMARY).exists():
        return reached(folder)
    regular = read_run(full)
    if run.summary.samples_trained >= regular.summary.samples_trained:
        return reached(folder)  # It saves nothing.
    saved = 1 - run.summary.seconds_train / regular.summary.seconds_train
    predicted = formulas(run, regular).saving
    return f"{reached(folder)}, saved {saved:.1%} of the time (predicted {predicted:.1%})"


def _listing(
    folder: Path, before: Comparison | None, arms: Sequence[Arm], runs: Sequence[PlannedRun]
) -> Comparison:
    """Return a comparison with its runs, and those of before that were finished.

    A run that is neither is left out, because reports need finished ones. It is listed again when
    its arm and seed are named. A run that diverged is trained again if its folder was removed.
    """
    named = [
        ListedRun(arm=run.name, seed=run.recipe.run.seed, path=run.folder.name) for run in runs
    ]
    before = before or Comparison(title="", sha256={}, arms=(), runs=())
    earlier = [
        run for run in before.runs if run in named or (folder / run.path / SUMMARY).is_file()
    ]
    all_runs = tuple(dict.fromkeys((*earlier, *named)))
    known = {arm.name: arm for arm in (*before.arms, *arms)}
    used = [known[name] for name in dict.fromkeys(run.arm for run in all_runs)]
    diverged = {path: of for path, of in before.diverged.items() if (folder / path).exists()}
    return dataclasses.replace(before, arms=tuple(in_order(used)), runs=all_runs, diverged=diverged)
