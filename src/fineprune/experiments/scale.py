"""Scaling experiments: trains a recipe with several configurations of workers and servers."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fineprune.errors import InputError, RunError
from fineprune.experiments.configurations import ALL_REDUCE, Configuration, configured
from fineprune.experiments.planned_run import PlannedRun, epochs_done
from fineprune.launch.follow_parent import PARENT_VARIABLE
from fineprune.runs.files import DURATION, SCALING, write_atomically, write_json
from fineprune.runs.lock import only_writer
from fineprune.training.hardware import available_cores, resolved
from fineprune.training.recipe import Recipe
from fineprune.training.stop import Stopped, stop_requests

_POLL_SECONDS = 0.5

OnProgress = Callable[[str, int, int], None]


def scale(
    recipe: Recipe,
    folder: Path,
    configurations: Sequence[Configuration],
    *,
    title: str,
    same_update: bool = False,
    on_progress: OnProgress | None = None,
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
        on_progress: Called with a line of text (which may be empty), the number of epochs trained
            so far, and the number of all epochs.

    Raises:
        InputError: A setting is wrong, the folder holds runs of another recipe, or another process
            writes to the folder.
        RunError: A run failed.
        Stopped: A signal asked this process to stop, and the run has written a checkpoint.
    """
    if recipe.training.epochs < 2:
        raise InputError(
            f"expected training.epochs of at least 2, the first of which is a warm-up, got "
            f"{recipe.training.epochs}"
        )
    texts = [configuration.text for configuration in configurations]
    if len(set(texts)) < len(texts):
        raise InputError(f"expected each configuration once, got {', '.join(texts)}")
    if not recipe.run.threads:
        most_workers = max(configuration.workers for configuration in configurations)
        recipe = recipe.replaced("run", threads=max(1, available_cores() // most_workers))
    runs = []
    for configuration in configurations:
        run_recipe = resolved(configured(recipe, configuration, same_update=same_update))
        runs.append(PlannedRun(configuration.text, 0, run_recipe, folder / configuration.folder))
    with only_writer(folder):
        _train_all(runs, configurations, folder, title, same_update, on_progress)


def _train_all(
    runs: Sequence[PlannedRun],
    configurations: Sequence[Configuration],
    folder: Path,
    title: str,
    same_update: bool,
    on_progress: OnProgress | None,
) -> None:
    unfinished = [not run.finished() for run in runs]
    write_json(
        folder / SCALING,
        {
            "version": 1,
            "title": title,
            "same_update": same_update,
            "runs": [{"configuration": run.name, "path": run.folder.name} for run in runs],
        },
    )
    total = sum(run.recipe.training.epochs for run in runs)
    report = on_progress or (lambda line, done, total: None)
    for run, configuration, is_unfinished in zip(runs, configurations, unfinished, strict=True):
        if is_unfinished:
            _train(run, configuration, lambda: report("", epochs_done(runs), total))
            report(run.name, epochs_done(runs), total)


def _train(run: PlannedRun, configuration: Configuration, on_poll: Callable[[], None]) -> None:
    """Train a run to its end, in separate processes."""
    with tempfile.TemporaryDirectory() as temporary:
        recipe = Path(temporary) / "recipe.toml"
        write_atomically(recipe, run.recipe.to_toml())
        train = ["-m", "fineprune", "train", str(recipe), "--out", str(run.folder), "--resume"]
        log = run.folder.with_suffix(".log")
        is_new = not run.folder.exists()
        started = time.perf_counter()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *_launcher(configuration), *train],
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
            try:
                with stop_requests() as stop:
                    while process.poll() is None:
                        time.sleep(_POLL_SECONDS)
                        on_poll()
                        if stop.number is not None:
                            raise Stopped(stop.number, f"in {configuration.text!r}")
            finally:
                process.terminate()  # The run writes a checkpoint before its process ends.
                process.wait()
    if process.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        messages = [line for line in lines if line.startswith("fineprune:")] or [f"see {log}"]
        raise RunError(f"{configuration.text!r} failed: {messages[-1]}")
    if is_new:  # The time of a run that was interrupted and continued is not known.
        write_json(run.folder / DURATION, {"seconds": time.perf_counter() - started})
    log.unlink()


def _launcher(configuration: Configuration) -> list[str]:
    if configuration.strategy != ALL_REDUCE:
        return []
    # Each run has its own rendezvous store, on a free port of the loopback interface.
    return [
        "-m",
        "fineprune.launch.torchrun",
        f"--nproc-per-node={configuration.workers}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
    ]
