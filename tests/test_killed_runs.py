"""Runs whose processes are killed at random moments, and continued, end as if undisturbed."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from processes import in_session, wait_until_ended

from fineprune.runs.files import whole_lines
from fineprune.runs.run import read_run
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.recipe import make_recipe

RECIPE = {
    "data": {"name": "digits", "train_size": 512},
    "training": {"epochs": 16, "batch_size": 64, "lr": 0.02, "milestones": [8, 12]},
    "pruning": {"policy": "fine-pruning", "window": 4, "start": 2, "prune": 128},
    "run": {"device": "cpu", "threads": 1, "precision": "float32", "compile": "off"},
}

# The command line, with the events of the cluster as lines on standard error.
LOGGED = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
from fineprune.cli.main import main
"""
ALONE = f"{LOGGED}main()"
# The first argument is the folder of the tests, and the second one that of the server's socket.
SERVED = f"""
import sys
sys.path.insert(0, sys.argv.pop(1))
from preloaded_python import preloaded_ray_workers
with preloaded_ray_workers(sys.argv.pop(1)):
    {LOGGED.replace(chr(10), chr(10) + "    ")}main()
"""
STARTED = re.compile(r"^((?:worker|server) \d+) (?:re)?started \(process (\d+) on", re.M)
TIMES = ("seconds", "bookkeeping_seconds", "evaluate_seconds", "distributed")

pytestmark = pytest.mark.long

# Each scenario: the changes to the recipe, and the number of kills.
SCENARIOS = {
    "alone": (("run.checkpoint_steps=3", "training.epochs=24"), 4),
    "served": (
        (
            "distributed.strategy=sync",
            "distributed.workers=2",
            "distributed.servers=2",
            "distributed.silence_seconds=6",
        ),
        1,
    ),
}


class Scenario:
    """A command that is run, disturbed and run again until it has finished."""

    def __init__(self, changes, folder, sockets):
        self.sockets = sockets  # a folder whose name is short enough for the names of sockets in it
        self.recipe = make_recipe(RECIPE, changes)
        self.served = self.recipe.distributed.served
        folder.mkdir()
        self.file, self.out, self.log = (folder / n for n in ("recipe.toml", "out", "stderr.txt"))
        self.file.write_text(self.recipe.to_toml())

    def start(self):
        python = [sys.executable, "-c", ALONE]
        if self.served:
            folder = tempfile.mkdtemp(dir=self.sockets)
            python = [sys.executable, "-c", SERVED, str(Path(__file__).parent), folder]
        command = [*python, "train", str(self.file), "--out", str(self.out), "--resume"]
        with self.log.open("w") as log:
            return subprocess.Popen(
                command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=log
            )

    def victims(self, process):
        """Return the processes that may be killed, by name, as far as they are known."""
        found = {"parent": process.pid}
        found.update({name: int(pid) for name, pid in STARTED.findall(self.log.read_text())})
        return {name: pid for name, pid in found.items() if pid in in_session(process.pid)}

    def epochs(self):
        """Return the number of epochs that are trained."""
        file = self.out / "metrics.jsonl"
        return len(whole_lines(file)) if file.exists() else 0

    def result(self):
        """Return what must not depend on interruptions, after checking that all is there."""
        assert not list(self.out.rglob("*.tmp")), "a temporary file is left"
        assert not list(self.out.rglob("servers")), "snapshots are left"
        run = read_run(self.out)
        assert [line["epoch"] for line in run.metrics] == list(range(self.recipe.training.epochs))
        for line in run.metrics:  # Each kept sample was trained exactly once.
            assert line["samples"] + line["skipped"] == self.recipe.data.train_size
        model = load_checkpoint(self.out / "checkpoint.pt")["model"]
        return (
            [{k: v for k, v in line.items() if k not in TIMES} for line in run.metrics],
            {name: value.tolist() for name, value in model.items()},
        )

    def finish(self):
        """Run the command to its end, and return the result."""
        assert self.start().wait() == 0, self.log.read_text()
        result = self.result()
        shutil.rmtree(self.out)
        return result


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_runs_end_like_undisturbed_ones(name, tmp_path, short_folder):
    changes, kills = SCENARIOS[name]
    scenario = Scenario(changes, tmp_path / "scenario", short_folder)
    if scenario.served:
        pytest.importorskip("ray")
    chance = random.Random(name)
    began = time.monotonic()
    expected = scenario.finish()
    whole_seconds = time.monotonic() - began
    while kills:
        process = scenario.start()
        since_progress: Counter[str] = Counter()
        epochs = 0
        while kills:
            time.sleep(chance.uniform(0, whole_seconds / (4 if scenario.served else 1.5)))
            if process.poll() is not None:
                break
            if scenario.epochs() > epochs:
                since_progress, epochs = Counter(), scenario.epochs()
            victims = scenario.victims(process)
            # A process that dies again and again without any progress ends the run, as it should.
            # Of the processes of a cluster, those are killed that the others must replace.
            names = [n for n in victims if not since_progress[n]]
            names = [n for n in names if not scenario.served or n != "parent"]
            if not names:
                continue
            chosen = chance.choice(sorted(names))
            kills, since_progress[chosen] = kills - 1, since_progress[chosen] + 1
            os.kill(victims[chosen], signal.SIGKILL)
            if chosen == "parent":
                # The signal may come when everything is done.
                assert process.wait(60) in (0, -signal.SIGKILL)
                assert not wait_until_ended(process.pid)
                break
        if process.wait() == 0:
            assert scenario.result() == expected
            shutil.rmtree(scenario.out)
    assert scenario.finish() == expected
