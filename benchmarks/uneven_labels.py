"""Ranks wrong labels in data that are not balanced, beside the loss.

    python benchmarks/uneven_labels.py --json docs/results/uneven-labels.json

Classes of few samples, long tails, labels that were mistyped, outputs of the network that no label
uses, a network that hardly learns, and one that learns its labels by heart. The data are the digits
and the breast cancers of scikit-learn, or points around the centre of each class. A network with
one hidden layer is trained by Adam in batches of 32, unless the case says otherwise, while a
``LabelWatch`` watches, and ranks by the evidence; the loss is the mean cross-entropy over all
epochs. It takes a minute.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from table import show
from torch import Tensor, nn

import fineprune as fp
from fineprune.datasets.digits import load_digits
from fineprune.training.suspicion import Suspicion, detection, suspicion_by_evidence

SEEDS = 3


class Case(NamedTuple):
    """What is trained, and how.

    Attributes:
        x: Inputs, float32, shape (N, features).
        labels, true: The labels and the true classes, int64, shape (N,).
        classes: The number of outputs of the network.
        epochs: The number of epochs.
        slow: Whether SGD with the rate 0.001 and a momentum of 0.9 trains in place of Adam.
        deep: Whether the network has two hidden layers of 256 units in place of one of 64.
    """

    x: Tensor
    labels: Tensor
    true: Tensor
    classes: int
    epochs: int = 15
    slow: bool = False
    deep: bool = False


def digits() -> tuple[Tensor, Tensor]:
    images, _ = load_digits(1500)
    return images.images.float().mean(1).flatten(1) / 255, images.labels.long()


def points(sizes: Sequence[int], chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return points in 16 dimensions around a centre for each class."""
    true = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    centres = torch.randn(len(sizes), 16, generator=chance)
    return centres[true] + 0.5 * torch.randn(len(true), 16, generator=chance), true


def mistaken(true: Tensor, share: float, classes: int, chance: torch.Generator) -> Tensor:
    """Return the labels, of which a share is replaced by other classes at random."""
    labels = true.clone()
    wrong = torch.randperm(len(true), generator=chance)[: round(share * len(true))]
    other = torch.randint(1, classes, (len(wrong),), generator=chance)
    labels[wrong] = (true[wrong] + other) % classes
    return labels


def balanced(chance: torch.Generator) -> Case:
    x, true = digits()
    return Case(x, mistaken(true, 0.1, 10, chance), true, 10)


def unused(chance: torch.Generator) -> Case:
    return balanced(chance)._replace(classes=64)


def typos(chance: torch.Generator) -> Case:
    x, true = digits()
    labels = true.clone()
    labels[torch.randperm(len(true), generator=chance)[:10]] = torch.arange(10, 20)
    return Case(x, labels, true, 20)


def few(chance: torch.Generator) -> Case:
    x, true = points([5] * 200, chance)
    return Case(x, mistaken(true, 0.1, 200, chance), true, 200)


def long_tail(chance: torch.Generator) -> Case:
    x, true = points([max(3, int(400 / (k + 1) ** 1.1)) for k in range(60)], chance)
    return Case(x, mistaken(true, 0.1, 60, chance), true, 60, 20)


def neighbours(chance: torch.Generator) -> Case:
    """A hundred classes, of which mistakes take one for the next."""
    x, true = points([20] * 100, chance)
    labels = torch.where(torch.rand(len(true), generator=chance) < 0.2, (true + 1) % 100, true)
    return Case(x, labels, true, 100, 30)


def singles(chance: torch.Generator) -> Case:
    x, true = points([max(1, int(400 / (k + 1) ** 1.4)) for k in range(60)], chance)
    return Case(x, mistaken(true, 0.05, 60, chance), true, 60, 30)


