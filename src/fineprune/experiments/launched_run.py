"""Trains a planned run in processes of its own, which depend on its configuration."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable

from fineprune.errors import RunError
from fineprune.experiments.configurations import ALL_REDUCE, Configuration
from fineprune.experiments.planned_run import PlannedRun
from fineprune.launch.follow_parent import PARENT_VARIABLE
from fineprune.launch.slurm import torchrun_in_job
from fineprune.runs.files import DURATION, write_json
from fineprune.training.stop import Stopped, stop_requests
from fineprune.writing import write_atomically

_POLL_SECONDS = 0.5


def launch(run: PlannedRun, configuration: Configuration, on_poll: Callable[[], None]) -> None:
    """Train a run to its end, in separate processes. An unfinished run is continued.

    ``run.recipe`` has the settings of the configuration already.
    """
    # Beside the run, because all nodes of a job read it, and hidden, since it is no file of a user.
    recipe = run.folder.with_name(f".{run.folder.name}.toml")
    log = run.folder.with_suffix(".log")
    train = ["-m", "fineprune", "train", str(recipe), "--out", str(run.folder), "--resume"]
    is_new = not run.folder.exists()
    launcher = _launcher(configuration)
    started = time.perf_counter()
    write_atomically(recipe, run.recipe.to_toml())
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*launcher, *train],
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
            recipe.unlink(missing_ok=True)
    if process.returncode:
        text = log.read_text(encoding="utf-8", errors="replace")
        # In a job, srun writes the number of the node before each line.
        messages = re.findall(r"^(?: *\d+: )?(fineprune: .*)", text, re.MULTILINE)
        said = messages[-1] if messages else f"see {log}"
        raise RunError(f"{configuration.text!r} failed: {said}")
    if is_new:  # The time of a run that was interrupted and continued is not known.
        write_json(run.folder / DURATION, {"seconds": time.perf_counter() - started})
    log.unlink()


def _launcher(configuration: Configuration) -> list[str]:
    if configuration.strategy != ALL_REDUCE:
        return [sys.executable]
    in_job = torchrun_in_job(configuration.nodes, configuration.group)
    if in_job is not None:
        return in_job
    # Each run has its own rendezvous store, on a free port of the loopback interface.
    return [
        sys.executable,
        "-m",
        "fineprune.launch.torchrun",
        f"--nproc-per-node={configuration.workers}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
    ]
