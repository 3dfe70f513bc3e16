"""Comparisons: trains every arm with every seed, and writes all runs to one folder."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from fineprune.distributed.all_reduce import check_not_launched
from fineprune.errors import InputError, RunError
from fineprune.experiments.controls import MATCHED, arm_recipe, check_arms, default_arms
from fineprune.experiments.cooldowns import plan_curve, train_trunk
from fineprune.experiments.planned_run import PlannedRun, check_own_folder, epochs_done, with_seed
from fineprune.experiments.same_inputs import check_begun_with, check_finished
from fineprune.launch.follow_parent import end_with_parent
from fineprune.runs.files import (
    COMPARISON,
    RECIPE,
    SUMMARY,
    read_json,
    write_atomically,
    write_json,
)
from fineprune.runs.lock import only_writer
from fineprune.runs.summary import read_summary
from fineprune.training.data import Data, load_data
from fineprune.training.hardware import resolved
from fineprune.training.recipe import Recipe, read_recipe
from fineprune.training.scores_of_run import check_same_samples
from fineprune.training.stop import Stopped, stop_requests
from fineprune.training.summary import input_digests

# All runs of a comparison are planned before the first one is trained.
_MOST_SEEDS = 1000

_POLL_SECONDS = 0.5

OnProgress = Callable[[str, int, int], None]


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

    Raises:
        InputError: The recipe cannot have these arms, or ``seeds`` is below 1.
    """
    if seeds < 1:
        raise InputError(f"expected at least one seed, got {seeds}")
    if seeds > _MOST_SEEDS:
        raise InputError(f"expected at most {_MOST_SEEDS} seeds, got {seeds}")
    data = data or load_data(resolved(recipe))
    num_samples = data.num_samples
    check_arms(recipe, arms, num_samples)
    runs: list[PlannedRun] = []
    for number in range(seeds):
        seeded = with_seed(recipe, number)
        planned = {}
        for arm in arms:
            run_recipe = arm_recipe(seeded, arm, num_samples).replaced("run", arm=arm)
            if arm == "ranked" and number == 0:
                check_same_samples(Path(run_recipe.pruning.scores or ""), data)
            planned[arm] = PlannedRun(arm, number, run_recipe, folder / f"{arm}-{number}")
        if MATCHED in planned:
            method = planned[recipe.pruning.policy]
            planned[MATCHED] = dataclasses.replace(planned[MATCHED], matches=method)
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
    on_progress: OnProgress | None = None,
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
        on_progress: Called with a line of text (which may be empty), the number of epochs trained
            so far, and the number of all epochs.

    Raises:
        InputError: A setting is wrong, the folder holds a single run or runs of another recipe,
            or other labels, weights or data, another process writes to the folder, or
            ``torchrun`` started several processes.
        RunError: The process of a run was killed, or the labels, weights or data changed.
        Stopped: A signal asked this process to stop, and the runs have written checkpoints.
    """
    check_not_launched("fineprune compare", "the runs")
    check_own_folder(folder, COMPARISON, "a comparison")
    if jobs < 1:
        raise InputError(f"expected at least one job, got {jobs}")
    arms = arms or default_arms(recipe)
    data = load_data(resolved(recipe))
    runs = plan_runs(recipe, folder, seeds, arms, data, curve=curve)
    digests = input_digests(recipe, data)
    with only_writer(folder):
        check_begun_with(folder / COMPARISON, digests, "comparison")
        _check_recipe(folder, recipe)
        unfinished = [run for run in runs if not run.finished()]
        listed = _finished_earlier(folder)
        listed += [
            entry
            for run in runs
            if (entry := {"arm": run.name, "seed": run.recipe.run.seed, "path": run.folder.name})
            not in listed
        ]
        write_json(
            folder / COMPARISON,
            {
                "version": 1,
                "title": title,
                "arms": list(dict.fromkeys(entry["arm"] for entry in listed)),
                "seeds": sorted({entry["seed"] for entry in listed}),
                "sha256": digests,
                "runs": listed,
            },
        )
        # After ``compare.json``, which says that the folder is that of a comparison.
        write_atomically(folder / RECIPE, recipe.to_toml())
        total = sum(run.recipe.training.epochs for run in runs)
        progress = on_progress or (lambda line, done, total: None)
        for run in _train_all(unfinished, jobs, lambda: progress("", epochs_done(runs), total)):
            summary = read_summary(run.folder / SUMMARY)
            line = f"finished {run.name}, seed {run.number + 1} of {seeds}"
            line += f", accuracy {summary.accuracy_last:.2%}"
            progress(line, epochs_done(runs), total)
            check_finished(run.folder, digests, "comparison")


def _check_recipe(folder: Path, recipe: Recipe) -> None:
    """Check that the folder of a comparison is empty, or holds one of this recipe.

    Raises:
        InputError: The folder holds a comparison of another recipe.
    """
    if not (folder / RECIPE).exists():
        return
    changed = read_recipe(folder / RECIPE).differences(recipe)
    if changed:
        raise InputError(
            f"expected a comparison of this recipe in {folder}, got one whose {RECIPE} differs "
            f"({'; '.join(changed)}): give another --out"
        )


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


def _train_all(
    runs: Sequence[PlannedRun], jobs: int, on_poll: Callable[[], None]
) -> Iterator[PlannedRun]:
    """Train the runs in separate processes, and yield each run when it is finished.

    A run starts as soon as a process is free, in the given order. A control that matches one of the
    runs, or a run that begins as a copy of one, starts after it; until then, the runs behind it
    come first.
    """
    # Spawned processes do not inherit the memory and the threads of this process.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=context, initializer=end_with_parent, initargs=(os.getpid(),)
    )
    with stop_requests() as stop:
        try:
            waiting = list(runs)
            training: dict[Future[None], PlannedRun] = {}
            while waiting or training:
                unfinished = {run.folder for run in (*waiting, *training.values())}
                ready = [
                    run
                    for run in waiting
                    if (first := run.matches or run.trunk) is None or first.folder not in unfinished
                ]
                for run in ready[: jobs - len(training)]:
                    waiting.remove(run)
                    if run.matches is not None and run.finished():
                        yield run  # Only its method had to be trained again.
                        continue
                    recipe = run.complete()
                    assert recipe is not None
                    copies = [
                        (other.folder, other.recipe)
                        for other in waiting
                        if other.trunk is not None and other.trunk.folder == run.folder
                    ]
                    training[pool.submit(train_trunk, recipe, run.folder, jobs, copies)] = run
                done, _ = concurrent.futures.wait(
                    training, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED
                )
                for future in done:
                    future.result()
                    yield training.pop(future)
                on_poll()
                if stop.number is not None:
                    left = len(waiting) + len(training)
                    raise Stopped(stop.number, f"with {left} runs to go")
            pool.shutdown()
        except BrokenProcessPool:
            raise RunError(
                "the process of a run was killed, perhaps because memory ran out: run the same "
                "command again to continue"
            ) from None
        finally:
            # A terminated run writes a checkpoint before its process ends.
            pool.shutdown(wait=False, cancel_futures=True)
            started = set(multiprocessing.active_children()) - others
            for process in started:
                process.terminate()
            for process in started:
                process.join()
