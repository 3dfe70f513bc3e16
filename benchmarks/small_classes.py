"""Skips in data whose classes are not equally large, or whose labels have several right answers.

    python benchmarks/small_classes.py

Trains a network with two hidden layers on all samples, on the schedule of ``fp.shorter`` (with as
many steps as ``fp.Adaptive``, and with a quarter of all), and with ``fp.Adaptive``, which is given
the logits or only the losses. The test sets have correct labels. It takes a minute, and writes
``docs/results/small-classes.json``.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from table import write
from torch import Tensor, nn

import fineprune as fp
from fineprune.datasets.digits import load_digits
from fineprune.datasets.label_noise import symmetric_noise

SEEDS, EPOCHS, BATCH, RATE, SAVE = 5, 30, 64, 0.05, 0.35
ARMS = ("full", "shorter", "quarter", "logits", "losses")
TITLES = {
    "full": "full training",
    "quarter": "a quarter of the steps",
    "logits": "`Adaptive`, logits",
    "losses": "`Adaptive`, losses",
}
# Each metric with its title, and the arms that are shown beside that of the shorter schedule.
COLUMNS = (
    ("accuracy", "accuracy, %:", ("full", "quarter", "logits", "losses")),
    ("cross_entropy", "cross-entropy:", ("logits", "losses")),
)


class Case(NamedTuple):
    """Inputs, float32, shape (N, features), and labels, int64, shape (N,), to train and to test."""

    x: Tensor
    labels: Tensor
    test_x: Tensor
    test_labels: Tensor


def points(small: float, distance: float, wrong: float, seed: int) -> Case:
    """Return points around the centres of two classes that overlap, of which one has a share."""
    chance = torch.Generator().manual_seed(1000 + seed)
    true = (torch.rand(8000, generator=chance) < small).long()
    x = torch.randn(8000, 10, generator=chance)
    x[:, 0] += distance * true
    labels = torch.from_numpy(symmetric_noise(true[:4000].numpy(), 2, wrong, seed))
    return Case(x[:4000], labels, x[4000:], true[4000:])


def digits(wrong: float, rare: int, seed: int) -> Case:
    """Return digits with a share of wrong labels, and a tenth of the samples of some classes."""
    images, test = load_digits(1024)
    labels = images.labels.long()
    nth = torch.stack([(labels[:n] == label).sum() for n, label in enumerate(labels.tolist())])
    chosen = (labels >= rare) | (nth % 10 == 0)
    noisy = torch.from_numpy(symmetric_noise(labels[chosen].numpy(), 10, wrong, seed))
    x, test_x = (one.images.float().mean(1).flatten(1) / 255 for one in (images, test))
    return Case(x[chosen], noisy, test_x, test.labels.long())


CASES: dict[str, Callable[[int], Case]] = {
    "two classes, 1 to 5, that overlap": lambda seed: points(1 / 6, 1.5, 0, seed),
    "two classes, 1 to 5, 20 % wrong": lambda seed: points(1 / 6, 3.0, 0.2, seed),
    "digits, five rare classes, 20 % wrong": lambda seed: digits(0.2, 5, seed),
    "digits, 30 % wrong": lambda seed: digits(0.3, 0, seed),
    "two classes of one size, best error 20 %": lambda seed: points(1 / 2, 1.683, 0, seed),
}


def train(case: Case, arm: str, seed: int) -> dict[str, float]:
    """Train a network, and return its metrics on the test set."""
    rates = rates_of(EPOCHS)
    if arm in ("shorter", "quarter"):
        rates = fp.shorter(rates, save=SAVE if arm == "shorter" else 0.75)
    policy: fp.Policy = fp.FullData(len(rates))
    if arm in ("logits", "losses"):
        policy = fp.Adaptive(EPOCHS, SAVE, rates)
    model, _ = fit(case, policy, rates, seed, with_logits=arm != "losses")
    return measured(model, case.test_x, case.test_labels)


def rates_of(epochs: int) -> list[float]:
    return [RATE * (1 - epoch / epochs) for epoch in range(epochs)]


def fit(
    case: Case, policy: fp.Policy, rates: list[float], seed: int, *, with_logits: bool = True
) -> tuple[nn.Module, fp.Pruner]:
    """Train a new network with one rate per epoch."""
    torch.manual_seed(seed)
    classes = int(case.test_labels.max()) + 1
    hidden = (nn.Linear(case.x.shape[1], 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    model = nn.Sequential(*hidden, nn.Linear(128, classes))
    pruner = fp.Pruner(len(case.x), policy, batch_size=BATCH, seed=seed)
    optimizer = torch.optim.SGD(
        model.parameters(), RATE, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    for epoch in pruner.epochs():
        for group in optimizer.param_groups:
            group["lr"] = rates[epoch]
        for index in pruner.sampler.order().split(BATCH):
            logits, labels = model(case.x[index]), case.labels[index]
            losses = F.cross_entropy(logits, labels, reduction="none")
            watched = (logits, labels) if with_logits else ()
            optimizer.zero_grad()
            pruner.record(index, losses, *watched).backward()
            optimizer.step()
    return model, pruner


@torch.no_grad()
def measured(model: nn.Module, x: Tensor, labels: Tensor) -> dict[str, float]:
    logits = model(x)
    return {
        "accuracy": 100 * float((logits.argmax(1) == labels).double().mean()),
        "cross_entropy": float(F.cross_entropy(logits, labels)),
    }


Found = dict[str, dict[str, list[dict[str, float]]]]


def runs(cases: dict[str, Callable[[int], Case]], arms: Sequence[str], seeds: int) -> Found:
    """Return the metrics of each arm on each data, for each seed."""
    return {
        name: {arm: [train(make(seed), arm, seed) for seed in range(seeds)] for arm in arms}
        for name, make in cases.items()
    }


def table_of(found: Found) -> list[list[Any]]:
    """Return a row for each data set, with the figure of each seed."""
    rows = []
    for name, arms in found.items():
        row: list[Any] = [name]
        for metric, _, others in COLUMNS:
            shorter = [run[metric] for run in arms["shorter"]]
            row.append([round(value, 4) for value in shorter])
            for arm in others:
                pairs = zip(arms[arm], shorter, strict=True)
                row.append([round(run[metric] - beside, 4) for run, beside in pairs])
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--json", type=Path, default=Path("docs/results/small-classes.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    columns = {"data": ""}
    for _, title, others in COLUMNS:
        columns[f"{title} `shorter`"] = ".2f"
        columns |= {f"{title} {TITLES[arm]}": "±+.2f" for arm in others}
    setting = (
        f"a network with two hidden layers, {given.seeds} seeds, 35 % of the steps saved; "
        f"differences from shorter, ± half the 95 % interval"
    )
    rows = table_of(runs(CASES, ARMS, given.seeds))
    write(given.json, setting, "python benchmarks/small_classes.py", columns, rows)


if __name__ == "__main__":
    main()
