"""Measures whether the memory of a training on image files grows from epoch to epoch.

    python benchmarks/image_memory.py data/cifar10-files --epochs 10 --samples 4000

The source is a folder with ``train`` and ``test``, as benchmarks/cifar_as_files.py writes it. LeNet
is trained in this process. At the end of each epoch, the memory of this process and that of its
loader processes is read: PSS, in which a page that k processes share counts 1/k; and all memory
that belongs to no file. In the first epochs, PSS grows a little without any more memory in use,
because loader processes begin with the pages of the training and get their own when these are
written to. Linux only.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from fineprune.training.hardware import describe
from fineprune.training.loop import train
from fineprune.training.recipe import make_recipe


def used(process: int) -> tuple[float, float]:
    """Return the PSS of a process, and its memory that belongs to no file, in MB."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    fields = dict(line.split()[:2] for line in lines)
    return int(fields["Pss:"]) * 1024e-6, int(fields["Anonymous:"]) * 1024e-6


def children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    settings = {
        "data": {
            "name": "images",
            "train": str(options.source / "train"),
            "test": str(options.source / "test"),
            "image_size": 32,
            "resize": 32,
            "train_size": options.samples,
            "workers": options.workers,
        },
        "network": {"name": "lenet"},
        "training": {
            "epochs": options.epochs,
            "batch_size": 128,
            "lr": 0.01,
            "milestones": [],
            "evaluate_every": options.evaluate_every,
            "evaluate_last": 1,
        },
        "pruning": {"policy": options.policy},
        "run": {"device": "cpu", "threads": 1, "compile": "off", "checkpoint_steps": 20},
    }
    rows: list[dict[str, Any]] = []

    def note(metrics: dict[str, Any]) -> None:
        own, loaders = used(os.getpid()), [used(child) for child in children()]
        rows.append(
            {
                "epoch": metrics["epoch"] + 1,
                "samples": metrics["samples"],
                "PSS": own[0],
                "of no file": own[1],
                "loaders": len(loaders),
                "their PSS": sum(whole for whole, _ in loaders),
                "of no file each": max((part for _, part in loaders), default=0.0),
            }
        )

    train(make_recipe(settings), folder / "run", on_epoch=note)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a folder with train and test")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, help="training images; all by default")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--policy", default="full")
    parser.add_argument("--evaluate-every", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = measure(options, Path(name))
    about = {**vars(describe("cpu", 1)), "torch": torch.__version__, "unit": "MB"}
    if options.json:
        print(json.dumps({"about": about, "rows": rows}))
        return
    print(about, "\n")
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        cells = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row.values()]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
