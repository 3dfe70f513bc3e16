"""Trains on image files, kills and stops the training at random moments, and compares the result.

    python benchmarks/image_kills.py data/cifar10-files data/cifar10-shards --kills 10

Each source is a folder with ``train`` and ``test``, as benchmarks/cifar_as_files.py writes it. The
command line trains LeNet on it with loader processes: once undisturbed, and once again and again
with ``--resume``, while one of these things happens at a random moment of each start:

- ``kill``: SIGKILL for the training.
- ``kill loader``: SIGKILL for a loader process, after which the training fails.
- ``term``: SIGTERM for the training, which writes a checkpoint and stops.
- ``term all``: SIGTERM for all of its processes at the same time, as ``timeout`` and Slurm send it.
- ``twice``: a second start in the same folder, which is refused; then SIGKILL for the first one.

After each of them, no process may be left, and the folder may contain no unfinished file. In the
end, the weights must be equal bit for bit, and the metrics apart from times. Linux only.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fineprune.runs.files import read_metrics
from fineprune.training.checkpoint import load_checkpoint

# What happens, and the exit statuses of the training that are right afterwards.
STATUSES = {
    "kill": {-signal.SIGKILL},
    "term all": {128 + signal.SIGTERM},
    "kill loader": {1},
    "twice": {-signal.SIGKILL},
    "term": {128 + signal.SIGTERM},
}
# Signals for the training that come before it can catch them, or before it has loader processes.
EARLY = {"term": {-signal.SIGTERM}, "term all": {-signal.SIGTERM}}
TIMES = ("seconds", "bookkeeping_seconds", "evaluate_seconds")
SECONDS_TO_END = 10.0
FINISHED = "it had finished"


def processes(session: int) -> set[int]:
    """Return the running processes of a session."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, its = stat.read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and int(its) == session:
                found.add(int(stat.parent.name))
    return found


def outlived(session: int) -> float:
    """Wait until no process of a session is left, and return the seconds."""
    started = time.monotonic()
    while left := processes(session):
        if time.monotonic() > started + SECONDS_TO_END:
            sys.exit(f"{left} are left after {SECONDS_TO_END:g} seconds")
        time.sleep(0.02)
    return time.monotonic() - started


