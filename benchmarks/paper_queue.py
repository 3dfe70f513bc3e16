"""The paper's networks, one run after another, for machines that are lent in short pieces.

    python benchmarks/paper_queue.py --out runs/paper --minutes 9

Trains ``full`` and ``fine-pruning`` of each recipe in ``recipes/paper`` until the time is up, and
goes on from there when it is called again: a run is resumed from its last whole epoch. Prints a
line for each run, and exits with 0 when all are done, with 75 ("try again") when time ran out, and
with 1 after an error. The same command again and again, until there is nothing left to repeat::

    while python benchmarks/paper_queue.py --minutes 9; [ $? -eq 75 ]; do :; done

``--set`` changes every recipe, ``fineprune report OUT/*`` makes the tables.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fineprune.errors import InputError, RunError
from fineprune.experiments.controls import arm_recipe
from fineprune.runs.files import METRICS, SUMMARY
from fineprune.training.hardware import resolved
from fineprune.training.loop import train
from fineprune.training.recipe import Recipe, read_recipe
from fineprune.training.stop import Stopped

# What says most in the shortest time comes first.
ORDER = "resnet18 vgg16 resnet50 wrn16 lenet resnet34 vgg13 vgg19 wrn10 wrn22"
TRAIN_IMAGES = 50_000
TRY_AGAIN = 75


class TimeIsUp(Exception):
    pass


def run_queue(runs: Sequence[tuple[Recipe, Path]], deadline: float) -> None:
    """Train the runs in order; raises TimeIsUp after the first epoch that ends too late."""

    def stop_in_time(metrics: dict[str, Any]) -> None:
        # An epoch as long as this one must still fit.
        if time.monotonic() + metrics["seconds"] + metrics["evaluate_seconds"] > deadline:
            raise TimeIsUp

    for recipe, folder in runs:
        if not (folder / SUMMARY).exists():
            train(recipe, folder, resume=True, on_epoch=stop_in_time)
            stop_in_time({"seconds": 0.0, "evaluate_seconds": 0.0})


def progress(folder: Path, epochs: int) -> str:
    file = folder / METRICS
    done = file.read_bytes().count(b"\n") if file.exists() else 0
    return f"{folder}: {done} of {epochs} epochs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--networks", default=ORDER, help="names, separated by spaces")
    parser.add_argument("--arms", default="full fine-pruning", help="separated by spaces")
    parser.add_argument("--recipes", type=Path, default=Path("recipes/paper"))
    parser.add_argument("--set", action="append", default=[], dest="changes")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    runs = []
    for network in options.networks.split():
        recipe = resolved(read_recipe(options.recipes / f"{network}.toml", options.changes))
        for arm in options.arms.split():
            made = arm_recipe(recipe, arm, TRAIN_IMAGES - recipe.data.validation)
            runs.append((made.replaced("run", arm=arm), options.out / f"{network}-{arm}"))
    try:
        run_queue(runs, deadline)
    except TimeIsUp:
        return TRY_AGAIN
    finally:
        for recipe, folder in runs:
            print(progress(folder, recipe.training.epochs))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (InputError, RunError, Stopped) as error:
        sys.exit(f"paper_queue.py: {error}")
