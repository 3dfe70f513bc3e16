"""Compare: train every arm with every seed, side by side, into one folder."""

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path

from fineprune.errors import InputError
from fineprune.experiments.controls import ARMS, arm_recipe
from fineprune.experiments.planned_run import PlannedRun, epochs_done
from fineprune.runs.files import COMPARISON, write_json_atomically
from fineprune.training.data import load_data
from fineprune.training.hardware import available_cores, resolved
from fineprune.training.loop import train
from fineprune.training.recipe import Recipe

# An epoch's order comes from seed + epoch, as in DistributedSampler: seeds nearer than the number
# of epochs would share most of their orders.
_SEED_STEP = 1_000_003

_POLL_SECONDS = 0.5

OnProgress = Callable[[str, int, int], None]


def plan_runs(recipe: Recipe, folder: Path, seeds: int, arms: Sequence[str]) -> list[PlannedRun]:
    """List a comparison's runs, seed after seed, so that a noisy hour hurts all arms alike.

    Raises:
        InputError: an arm is not known, or the recipe has no schedule.
    """
    if seeds < 1:
        raise InputError(f"expected at least one seed, got {seeds}")
    num_samples = load_data(resolved(recipe)).num_samples
    runs = []
    for number in range(seeds):
        seeded = recipe.replaced("run", seed=recipe.run.seed + number * _SEED_STEP)
        for arm in arms:
            made = arm_recipe(seeded, arm, num_samples)
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
    """Train all arms; runs that the folder already holds are continued or left as they are.

    Args:
        recipe: with a pruning schedule.
        folder: where the runs and ``compare.json`` are written.
        title: what the report calls it.
        seeds: runs of each arm.
        arms: of ``ARMS``.
        jobs: runs at the same time, each on its share of the cores.
        on_progress: called with a line of text, epochs done and epochs in all.

    Raises:
        InputError: a setting is wrong, or the folder holds runs of another recipe.
    """
    if jobs < 1:
        raise InputError(f"expected at least one job, got {jobs}")
    if not recipe.run.threads:
        recipe = recipe.replaced("run", threads=max(1, available_cores() // jobs))
    recipe = resolved(recipe)
    runs = plan_runs(recipe, folder, seeds, arms)
    waiting = [run for run in runs if not run.finished()]
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomically(
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
    # Processes of their own, so that one run's memory and threads are not another's.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        pending = {pool.submit(_train_one, run): run for run in waiting}
        try:
            while pending:
                done, _ = concurrent.futures.wait(pending, timeout=_POLL_SECONDS)
                for future in done:
                    future.result()
                    run = pending.pop(future)
                    tell(f"{run.name}, seed {run.number + 1} of {seeds}", epochs_done(runs), total)
                tell("", epochs_done(runs), total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _train_one(run: PlannedRun) -> None:
    train(run.recipe, run.folder, arm=run.name, resume=True)
