"""Compare: train every arm with every seed, side by side, into one folder."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from fineprune.errors import InputError, RunError
from fineprune.experiments.controls import ARMS, arm_recipe
from fineprune.experiments.planned_run import PlannedRun, epochs_done
from fineprune.launch.follow_parent import end_with_parent
from fineprune.runs.files import COMPARISON, RECIPE, write_atomically, write_json
from fineprune.runs.lock import only_writer
from fineprune.training.data import load_data
from fineprune.training.hardware import resolved
from fineprune.training.loop import train
from fineprune.training.recipe import Recipe
from fineprune.training.stop import Stopped, stop_requests

# The order of an epoch comes from seed + epoch, as in DistributedSampler: seeds that are nearer to
# each other than the number of epochs would share most of their orders.
_SEED_STEP = 1_000_003

_POLL_SECONDS = 0.5

OnProgress = Callable[[str, int, int], None]


def plan_runs(recipe: Recipe, folder: Path, seeds: int, arms: Sequence[str]) -> list[PlannedRun]:
    """List the runs of a comparison, seed after seed, so that a noisy hour hurts all arms alike.

    Raises:
        InputError: An arm is not known or is given twice, or the recipe has no schedule.
    """
    if seeds < 1:
        raise InputError(f"expected at least one seed, got {seeds}")
    twice = next((arm for arm in arms if list(arms).count(arm) > 1), None)
    if twice is not None:
        raise InputError(f"expected every arm once, got {twice!r} {list(arms).count(twice)} times")
    num_samples = load_data(resolved(recipe)).num_samples
    runs = []
    for number in range(seeds):
        seeded = recipe.replaced("run", seed=recipe.run.seed + number * _SEED_STEP)
        for arm in arms:
            made = arm_recipe(seeded, arm, num_samples).replaced("run", arm=arm)
            runs.append(PlannedRun(arm, number, made, folder / f"{arm}-{number}"))
    return runs


def compare(
    recipe: Recipe,
    folder: Path,
    *,
    title: str,
    seeds: int = 1,
    arms: Sequence[str] = ARMS,
    jobs: int = 1,
    on_progress: OnProgress | None = None,
) -> None:
    """Train all arms. Runs that the folder already holds are continued, or left if finished.

    Args:
        recipe: A recipe with a pruning schedule.
        folder: Where the runs, the recipe and ``compare.json`` are written.
        title: What the report calls the comparison.
        seeds: The number of runs of each arm.
        arms: Names from ``ARMS``.
        jobs: The number of runs at the same time, each on its share of the cores.
        on_progress: Called with a line of text, the epochs done and the number of all epochs.

    Raises:
        InputError: A setting is wrong, the folder holds runs of another recipe, or another process
            writes it.
        RunError: A run's process was killed.
        Stopped: A signal asked this process to stop; the runs have written checkpoints.
    """
    if jobs < 1:
        raise InputError(f"expected at least one job, got {jobs}")
    runs = plan_runs(recipe, folder, seeds, arms)
    with only_writer(folder):
        waiting = [run for run in runs if not run.finished()]
        write_atomically(folder / RECIPE, recipe.to_toml())
        write_json(
            folder / COMPARISON,
            {
                "version": 1,
                "title": title,
                "arms": list(arms),
                "seeds": sorted({run.recipe.run.seed for run in runs}),
                "runs": [
                    {"arm": run.name, "seed": run.recipe.run.seed, "path": run.folder.name}
                    for run in runs
                ],
            },
        )
        total = sum(run.recipe.training.epochs for run in runs)
        tell = on_progress or (lambda line, done, total: None)
        for run in _trained(waiting, jobs, lambda: tell("", epochs_done(runs), total)):
            tell(f"{run.name}, seed {run.number + 1} of {seeds}", epochs_done(runs), total)


def _trained(
    runs: Sequence[PlannedRun], jobs: int, on_poll: Callable[[], None]
) -> Iterator[PlannedRun]:
    """Train runs in processes of their own, and yield each when it is finished."""
    # One run's memory and threads must not be another's.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=context, initializer=end_with_parent, initargs=(os.getpid(),)
    )
    with stop_requests() as stop:
        try:
            pending = {pool.submit(_train_one, run, jobs): run for run in runs}
            while pending:
                done, _ = concurrent.futures.wait(pending, timeout=_POLL_SECONDS)
                for future in done:
                    future.result()
                    yield pending.pop(future)
                on_poll()
                if stop.number is not None:
                    raise Stopped(stop.number, f"with {len(pending)} runs to go")
            pool.shutdown()
        except BrokenProcessPool:
            raise RunError(
                "the process of a run was killed, perhaps for want of memory: run the same command "
                "again to go on"
            ) from None
        finally:
            # A process that is told to end writes a checkpoint first.
            pool.shutdown(wait=False, cancel_futures=True)
            started = set(multiprocessing.active_children()) - others
            for process in started:
                process.terminate()
            for process in started:
                process.join()


def _train_one(run: PlannedRun, sharing: int) -> None:
    train(run.recipe, run.folder, sharing=sharing, resume=True)
