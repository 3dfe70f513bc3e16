"""Measures how much of the share that fine-pruning skips becomes time, for the ten networks.

    python benchmarks/network_times.py --data data --out runs/times

Trains each recipe in ``recipes/paper`` for a few short epochs, of which every other one skips a
quarter of the samples. The first epoch is not counted, because it pays for what is done only once.
The result is a ratio within one run, so other work on the machine, which slows full and pruned
epochs alike, matters little. The same command again continues where the last one stopped.
"""

import argparse
import json
import statistics
from pathlib import Path

from table import show

from fineprune.runs.files import SUMMARY
from fineprune.runs.run import read_run
from fineprune.training.hardware import resolved
from fineprune.training.loop import train
from fineprune.training.recipe import read_recipe

# Images per epoch: multiples of four batches of 128, of which a quarter can be skipped exactly.
IMAGES = {
    "lenet": 25_600,
    "resnet18": 5_120,
    "resnet34": 2_560,
    "resnet50": 2_048,
    "vgg13": 1_536,
    "vgg16": 1_024,
    "vgg19": 1_024,
    "wrn10": 512,
    "wrn16": 512,
    "wrn22": 512,
}
CHANGES = [
    "training.milestones=[]",
    # The accuracy does not matter here, and the whole test set takes longer than the training.
    "training.evaluate_every=1000000",
    "training.evaluate_last=1",
    "data.validation=128",
    "pruning.start=1",
    "pruning.block=2",
    "pruning.count=1",
    "pruning.prune=0.25",
    "pruning.attenuation=1",
]


def row_of(name: str, folder: Path) -> dict[str, object]:
    """Return the row of the table for a finished run."""
    run = read_run(folder)
    epochs = run.metrics[1:]
    full, pruned = ([e for e in epochs if e["pruned"] == kind] for kind in (False, True))
    skipped = 1 - pruned[0]["samples"] / full[0]["samples"]
    seconds = [statistics.median(e["seconds"] for e in kind) for kind in (full, pruned)]
    saved = 1 - seconds[1] / seconds[0]
    kept = sum(e["bookkeeping_seconds"] for e in epochs) / sum(e["seconds"] for e in epochs)
    return {
        "network": name,
        "parameters": run.summary.parameters,
        "images": full[0]["samples"],
        "ms per full step": 1e3 * seconds[0] / full[0]["steps"],
        "samples skipped, %": 100 * skipped,
        "time saved, %": 100 * saved,
        "time saved per share skipped": saved / skipped,
        "bookkeeping, % of the time": 100 * kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/times"))
    parser.add_argument("--images", type=int, help="per epoch, a multiple of 512; by default few")
    parser.add_argument("--networks", nargs="*", default=list(IMAGES), choices=list(IMAGES))
    parser.add_argument("--recipes", type=Path, default=Path("recipes/paper"))
    parser.add_argument("--epochs", type=int, default=7, help="odd, at least 3")
    parser.add_argument("--set", nargs="*", default=[], dest="changes")
    options = parser.parse_args()
    if options.epochs < 3 or options.epochs % 2 == 0:
        parser.error(f"expected --epochs as an odd number of at least 3, got {options.epochs}")
    rows = []
    for name in options.networks:
        folder = options.out / name
        changes = [
            *CHANGES,
            f"data.dir={json.dumps(str(options.data))}",
            f"data.train_size={options.images or IMAGES[name]}",
            f"training.epochs={options.epochs}",
            f"pruning.window={options.epochs}",
            *options.changes,
        ]
        if not (folder / SUMMARY).exists():
            recipe = resolved(read_recipe(options.recipes / f"{name}.toml", changes))
            train(recipe, folder, resume=True)
        rows.append(row_of(name, folder))
    show(rows)
    summary = read_run(folder).summary
    print(summary.hardware, summary.precision, summary.versions)


if __name__ == "__main__":
    main()
