"""Compares the suspected wrong labels of one training run with those of cleanlab.

    pip install cleanlab
    python benchmarks/find_wrong_labels.py --data DIR --out runs/wrong-labels
    python benchmarks/find_wrong_labels.py --data DIR --out runs/cat-dog --map 'cat->dog' 'dog->cat'

One run trains a thin ResNet-18 on 10,000 images of CIFAR-10 with some wrong labels; its suspects
are those of ``fineprune inspect``. cleanlab needs the probabilities of images that a network was
not trained on, so the same network is trained five times, each time without a fifth of the images.
Interrupted runs continue when the same command is run again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.inspection.inspected import read_inspected
from fineprune.inspection.pictures import pictures_of, probabilities_of
from fineprune.inspection.suspects import Suspects, suspects_of
from fineprune.runs.run import read_run
from fineprune.training.data.memory import LoadedImages
from fineprune.training.hardware import describe
from fineprune.training.loop import train
from fineprune.training.recipe import Recipe, make_recipe
from fineprune.training.suspicion import Suspicion, detection

FOLDS = 5

Indices = npt.NDArray[np.int64]


def recipe(options: argparse.Namespace) -> Recipe:
    """Return the recipe of the run whose suspects are compared."""
    data: dict[str, Any] = {"name": "cifar10", "dir": str(options.data), "train_size": options.size}
    data |= {"label_noise": options.noise}
    if options.map:
        data |= {"label_noise_map": options.map}
    return make_recipe(
        {
            "data": data,
            "network": {"name": options.network},
            "training": {
                "epochs": options.epochs,
                "batch_size": 128,
                "lr": 0.1,
                "nesterov": True,
                "milestones": [round(share * options.epochs) for share in (0.3, 0.6, 0.8)],
                "gamma": 0.2,
                "evaluate_every": options.epochs,
                "evaluate_last": 1,
            },
            "pruning": {"policy": "full"},
            "run": {
                "device": options.device,
                "precision": "bfloat16",
                "threads": options.threads,
                "watch": 0,
            },
        }
    )


def trained(settings: Recipe, folder: Path) -> float:
    """Train a run, or the rest of it, and return its training time in seconds."""
    seconds: float = train(settings, folder, resume=folder.exists()).seconds_train
    return seconds


def out_of_sample(
    settings: Recipe, loaded: LoadedImages, out: Path
) -> tuple[npt.NDArray[np.float32], float]:
    """Return the probabilities of each image from a network that was not trained on it.

    Args:
        settings: The recipe of the run that is trained on all images.
        loaded: Its images.
        out: The folder of the runs.

    Returns:
        The probabilities, float32, shape (N, classes), and the training time of all runs.
    """
    everything, index = loaded.train, loaded.index
    labels = everything.labels.numpy()
    fold = np.random.default_rng(0).permutation(len(labels)) % FOLDS
    parts: list[npt.NDArray[np.float32]] = []
    seconds = 0.0
    for number in range(FOLDS):
        given = np.full(len(loaded.given), -1, dtype=np.int64)
        given[index[fold != number]] = labels[fold != number]
        file = out / f"labels-{number}.npy"
        np.save(file, given)
        part = settings.replaced(
            "data", labels=str(file), label_noise=None, label_noise_map=None, train_size=None
        )
        seconds += trained(part, out / f"fold-{number}")
        parts.append(probabilities_of(read_run(out / f"fold-{number}"), everything))
    stacked = np.stack(parts)
    return stacked[fold, np.arange(len(labels))], seconds


def found(ranking: Indices, wrong: npt.NDArray[np.bool_], number: int) -> dict[str, float]:
    """Return the precision and the recall of the first images of a ranking."""
    hits = int(wrong[ranking[:number]].sum())
    return {"precision": hits / max(number, 1), "recall": hits / int(wrong.sum())}


def right_suggestions(suspects: Suspects, true: Indices, number: int) -> float:
    """Return the share of the first suspects whose suggested label is the true one."""
    first = slice(number)
    return float((suspects.suggestion[first] == true[suspects.index[first]]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--size", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--noise", type=float, default=0.3, help="share of wrong labels")
    parser.add_argument("--map", nargs="*", default=[], help="wrong labels by class: 'cat->dog'")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    from cleanlab.filter import find_label_issues

    settings = recipe(options)
    seconds = trained(settings, options.out / "whole")
    inspected = read_inspected([read_run(options.out / "whole")])[0]
    loaded = pictures_of(inspected.run)
    assert loaded.weak is not None
    assert loaded.weak.wrong is not None
    wrong, true = loaded.weak.wrong, loaded.given[loaded.index]
    suspects = suspects_of(inspected)
    score = np.full(len(wrong), np.nan, np.float32)
    score[suspects.index] = suspects.score
    ours = detection(Suspicion(torch.from_numpy(score), None), wrong)
    probabilities, folds_seconds = out_of_sample(settings, loaded, options.out)
    issues = find_label_issues(
        inspected.labels, probabilities, return_indices_ranked_by="self_confidence", n_jobs=1
    )
    self_confidence = probabilities[np.arange(len(wrong)), inspected.labels]
    theirs = detection(Suspicion(torch.from_numpy(1 - self_confidence), None), wrong)
    ranked = np.argsort(self_confidence, kind="stable")
    result = {
        "about": vars(describe(options.device, options.threads)),
        "wrong": int(wrong.sum()),
        "fineprune": {
            "roc_area": ours["roc_area"],
            "training_seconds": seconds,
            "right_suggestions_in_100": right_suggestions(suspects, true, 100),
            **{str(n): found(suspects.index, wrong, n) for n in (100, 1000, len(issues))},
        },
        "cleanlab": {
            "roc_area": theirs["roc_area"],
            "training_seconds": folds_seconds,
            "right_suggestions_in_100": float(
                (probabilities[issues[:100]].argmax(1) == true[issues[:100]]).mean()
            ),
            **{str(n): found(ranked, wrong, n) for n in (100, 1000)},
            str(len(issues)): found(issues, wrong, len(issues)),
        },
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
