"""Scaling experiments: trains a recipe with several configurations of workers and servers."""

import dataclasses
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
    read_begun,
    teller,
    with_seed,
)
from fineprune.runs.files import SCALING, write_json
from fineprune.runs.lock import only_writer
from fineprune.training.data import load_data
from fineprune.training.hardware import available_cores, resolved
from fineprune.training.recipe import Recipe
from fineprune.training.results import input_digests

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ListedConfiguration:
    """A run of a scaling experiment: its configuration, and the name of its folder."""

    configuration: str
    path: str


@dataclasses.dataclass(frozen=True)
class ScalingList:
    """What ``scale.json`` says of a scaling experiment.

    Attributes:
        title: The title of the experiment.
        same_update: Whether an update uses the same number of samples in every configuration.
        sha256: The digests with which it began; see ``training.results.input_digests``.
        runs: The runs, in the order in which they are trained.
    """

    title: str
    same_update: bool
    sha256: dict[str, str | None]
    runs: tuple[ListedConfiguration, ...]


def scale(
    recipe: Recipe,
    folder: Path,
    configurations: Sequence[Configuration],
    *,
    title: str,
    seeds: int = 1,
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
        seeds: The number of runs of each configuration.
        same_update: Whether an update uses the same number of samples in every configuration; see
            ``configured``.
        on_progress: See ``OnProgress``.
    """
    read_begun(folder / SCALING, ScalingList, "scale")  # It checks the folder.
    if len({chosen.folder for chosen in configurations}) < len(configurations):
        texts = ", ".join(chosen.text for chosen in configurations)
        raise InputError(f"expected each configuration once, got {texts}")
    if recipe.training.epochs < 2:
        raise InputError(
            f"expected training.epochs of at least 2, the first of which is a warm-up, got "
            f"{recipe.training.epochs}"
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
        most_workers = max(chosen.workers for chosen in configurations)
        recipe = recipe.replaced("run", threads=max(1, available_cores() // most_workers))
    planned: dict[Path, tuple[PlannedRun, Configuration]] = {}
    for chosen in configurations:
        changed = configured(recipe, chosen, same_update=same_update)
        if (stale := changed.stale_momentum) is not None:
            _LOGGER.warning("%s: %s", chosen.text, stale)
        for number in range(seeds):
            own = folder / (chosen.folder + (f"-seed-{number + 1}" if number else ""))
            made = resolved(with_seed(changed, number))
            planned[own] = PlannedRun(chosen.text, made, own), chosen
    digests = input_digests(recipe, load_data(resolved(recipe)))
    runs = [run for run, _ in planned.values()]
    listed = tuple(ListedConfiguration(run.name, run.folder.name) for run in runs)
    with only_writer(folder):
        if (before := read_begun(folder / SCALING, ScalingList, "scale")) is not None:
            check_begun_with(before.sha256, digests, folder)
        for run in runs:
            run.finished()  # It checks the folder before anything is written.
        write_json(folder / SCALING, ScalingList(title, same_update, dict(digests), listed))
        ended = run_jobs(
            runs,
            digests,
            teller(runs, on_progress),
            launcher=lambda run: launcher(planned[run.folder][1]),
        )
        if (failed := next(ended, None)) is not None:
            raise RunError(f"{failed[0].name!r} failed: {failed[1]}")
