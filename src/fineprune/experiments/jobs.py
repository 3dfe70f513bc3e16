"""Trains the runs of an experiment, each by ``fineprune train`` in a process of its own."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fineprune.errors import DIVERGED, WRONG_INPUT, InputError, RunError
from fineprune.experiments.planned_run import PlannedRun
from fineprune.launch.follow_parent import PARENT_VARIABLE
from fineprune.runs.files import RECIPE
from fineprune.training.hardware import available_cores
from fineprune.training.recipe import Recipe
from fineprune.training.stop import stop_requests
from fineprune.writing import make_folder, write_atomically

_POLL_SECONDS = 0.1

# In a job of several nodes, srun writes the number of the node before each line.
_SAID = re.compile(r"^(?: *\d+: )?fineprune: (.*)", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """A run whose process has ended, or that cannot be trained.

    Attributes:
        run: The run.
        diverged: What it said when its training diverged; None if it is finished, or if the run
            that it needs has diverged.
        said: The warnings of a finished run.
    """

    run: PlannedRun
    diverged: str | None = None
    said: tuple[str, ...] = ()


def run_jobs(
    runs: Sequence[PlannedRun],
    jobs: int,
    on_poll: Callable[[], None],
    *,
    launcher: Callable[[PlannedRun], Sequence[str]] = lambda run: (sys.executable,),
    later: int = 0,
) -> Iterator[Ended]:
    """Train runs, or continue them, and yield each when it has ended.

    A run starts as soon as there is a place for it, in the given order. One that needs another
    starts after it; until then, the runs behind it come first.

    Args:
        runs: The runs, none of which is finished.
        jobs: The number of runs that train at the same time and share the cores equally.
        on_poll: Called several times per second while runs train.
        launcher: Returns the command that a run needs before ``-m fineprune``.
        later: The number of runs that the caller trains after these, for the message when a signal
            stops it.
    """
    waiting, training = list(runs), list[_Process]()
    with stop_requests() as stop:
        try:
            while waiting or training:
                pending = {run.folder for run in [*waiting, *(one.run for one in training)]}
                ready = [run for run in waiting if not run.needs or run.needs.folder not in pending]
                for run in ready[: jobs - len(training)]:
                    waiting.remove(run)
                    recipe = run.complete()
                    if recipe is None or run.finished():
                        yield Ended(run)
                    else:
                        training.append(_Process(run, recipe, launcher(run), jobs))
                on_poll()
                stop.check(f"with {len(waiting) + len(training) + later} runs to go")
                time.sleep(_POLL_SECONDS)
                for process in [one for one in training if one.poll() is not None]:
                    stop.check(f"with {len(waiting) + len(training) + later} runs to go")
                    training.remove(process)
                    yield process.result()
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

    def result(self) -> Ended:
        """Return what came of the process, which has ended."""
        status, said = self.returncode, _SAID.findall(_text(self._log))
        self._recipe.unlink(missing_ok=True)
        last = said[-1] if said else f"see {self._log}"
        if status == DIVERGED:
            self._log.unlink()
            return Ended(self.run, last)
        if status == WRONG_INPUT:
            raise InputError(last)
        if status < 0:
            raise RunError(
                f"the process of {self.run.folder} was killed by {signal.Signals(-status).name}, "
                f"perhaps because memory ran out: run the same command again to continue"
            )
        if status:
            raise RunError(f"{self.run.name!r} failed: {last}")
        self._log.unlink()
        return Ended(self.run, said=tuple(said))


def _text(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace")
    return ""
