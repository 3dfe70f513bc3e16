"""What is found and learned in data that are not balanced, with a limit for each figure.

    python benchmarks/quality.py

Wrong labels in classes of few samples, long tails, labels that were mistyped, outputs that no label
uses, a network that hardly learns, and one that learns its labels by heart: a network is trained
while a ``LabelWatch`` watches, and the wrong labels are ranked. Then the trainings of
``small_classes.py``, with ``fp.Adaptive`` beside the shorter schedule. A figure below its limit
ends the program with status 1. It takes two minutes; ``make long`` runs it.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import small_classes
import torch
import torch.nn.functional as F
from table import markdown
from torch import Tensor, nn

import fineprune as fp
from fineprune.datasets.digits import load_digits
from fineprune.training.results import detection

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


def tail(power: float, least: int) -> list[int]:
    """Return the sizes of 60 classes, of which the first has 400 samples."""
    return [max(least, int(400 / (k + 1) ** power)) for k in range(60)]


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


def typos(chance: torch.Generator) -> Case:
    x, true = digits()
    labels = true.clone()
    labels[torch.randperm(len(true), generator=chance)[:10]] = torch.arange(10, 20)
    return Case(x, labels, true, 20)


def clouds(sizes: Sequence[int], share: float, epochs: int, chance: torch.Generator) -> Case:
    x, true = points(sizes, chance)
    return Case(x, mistaken(true, share, len(sizes), chance), true, len(sizes), epochs)


def neighbours(chance: torch.Generator) -> Case:
    """A hundred classes, of which mistakes take one for the next."""
    x, true = points([20] * 100, chance)
    labels = torch.where(torch.rand(len(true), generator=chance) < 0.2, (true + 1) % 100, true)
    return Case(x, labels, true, 100, 30)


def siblings(chance: torch.Generator) -> Case:
    """Five groups of four classes that are alike, of which mistakes take one for another."""
    groups = torch.randn(5, 16, generator=chance).repeat_interleave(4, 0)
    centres = groups + 0.5 * torch.randn(20, 16, generator=chance)
    true = torch.arange(20).repeat_interleave(75)
    x = centres[true] + 0.5 * torch.randn(len(true), 16, generator=chance)
    return Case(x, true // 4 * 4 + mistaken(true % 4, 0.1, 4, chance), true, 20, 20)


def by_heart(chance: torch.Generator) -> Case:
    x, true = digits()
    return Case(x[:500], mistaken(true[:500], 0.1, 10, chance), true[:500], 10, 60, deep=True)


# Each case, and the least area under the ROC curve of its ranking, as a mean over the seeds.
LABELS: dict[str, tuple[Callable[[torch.Generator], Case], float]] = {
    "digits, 10 % wrong": (balanced, 0.99),
    "the same, 64 outputs": (lambda chance: balanced(chance)._replace(classes=64), 0.99),
    "digits, ten mistyped": (typos, 0.99),
    "200 classes of 5, 10 % wrong": (lambda c: clouds([5] * 200, 0.1, 15, c), 0.98),
    "100 classes of 20, 20 % taken for the next": (neighbours, 0.93),
    "60 classes of 400 to 4, 10 % wrong": (lambda c: clouds(tail(1.1, 3), 0.1, 20, c), 0.99),
    "60 classes of 400 to 1, 5 % wrong": (lambda c: clouds(tail(1.4, 1), 0.05, 30, c), 0.985),
    "20 classes of 75 in five groups, 10 % wrong": (siblings, 0.985),
    "digits, 10 % wrong, hardly learned": (
        lambda chance: balanced(chance)._replace(epochs=2, slow=True),
        0.7,
    ),
    "500 digits, 10 % wrong, learned by heart": (by_heart, 0.97),
}

# The least points of accuracy that ``Adaptive`` gains beside the shorter schedule.
ACCURACY = {
    "two classes, 1 to 5, that overlap": -1.0,
    "two classes, 1 to 5, 20 % wrong": 0.0,
    "digits, five rare classes, 20 % wrong": -2.5,
    "digits, 30 % wrong": 2.0,
    "two classes of one size, best error 20 %": -1.0,
}


def watched(case: Case, seed: int) -> fp.LabelWatch:
    """Train, and return the watch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        widths = [case.x.shape[1], *([256, 256] if case.deep else [64])]
        hidden = [[nn.Linear(*pair), nn.ReLU()] for pair in itertools.pairwise(widths)]
        model = nn.Sequential(*itertools.chain(*hidden), nn.Linear(widths[-1], case.classes))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    if case.slow:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    watch = fp.LabelWatch(len(case.x), case.classes)
    chance = torch.Generator().manual_seed(seed)
    for _ in range(case.epochs):
        for index in torch.randperm(len(case.x), generator=chance).split(32):
            logits, labels = model(case.x[index]), case.labels[index]
            F.cross_entropy(logits, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.record(index, logits, labels)
    return watch


def area(name: str, seeds: int) -> float:
    """Return the mean area under the ROC curve with which wrong labels are ranked."""
    found = []
    for seed in range(seeds):
        case = LABELS[name][0](torch.Generator().manual_seed(seed))
        wrong = (case.labels != case.true).numpy()
        ranking = watched(case, seed).ranking()
        scores = ranking.scores.cpu().numpy()
        area = detection(scores, ranking.num_suspects, wrong).roc_area
        found.append(float("nan") if area is None else area)
    return sum(found) / seeds


def gain(name: str, seeds: int) -> float:
    """Return the points of accuracy of ``Adaptive`` beside the shorter schedule, as a mean."""
    arms = small_classes.runs({name: small_classes.CASES[name]}, ("shorter", "logits"), seeds)[name]
    accuracy = {arm: sum(run["accuracy"] for run in runs) / seeds for arm, runs in arms.items()}
    return accuracy["logits"] - accuracy["shorter"]


def main() -> int:
    torch.set_num_threads(1)
    rows, missed = [], 0
    for title, found, limits in (
        ("area", area, {name: limit for name, (_, limit) in LABELS.items()}),
        ("points gained", gain, ACCURACY),
    ):
        for name, limit in limits.items():
            value = found(name, SEEDS)
            missed += value < limit
            rows.append([name, title, f"{value:.3f}", f"{limit:g}", "" if value >= limit else "no"])
    print(markdown(["data", "figure", f"mean of {SEEDS} seeds", "limit", "kept"], rows, left=2))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