class Training:
    """The command that is disturbed.

    Args:
        source: The folder with ``train`` and ``test``.
        folder: An empty folder.
        options: The options of this program.
    """

    def __init__(self, source: Path, folder: Path, options: argparse.Namespace) -> None:
        self.out = folder / "run"
        self.log = folder / "stderr.txt"
        self._command = [sys.executable, "-m", "fineprune", "train", str(options.recipe)]
        self._command += ["--resume", f"data.train={source / 'train'}"]
        self._command += [f"data.test={source / 'test'}", f"data.workers={options.workers}"]
        self._command += [f"run.checkpoint_steps={options.checkpoint_steps}", "run.threads=1"]
        self._command += ["network.name=lenet", f"training.epochs={options.epochs}"]
        self._command += ["training.milestones=[]", "training.evaluate_last=1", *options.set]

    def start(self, out: Path | None = None, log: Path | None = None) -> "subprocess.Popen[bytes]":
        with (log or self.log).open("w") as errors:
            return subprocess.Popen(
                [*self._command, "--out", str(out or self.out)],
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def finish(self, out: Path | None = None) -> float:
        """Run the command to its end, and return the seconds."""
        started = time.monotonic()
        process = self.start(out)
        if process.wait():
            sys.exit(f"it ended with status {process.returncode}: {self.log.read_text()}")
        outlived(process.pid)
        return time.monotonic() - started

    def disturb(self, how: str, seconds: float, *, loading: bool) -> str:
        """Start, do something after so many seconds, check what it does, and describe it.

        Args:
            how: One of ``STATUSES``.
            seconds: The time to wait first.
            loading: Whether this time begins with the first loader process instead of the start.
        """
        process = self.start()
        while loading and process.poll() is None and len(processes(process.pid)) < 2:
            time.sleep(0.05)
        time.sleep(seconds)
        if process.poll() is not None:
            return FINISHED if process.returncode == 0 else self.wrong(how, process)
        loaders = processes(process.pid) - {process.pid}
        if how == "kill loader" and loaders:
            with contextlib.suppress(ProcessLookupError):  # Those of an evaluation end with it.
                os.kill(min(loaders), signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
        elif how == "term":
            process.terminate()
        elif how == "term all":
            os.killpg(process.pid, signal.SIGTERM)
        elif how == "twice":
            second = self.start(log=self.log.with_name("second.txt"))
            status, said = second.wait(), self.log.with_name("second.txt").read_text()
            outlived(second.pid)
            running = process.poll() is None
            process.kill()
            if running and (status, said.count("\n")) not in ((2, 1), (0, 0)):
                sys.exit(f"the second start ended with status {status}: {said}")
        else:
            process.kill()
        process.wait()
        after = outlived(process.pid)
        allowed = {*STATUSES[how], 0}  # It may just have finished.
        if how == "kill loader" or not loaders:
            allowed |= {-signal.SIGKILL, *EARLY.get(how, ())}
        if process.returncode not in allowed:
            self.wrong(how, process)
        unfinished = list(self.out.glob("*.tmp")) if how != "kill" else []
        if unfinished:
            sys.exit(f"after {how}, {unfinished} are left")
        return f"{len(loaders)} loader processes, which ended within {after:.2f} s"

    def wrong(self, how: str, process: "subprocess.Popen[bytes]") -> str:
        sys.exit(f"after {how}, status {process.returncode}: {self.log.read_text()}")

    def epochs(self) -> int:
        metrics = self.out / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def result(out: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], list[str]]:
    """Return the weights, the metrics without times, and the names of the files."""
    weights = load_checkpoint(out / "checkpoint.pt")["model"]
    lines = [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in read_metrics(out / "metrics.jsonl")
    ]
    return weights, lines, sorted(path.name for path in out.iterdir())


def same(one: Any, other: Any) -> bool:
    return (
        one[0].keys() == other[0].keys()
        and all(torch.equal(value, other[0][name]) for name, value in one[0].items())
        and one[1:] == other[1:]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path, nargs="+", help="folders with train and test")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/images.toml"))
    parser.add_argument("--kills", type=int, default=10, help="disturbances per source")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checkpoint-steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="+", default=[], help="further settings of the recipe")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    said: Counter[str] = Counter()
    for source in options.sources:
        with tempfile.TemporaryDirectory() as name:
            training = Training(source, Path(name), options)
            whole = training.finish(Path(name) / "undisturbed")
            summary = json.loads((Path(name) / "undisturbed" / "summary.json").read_text())
            seconds = summary["seconds_train"]
            print(f"{source}: {whole:.1f} s undisturbed, {seconds:.1f} s of training", flush=True)
            left = [how for _, how in zip(range(options.kills), itertools.cycle(STATUSES))]
            starts = 0
            while left:
                starts += 1
                # Most of them inside an epoch, and some during the start.
                loading = left[0] == "kill loader" or chance.random() < 0.8
                done = training.disturb(left[0], chance.uniform(0, seconds / 3), loading=loading)
                print(f"{left[0]} after {training.epochs()} epochs: {done}", flush=True)
                if done == FINISHED:
                    training.out.rename(Path(name) / f"finished-{starts}")
                else:
                    said[left.pop(0)] += 1
            training.finish()
            for out in (training.out, *Path(name).glob("finished-*")):
                if not same(result(out), result(Path(name) / "undisturbed")):
                    sys.exit(f"{source}: the result is not that of the undisturbed training")
    print("equal bit for bit:", ", ".join(f"{number} {how}" for how, number in said.items()))


if __name__ == "__main__":
    main()
