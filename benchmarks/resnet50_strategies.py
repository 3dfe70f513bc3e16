"""Trains ResNet-50 at 224 pixels for a few steps with every strategy, on the CPU.

    python benchmarks/resnet50_strategies.py --images 16 --batch-size 2

The images are JPEG files that this program makes, and the weights are random. Each strategy is one
call of the command line: a single process, all-reduce with two ranks (torchrun), and parameter
servers (synchronous, with a backup worker, asynchronous and mixed), each with two servers. The
table shows what an epoch took, the memory of all processes of the call together, and the loss. It
answers whether a network with 25 million parameters can be trained everywhere; with several
processes on few cores, the times say nothing about the strategies. Linux only.

The memory is the largest sum of what the processes use, in which a page that k processes share
counts 1/k (PSS), measured twice per second. Shared pages of Ray's object store are included.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from images import make_images
from table import show

from fineprune.runs.files import read_metrics
from fineprune.training.hardware import describe

RECIPE = """
[data]
name = "images"
train = "{folder}/train"
test = "{folder}/test"
image_size = {size}
workers = {loaders}

[network]
name = "{network}"

[training]
epochs = 1
batch_size = {batch}
lr = 0.01
milestones = []
optimizer = "rmsprop-tf"
evaluate_every = 1

[pruning]
policy = "full"

[run]
device = "cpu"
threads = 1
compile = "off"
"""

# By default, Ray's processes let all others go first.
RAY = {"RAY_worker_niceness": "0"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def served(strategy: str, workers: int, **settings: int) -> list[str]:
    given = {"strategy": strategy, "workers": workers, "servers": 2, **settings}
    return [f"distributed.{name}={value}" for name, value in given.items()]


# The name of a strategy: what comes before ``-m fineprune``, and the changes to the recipe.
STRATEGIES: dict[str, tuple[list[str], list[str]]] = {
    "one process": ([], []),
    "all-reduce, 2 ranks": (TORCHRUN, []),
    "sync, 2 workers": ([], served("sync", 2)),
    "sync, 3 workers, 1 backup": ([], served("sync", 3, backup=1)),
    "async, 2 workers": ([], served("async", 2)),
    "mixed, 2 groups of 2 workers": ([], served("mixed", 4, group=2)),
}


def memory(mark: str) -> int:
    """Return the bytes (PSS) of the processes whose environment contains a text."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if mark.encode() in (process / "environ").read_bytes():
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += next(int(x.split()[1]) for x in lines if x.startswith("Pss:")) * 1024
    return total


def train(name: str, recipe: Path, out: Path) -> dict[str, Any]:
    """Train with a strategy, and return its row of the table."""
    launcher, changes = STRATEGIES[name]
    command = [sys.executable, *launcher, "-m", "fineprune", "train", str(recipe)]
    command += ["--out", str(out), *changes]
    mark, most, started = f"FINEPRUNE_MEASURED={uuid.uuid4()}", 0, time.perf_counter()
    with out.with_suffix(".log").open("w+") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **RAY, **dict([mark.split("=")])},
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            while process.poll() is None:
                most = max(most, memory(mark))
                time.sleep(0.5)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            log.seek(0)
            sys.exit(f"{name} ended with status {process.returncode}: {log.read()}")
    seconds = time.perf_counter() - started
    (epoch,) = read_metrics(out / "metrics.jsonl")
    summary = json.loads((out / "summary.json").read_text())
    if not math.isfinite(epoch["train_loss"]):
        sys.exit(f"{name}: the loss is {epoch['train_loss']}")
    return {
        "strategy": name,
        "parameters": summary["parameters"],
        "samples": epoch["samples"],
        "steps": epoch["steps"],
        "s per step": epoch["seconds"] / epoch["steps"],
        "s of the command": seconds,
        "memory, GB": most / 1e9,
        "loss": epoch["train_loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--network", default="imagenet-resnet50")
    parser.add_argument("--loaders", type=int, default=1, help="loader processes or threads")
    parser.add_argument("--only", choices=STRATEGIES, nargs="+", default=list(STRATEGIES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        for part in ("train", "test"):
            make_images(folder / part, options.images)
        recipe = folder / "recipe.toml"
        recipe.write_text(
            RECIPE.format(
                folder=folder,
                size=options.size,
                batch=options.batch_size,
                network=options.network,
                loaders=options.loaders,
            )
        )
        for number, strategy in enumerate(options.only):
            rows.append(train(strategy, recipe, folder / f"run-{number}"))
            if not options.json:
                print(rows[-1], file=sys.stderr, flush=True)
    about = {**vars(describe("cpu", 1)), "torch": torch.__version__}
    if options.json:
        print(json.dumps({"about": about, "rows": rows}))
        return
    print(about, "\n")
    show(rows)


if __name__ == "__main__":
    main()
