"""Runs whose processes are killed at random moments, and continued, end as if undisturbed.

An ordinary run of the tests makes few kills. More are made by::

    python tests/test_killed_runs.py --kills 200
"""

import argparse
import contextlib
import json
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
from resuming import small_recipe, untimed, weights

from fineprune.runs.files import whole_lines
from fineprune.runs.run import read_runs

SETTINGS = ("data.train_size=512", "training.milestones=[8, 12]", "training.evaluate_every=1")
PRUNING = {"policy": "fine-pruning", "window": 4, "start": 2, "prune": 128}
# The servers take a snapshot every 50 updates; these epochs have 4 to 8, so that a server's death
# undoes an epoch from its start. The long recipe has more updates per epoch than that.
MANY_UPDATES = ("training.batch_size=8",)
SILENCE_SECONDS = 6

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

pytestmark = pytest.mark.long
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def served(strategy, *changes):
    return (
        f"distributed.strategy={strategy}",
        "distributed.workers=2",
        "distributed.servers=2",
        f"distributed.silence_seconds={SILENCE_SECONDS}",
        *changes,
    )


# Each scenario: the command, the changes to the recipe, and whether its result is always the same.
SCENARIOS = {
    "train": ("train", ("run.checkpoint_steps=3", "training.epochs=24"), True),
    "compare": ("compare", ("run.checkpoint_steps=3", "training.epochs=20"), True),
    "sync": ("train", served("sync"), True),
    "async": ("train", served("async"), False),
    "async many updates": ("train", served("async", *MANY_UPDATES), False),
    "mixed": ("train", served("mixed", "distributed.group=2"), False),
}
# The number of kills in each scenario: out of ten if this file is a script, and as a test, beside
# which test_compare.py, test_kills.py and test_epoch_served.py make the other kills.
SHARES = {"train": 3, "compare": 2, "sync": 2, "async": 1, "async many updates": 1, "mixed": 1}
ORDINARY = {"train": 4, "sync": 1}