def siblings(chance: torch.Generator) -> Case:
    """Five groups of four classes that are alike, of which mistakes take one for another."""
    groups = torch.randn(5, 16, generator=chance).repeat_interleave(4, 0)
    centres = groups + 0.5 * torch.randn(20, 16, generator=chance)
    true = torch.arange(20).repeat_interleave(75)
    x = centres[true] + 0.5 * torch.randn(len(true), 16, generator=chance)
    return Case(x, true // 4 * 4 + mistaken(true % 4, 0.1, 4, chance), true, 20, 20)


def hardly_learned(chance: torch.Generator) -> Case:
    return balanced(chance)._replace(epochs=2, slow=True)


def by_heart(chance: torch.Generator) -> Case:
    features, classes = load_breast_cancer(return_X_y=True)
    x, true = torch.tensor(features, dtype=torch.float32), torch.tensor(classes)
    x = (x - x.mean(0)) / x.std(0)
    return Case(x, mistaken(true, 0.1, 2, chance), true, 2, 60, deep=True)


CASES: dict[str, Callable[[torch.Generator], Case]] = {
    "digits, 10 % wrong": balanced,
    "the same, 64 outputs": unused,
    "digits, ten mistyped": typos,
    "200 classes of 5, 10 % wrong": few,
    "100 classes of 20, 20 % taken for the next": neighbours,
    "60 classes of 400 to 4, 10 % wrong": long_tail,
    "60 classes of 400 to 1, 5 % wrong": singles,
    "20 classes of 75 in five groups, 10 % wrong": siblings,
    "digits, 10 % wrong, hardly learned": hardly_learned,
    "cancers, 10 % wrong, learned by heart": by_heart,
}


def watched(case: Case, seed: int) -> tuple[fp.LabelWatch, Tensor]:
    """Train, and return the watch and the mean loss of each sample."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        widths = [case.x.shape[1], *([256, 256] if case.deep else [64])]
        hidden = [[nn.Linear(*pair), nn.ReLU()] for pair in itertools.pairwise(widths)]
        model = nn.Sequential(*itertools.chain(*hidden), nn.Linear(widths[-1], case.classes))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    if case.slow:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    watch, total = fp.LabelWatch(len(case.x), case.classes), torch.zeros(len(case.x))
    chance = torch.Generator().manual_seed(seed)
    for _ in range(case.epochs):
        for index in torch.randperm(len(case.x), generator=chance).split(32):
            logits, labels = model(case.x[index]), case.labels[index]
            losses = F.cross_entropy(logits, labels, reduction="none")
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.record(index, logits, labels)
            total[index] += losses.detach()
    return watch, total / case.epochs


def figures(case: Case, seed: int) -> dict[str, float]:
    """Return how well the watch and the loss rank the wrong labels of a case."""
    watch, loss = watched(case, seed)
    wrong = (case.labels != case.true).numpy()
    suggested = watch.ranking().suggestions
    result: dict[str, float] = {
        "wrong": int(wrong.sum()),
        "estimated": watch.num_suspects(),
        "right_suggestions": float((suggested == case.true).numpy()[wrong].mean()),
    }
    for name, suspicion in (
        ("watch", suspicion_by_evidence(watch)),
        ("loss", Suspicion(loss, None)),
    ):
        found = detection(suspicion, wrong)
        result |= {f"{name}_roc_area": found["roc_area"], f"{name}_found": found["r_precision"]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="the file of all runs to write")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    for name, made in CASES.items():
        for seed in range(options.seeds):
            case = made(torch.Generator().manual_seed(seed))
            runs.append({"case": name, "seed": seed, **figures(case, seed)})
    if options.json:
        options.json.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    rows = []
    for name in CASES:
        of_case = [run for run in runs if run["case"] == name]
        means = {k: float(np.mean([run[k] for run in of_case])) for k in of_case[0] if k != "case"}
        rows.append({"data": name} | {k: round(v, 3) for k, v in means.items() if k != "seed"})
    show(rows)


if __name__ == "__main__":
    main()
