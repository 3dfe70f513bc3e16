"""Scale: train one recipe under several configurations of workers and servers, one by one."""

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
    """Train all configurations; runs that the folder already holds are continued or left.

    They run one after another, each in processes of its own, with as many threads a worker in all:
    so that a worker is the same worker everywhere.

    Args:
        recipe: of one process.
        folder: where the runs and ``scale.json`` are written.
        configurations: in the order in which they run.
        title: what the report calls it.
        same_update: see ``configured``.
        on_progress: called with a line of text, epochs done and epochs in all.

    Raises:
        InputError: a setting is wrong, or the folder holds runs of another recipe.
        RunError: a run failed.
        Stopped: A signal asked this process to stop; the run has written a checkpoint.
    """
    if recipe.training.epochs < 2:
        raise InputError(
            f"expected training.epochs of at least 2, the first of which is a warm-up, got "
            f"{recipe.training.epochs}"
        )
    texts = [one.text for one in configurations]
    if len(set(texts)) < len(texts):
        raise InputError(f"expected each configuration once, got {', '.join(texts)}")
    if not recipe.run.threads:
        most = max(one.workers for one in configurations)
        recipe = recipe.replaced("run", threads=max(1, available_cores() // most))
    runs = []
    for one in configurations:
        made = resolved(configured(recipe, one, same_update=same_update))
        runs.append(PlannedRun(one.text, 0, made, folder / one.folder))
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
    waiting = [not run.finished() for run in runs]
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
    tell = on_progress or (lambda line, done, total: None)
    for run, one, needed in zip(runs, configurations, waiting, strict=True):
        if needed:
            _train(run, one, lambda: tell("", epochs_done(runs), total))
            tell(run.name, epochs_done(runs), total)


def _train(run: PlannedRun, one: Configuration, on_poll: Callable[[], None]) -> None:
    """Train a run in processes of its own, to its end."""
    with tempfile.TemporaryDirectory() as place:
        recipe = Path(place) / "recipe.toml"
        write_atomically(recipe, run.recipe.to_toml())
        train = ["-m", "fineprune", "train", str(recipe), "--out", str(run.folder), "--resume"]
        log = run.folder.with_suffix(".log")
        fresh = not run.folder.exists()
        began = time.perf_counter()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *_launcher(one), *train],
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
                            raise Stopped(stop.number, f"in {one.text!r}")
            finally:
                process.terminate()  # the run writes a checkpoint first
                process.wait()
    if process.returncode:
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()
        ours = [line for line in said if line.startswith("fineprune:")] or [f"see {log}"]
        raise RunError(f"{one.text!r} failed: {ours[-1]}")
    if fresh:  # else a part of the time was spent before an interruption
        write_json(run.folder / DURATION, {"seconds": time.perf_counter() - began})
    log.unlink()


def _launcher(one: Configuration) -> list[str]:
    if one.strategy != ALL_REDUCE:
        return []
    # A store of this run alone, on a free port of the loopback interface.
    return [
        "-m",
        "fineprune.launch.torchrun",
        f"--nproc-per-node={one.workers}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
    ]