class Scenario:
    """A command that is run, disturbed and run again until it has finished."""

    def __init__(self, name, folder, sockets):
        self.name = name
        self.verb, changes, self.repeatable = SCENARIOS[name]
        self.folder = folder
        self.sockets = sockets  # a folder whose name is short enough for the names of sockets in it
        self.recipe = small_recipe(*SETTINGS, "training.epochs=16", *changes, pruning=PRUNING)
        self.served = self.recipe.distributed.served
        folder.mkdir()
        (folder / "recipe.toml").write_text(self.recipe.to_toml())
        self.out = folder / "out"
        self.log = folder / "stderr.txt"

    def start(self):
        more = ["--resume"] if self.verb == "train" else ["--arms", "full,random", "--jobs", "2"]
        command = [self.verb, str(self.folder / "recipe.toml"), "--out", str(self.out), *more]
        if self.served:
            folder = tempfile.mkdtemp(dir=self.sockets)
            python = [sys.executable, "-c", SERVED, str(Path(__file__).parent), folder]
        else:
            python = [sys.executable, "-c", ALONE]
        with self.log.open("w") as log:
            return subprocess.Popen(
                [*python, *command],
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def victims(self, process):
        """Return the processes that may be killed, by name, as far as they are known."""
        found = {"parent": process.pid}
        found.update({name: int(pid) for name, pid in STARTED.findall(self.log.read_text())})
        if self.verb == "compare":
            for lock in self.out.glob("*-0/.lock"):
                with contextlib.suppress(IndexError, FileNotFoundError):  # Not written yet.
                    found[lock.parent.name] = int(lock.read_text().split()[0])
        return {name: pid for name, pid in found.items() if pid in in_session(process.pid)}

    def epochs(self):
        """Return the number of epochs that are trained, over all runs."""
        return sum(len(whole_lines(path)) for path in self.out.rglob("metrics.jsonl"))

    def result(self):
        """Return what must not depend on interruptions, after checking that all is there."""
        assert not list(self.out.rglob("*.tmp")), "a temporary file is left"
        assert not list(self.out.rglob("servers")), "snapshots are left"
        runs = read_runs([self.out])
        assert len(runs) == (2 if self.verb == "compare" else 1)
        for run in runs:
            epochs = self.recipe.training.epochs
            assert [line["epoch"] for line in run.metrics] == list(range(epochs))
            json.loads((run.path / "summary.json").read_text())
            if self.served:
                trained_once(run.metrics, self.recipe)
        if not self.repeatable:
            return [len(run.metrics) for run in runs]
        return [
            (
                [{k: line[k] for k in line if k != "distributed"} for line in untimed(run.path)],
                weights(run.path).tolist(),
            )
            for run in runs
        ]

    def clear(self):
        shutil.rmtree(self.out, ignore_errors=True)


def trained_once(metrics, recipe):
    """Check that each kept sample of each epoch was trained exactly once."""
    for line in metrics:
        assert line["samples"] + line["skipped"] == recipe.data.train_size
        workers = line["distributed"]["workers"]
        assert sum(worker["samples"] for worker in workers) == line["samples"]


def disturb(scenario, kills, seed, say=lambda line: None):
    """Run a scenario again and again until that many processes were killed.

    Args:
        scenario: The scenario, whose folder is empty.
        kills: The number of processes to kill.
        seed: Decides when, and which.
        say: Called with one line for each kill.
    """
    chance = random.Random(f"{scenario.name} {seed}")
    began = time.monotonic()
    process = scenario.start()
    assert process.wait() == 0, scenario.log.read_text()
    whole_seconds = time.monotonic() - began
    expected = scenario.result()
    scenario.clear()
    left = kills
    while left:
        process = scenario.start()
        since_progress: Counter[str] = Counter()
        epochs = 0
        while left:
            time.sleep(chance.uniform(0, whole_seconds / (4 if scenario.served else 1.5)))
            if process.poll() is not None:
                break
            if scenario.epochs() > epochs:
                since_progress, epochs = Counter(), scenario.epochs()
            victims = scenario.victims(process)
            # A process that dies again and again without any progress ends the run, as it should.
            # So does a comparison, and each of its runs, after the death of one of its processes.
            names = [name for name in victims if not since_progress[name]]
            if not names:
                continue
            # Of the processes of a cluster, mostly those that the others must replace.
            others = [name for name in names if name != "parent"]
            if scenario.served and chance.random() < 0.75:
                if not others:
                    continue
                names = others
            name = chance.choice(sorted(names))
            left -= 1
            say(f"{scenario.name}: kill {name} after {scenario.epochs()} epochs")
            since_progress[name] += 1
            os.kill(victims[name], signal.SIGKILL)
            if name == "parent" or not scenario.served:
                status = process.wait(60)
                # The signal may come when everything is done; the result is checked below.
                assert status in (0, -signal.SIGKILL if name == "parent" else 1), status
                remaining = wait_until_ended(process.pid)
                assert not remaining, f"{remaining} are left after ten seconds"
                break
        if process.poll() is None and not left:
            process.wait()
        if process.returncode == 0:
            assert not wait_until_ended(process.pid)
            assert scenario.result() == expected
            scenario.clear()
        elif not left:
            finish(scenario, expected)
        else:
            killed = process.returncode in (-signal.SIGKILL, 1)
            assert killed, scenario.log.read_text()
            assert "Traceback" not in scenario.log.read_text()
    if scenario.out.exists():
        finish(scenario, expected)


def finish(scenario, expected):
    """Run the command to its end, and compare the result."""
    process = scenario.start()
    assert process.wait() == 0, scenario.log.read_text()
    assert not wait_until_ended(process.pid)
    assert scenario.result() == expected
    scenario.clear()


@on_linux
@pytest.mark.parametrize("name", ORDINARY)
def test_killed_runs_end_like_undisturbed_ones(name, tmp_path, short_folder):
    if SCENARIOS[name][1][0].startswith("distributed"):
        pytest.importorskip("ray")
    disturb(Scenario(name, tmp_path / "scenario", short_folder), ORDINARY[name], seed=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SCENARIOS)
    options = parser.parse_args()
    said: Counter[str] = Counter()

    def say(line):
        said[line.split(" after ")[0]] += 1
        print(time.strftime("%H:%M:%S"), line, flush=True)

    for name, share in SHARES.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                scenario = Scenario(name, Path(folder) / "scenario", folder)
                disturb(scenario, round(options.kills * share / 10), options.seed, say)
    for what, number in sorted(said.items()):
        print(f"{number:4d} {what}")


if __name__ == "__main__":
    main()
