"""Trains the runs of an experiment, each by ``fineprune train`` in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fineprune.errors import DIVERGED, WRONG_INPUT, InputError, RunError
from fineprune.experiments.planned_run import Digests, PlannedRun, check_trained_with
from fineprune.launch.follow_parent import PARENT_VARIABLE
from fineprune.runs.files import RECIPE, SUMMARY
from fineprune.runs.summary import read_summary
from fineprune.training.hardware import available_cores
from fineprune.training.recipe import Recipe
from fineprune.training.stop import stop_requests
from fineprune.writing import make_folder, write_atomically

_POLL_SECONDS = 0.1

# In a job of several nodes, srun writes the number of the node before each line.
_SAID = re.compile(r"^(?: *\d+: )?fineprune: (.*)", re.MULTILINE)


def reached(folder: Path) -> str:
    """Return the accuracy of a finished run as text."""
    return f"accuracy {read_summary(folder / SUMMARY).accuracy_last:.2%}"


def run_jobs(
    runs: Sequence[PlannedRun],
    digests: Digests,
    tell: Callable[[str], None],
    *,
    jobs: int = 1,
    launcher: Callable[[PlannedRun], Sequence[str]] = lambda run: (sys.executable,),
    result: Callable[[Path], str] = reached,
) -> Iterator[tuple[PlannedRun, str]]:
    """Train runs, or continue them, and yield each that diverged, with its reason.

    A run starts as soon as there is a place for it, in the given order. One that needs another
    starts after it, and not at all if that has diverged; until then, the runs behind it come first.

    Args:
        runs: The runs. Those that are finished are left as they are.
        digests: What they have to read.
        tell: Called with a line for each run that has ended, and often with an empty one.
        jobs: The number of runs that train at the same time and share the cores equally.
        launcher: Returns the command that a run needs before ``-m fineprune``.
        result: Returns what a line says of the run that has finished in a folder.
    """
    waiting, training = [run for run in runs if not run.finished()], list[_Process]()
    with stop_requests() as stop:
        try:
            while waiting or training:
                stop.check(f"with {len(waiting) + len(training)} runs to go")
                pending = {run.folder for run in [*waiting, *(one.run for one in training)]}
                ready = [run for run in waiting if not run.needs or run.needs.folder not in pending]
                for run in ready[: jobs - len(training)]:
                    waiting.remove(run)
                    recipe = run.complete()
                    if recipe is not None and not run.finished():
                        training.append(_Process(run, recipe, launcher(run), jobs))
                tell("")
                time.sleep(_POLL_SECONDS)
                for process in [one for one in training if one.poll() is not None]:
                    stop.check(f"with {len(waiting) + len(training)} runs to go")
                    training.remove(process)
                    run, (diverged, said) = process.run, process.outcome()
                    for message in said:
                        tell(f"{run.label}: {message}")
                    if diverged:
                        tell(f"{run.label} diverged")
                        yield run, diverged
                    else:
                        tell(f"finished {run.label}, {result(run.folder)}")
                        check_trained_with(run, digests)
        finally:
            for process in training:
                process.terminate()  # A run writes a checkpoint before its process ends.
            for process in training:
                process.wait()


class _Process(subprocess.Popen[bytes]):
    """The process of a run. What it says is in a file beside the run's folder until it succeeds."""

    def __init__(self, run: PlannedRun, recipe: Recipe, launcher: Sequence[str], jobs: int) -> None:
        self.run = run
        # All nodes of a job read the recipe. It is hidden, since it is no file of a user.
        self._recipe = run.folder.with_name(f".{run.folder.name}.toml")
        self._log = run.folder.with_name(f"{run.folder.name}.log")
        if jobs > 1 and not recipe.run.threads and not (run.folder / RECIPE).exists():
            recipe = recipe.replaced("run", threads=max(1, available_cores() // jobs))
        make_folder(run.folder.parent)
        write_atomically(self._recipe, recipe.to_toml())
        train = ["-m", "fineprune", "train", str(self._recipe), "--out", str(run.folder)]
        if (run.folder / RECIPE).exists():
            train.append("--resume")
        with self._log.open("wb") as log:
            super().__init__(
                [*launcher, *train],
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def outcome(self) -> tuple[str, list[str]]:
        """Return why the run diverged, or nothing, and the warnings of a finished run."""
        status = self.returncode
        said = _SAID.findall(self._log.read_text(encoding="utf-8", errors="replace"))
        self._recipe.unlink(missing_ok=True)
        last = said[-1] if said else f"see {self._log}"
        if status in (0, DIVERGED):
            self._log.unlink()
            return (last, []) if status else ("", said)
        if status == WRONG_INPUT:
            raise InputError(last)
        if status < 0:
            raise RunError(
                f"the process of {self.run.folder} was killed by {signal.Signals(-status).name}, "
                f"perhaps because memory ran out: run the same command again to continue"
            )
        raise RunError(f"{self.run.name!r} failed: {last}")
