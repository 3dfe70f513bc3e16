"""Scaling experiments: trains a recipe with several configurations of workers and servers."""

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError, RunError
from fineprune.experiments.configurations import (
    OF_SERVERS,
    Configuration,
    configured,
    launcher,
)
from fineprune.experiments.jobs import run_jobs
from fineprune.experiments.planned_run import (
    OnProgress,
    PlannedRun,
    check_begun_with,
    check_finished,
    check_own_folder,
    epochs_done,
    with_seed,
)
from fineprune.launcher import check_not_launched
from fineprune.runs.files import SCALING, write_json
from fineprune.runs.lock import only_writer
from fineprune.training.data import load_data
from fineprune.training.hardware import available_cores, resolved
from fineprune.training.recipe import Recipe
from fineprune.training.results import input_digests

_LOGGER = logging.getLogger(__name__)


def scale(
    recipe: Recipe,
    folder: Path,
    configurations: Sequence[Configuration],
    *,
    title: str,
    same_update: bool = False,
    on_progress: OnProgress = lambda line, done, total: None,
) -> None:
    """Train all configurations. Unfinished runs in the folder are continued, finished ones kept.

    The configurations are trained one after another, in separate processes. A worker has the same
    number of threads in every configuration, so that the speed of a worker is comparable.

    Args:
        recipe: The recipe for a single process.
        folder: The folder to which the runs and ``scale.json`` are written.
        configurations: The configurations, in the order in which they are trained.
        title: The title of the experiment in the report.
        same_update: Whether an update uses the same number of samples in every configuration; see
            ``configured``.
        on_progress: See ``OnProgress``.
    """
    check_not_launched("fineprune scale", "the runs")
    check_own_folder(folder, SCALING, "scale")
    texts = [configuration.text for configuration in configurations]
    if len(set(texts)) < len(texts):
        raise InputError(f"expected each configuration once, got {', '.join(texts)}")
    for one, other in itertools.combinations(configurations, 2):
        if one.folder == other.folder:
            raise InputError(
                f"expected configurations with different folders, got {one.text!r} and "
                f"{other.text!r}, which both have {one.folder}: write numbers such as 0.5 in full"
            )
    for option, name in OF_SERVERS.items():
        value = getattr(recipe.distributed, name)
        if value != getattr(Strategy, name):
            _LOGGER.warning(
                "distributed.%s of the recipe is ignored: add %s=%s to each configuration that "
                "needs it",
                *(name, option, value),
            )
    if not recipe.run.threads:
        most_workers = max(configuration.workers for configuration in configurations)
        recipe = recipe.replaced("run", threads=max(1, available_cores() // most_workers))
    planned: dict[Path, tuple[Configuration, PlannedRun]] = {}
    for configuration in configurations:
        changed = configured(recipe, configuration, same_update=same_update)
        if (stale := changed.stale_momentum) is not None:
            _LOGGER.warning("%s: %s", configuration.text, stale)
        if changed.training.epochs < 2:
            raise InputError(
                f"expected training.epochs of at least 2, the first of which is a warm-up, got "
                f"{changed.training.epochs} with {configuration.text!r}"
            )
        for number in range(configuration.seeds):
            own = folder / (configuration.folder + (f"-seed-{number + 1}" if number else ""))
            run_recipe = resolved(with_seed(changed, number))
            planned[own] = configuration, PlannedRun(configuration.text, run_recipe, own)
    digests = input_digests(recipe, load_data(resolved(recipe)))
    runs = [run for _, run in planned.values()]
    total = sum(run.recipe.training.epochs for run in runs)
    listing = {
        "version": 1,
        "title": title,
        "same_update": same_update,
        "sha256": digests,
        "runs": [{"configuration": run.name, "path": run.folder.name} for run in runs],
    }
    with only_writer(folder):
        check_begun_with(folder / SCALING, digests, "experiment")
        unfinished = [run for run in runs if not run.finished()]
        write_json(folder / SCALING, listing)
        ended_runs = run_jobs(
            unfinished,
            1,
            lambda: on_progress("", epochs_done(runs), total),
            launcher=lambda run: launcher(planned[run.folder][0]),
        )
        for ended in ended_runs:
            run, configuration = ended.run, planned[ended.run.folder][0]
            if ended.diverged is not None:
                raise RunError(f"{run.name!r} failed: {ended.diverged}")
            check_finished(run, digests, "experiment")
            seed = f", seed {run.recipe.run.seed}"
            name = run.name + (seed if configuration.seeds > 1 else "")
            on_progress(name, epochs_done(runs), total)
