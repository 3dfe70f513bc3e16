r"""Trains with wrong labels and skips those that the training finds, beside controls of equal cost.

    python benchmarks/skipped_labels.py --data DIR --out runs/skipped.jsonl --seeds 0 1 2
    python benchmarks/skipped_labels.py --out runs/skipped.jsonl --table

The first 10,000 images of CIFAR-10 with wrong labels (see ``watched_runs.py``) train the small
ResNet-9 or the thin ResNet-18 of this project for 30 epochs: batches of 128, Nesterov momentum 0.9,
weight decay 5e-4, crops and flips, bfloat16; the rate rises for 15 % of the training and then falls
linearly to zero. The accuracy is that on the 10,000 test images after the last epoch.

The arms, all of which but the first save the share ``--save`` of the steps:

- ``full``: all samples in all epochs;
- ``shorter``: fewer epochs on all samples, with a rate that falls as 1 - u^2;
- ``adaptive``: ``Adaptive``;
- ``truth``: ``Adaptive``, which is told after five epochs which labels are wrong, and then trains
  none of them. No method can know this; it says how much there is to gain.

Each finished run is a line of the file, with which a later call continues. Several processes can
share the work.
"""

import argparse
import dataclasses
import fcntl
import hashlib
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from watched_runs import (
    BATCH,
    CLASSES,
    KINDS,
    SAMPLES,
    own_labels,
    probabilities_of,
    training_of,
)

import fineprune as fp
from fineprune.datasets.cifar import load_cifar10
from fineprune.datasets.image_set import ImageSet
from fineprune.datasets.label_noise import symmetric_noise
from fineprune.experiments.arm_table import mean_difference
from fineprune.report.table import points
from fineprune.training.hardware import describe

ARMS = ("full", "shorter", "adaptive", "truth")
NOISE = ("none", "symmetric", "symmetric-50", "asymmetric", "cat-dog", "confused")
RATES = {"resnet9": 0.2, "resnet18": 0.154}
EPOCHS, WARMUP, TOLD = 30, 0.15, 5
SEED_STEP = 1_000_003

Labels = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Case:
    """What one run trains. ``options`` are those of ``Adaptive``."""

    network: str
    noise: str
    arm: str
    seed: int
    save: float
    lr_factor: float = 1.0
    options: str = ""


class Told(fp.Adaptive):
    """Skips the labels that are wrong, as far as the budget allows it."""

    def __init__(self, wrong: npt.NDArray[np.bool_], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._wrong, self._ended = wrong, 0

    def end_epoch(self, epoch: int) -> None:
        """Count the epochs."""
        super().end_epoch(epoch)
        self._ended = epoch + 1

    def _contradicting(self) -> npt.NDArray[np.bool_]:
        return self._wrong & (self._ended >= TOLD)


def noisy(images: ImageSet, noise: str, seed: int) -> Labels:
    """Return the labels to train with; int64, shape (SAMPLES,)."""
    labels: Labels = own_labels(images)
    if noise == "symmetric-50":
        labels = symmetric_noise(labels, CLASSES, 0.5, seed)
    elif noise != "none":
        labels = KINDS[noise](images, seed)
    return labels


def rates_of(case: Case) -> list[float]:
    """Return the learning rate in the middle of each epoch."""
    return [rate_at(case, (epoch + 0.5) / EPOCHS) for epoch in range(EPOCHS)]


def rate_at(case: Case, progress: float) -> float:
    """Return the learning rate at a point of the training, of which the share is given."""
    peak = RATES[case.network] * case.lr_factor
    if progress < WARMUP:
        return peak * max(progress, 1e-3) / WARMUP
    done = (progress - WARMUP) / (1 - WARMUP)
    return peak * (1 - done**2 if case.arm == "shorter" else 1 - done)


def policy_of(case: Case, wrong: npt.NDArray[np.bool_]) -> fp.Policy:
    """Return the policy of an arm."""
    options = json.loads(case.options or "{}")
    if case.arm == "full":
        return fp.FullData(EPOCHS)
    if case.arm == "shorter":
        return fp.FullData(round((1 - case.save) * EPOCHS))
    if case.arm == "truth":
        return Told(wrong, EPOCHS, case.save, rates=rates_of(case), returning=0, **options)
    return fp.Adaptive(EPOCHS, case.save, rates=rates_of(case), **options)


def train(images: ImageSet, test: ImageSet, case: Case) -> dict[str, Any]:
    """Train one case, and return what its line says."""
    seed = case.seed * SEED_STEP
    labels, true = noisy(images, case.noise, seed), own_labels(images)
    wrong = labels != true
    prepared = training_of(case.network, images, labels, seed)
    model, optimizer = prepared.model, prepared.optimizer
    policy = policy_of(case, wrong)
    pruner = fp.Pruner(SAMPLES, policy, seed=seed, batch_size=BATCH)
    skipped, found, started = 0, [], time.process_time()
    for epoch in pruner.epochs():
        model.train()
        plan = list(pruner.sampler)
        kept = np.zeros(SAMPLES, bool)
        kept[plan] = True
        skipped += SAMPLES - int(kept.sum())
        found.append([int((~kept).sum()), int((~kept & wrong).sum())])
        parts = torch.tensor(plan).split(BATCH)
        for number, index in enumerate(parts):
            for group in optimizer.param_groups:
                progress = (epoch + number / len(parts)) / pruner.policy.epochs
                group["lr"] = rate_at(case, progress)
            x, y = prepared.batches.fetch(index, epoch)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            losses = F.cross_entropy(logits.float(), y, reduction="none")
            pruner.record(index, losses).backward()
            optimizer.step()
            optimizer.zero_grad()
    answers = probabilities_of(model, test, prepared.mean, prepared.std).argmax(1)
    summary = pruner.summary()
    return {
        "accuracy": float((answers == test.labels.numpy()).mean()),
        "steps": summary["steps"],
        "saved": 1 - summary["steps"] / (EPOCHS * math.ceil(SAMPLES / BATCH)),
        "wrong": int(wrong.sum()),
        "skipped_and_wrong": found,
        "processor_seconds": time.process_time() - started,
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Return a table of all cases: accuracies, and differences from ``shorter`` by seed."""
    rows = ["| network | labels | arm | saved | accuracy | above `shorter` | n |"]
    rows.append("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    results: dict[tuple[Any, ...], dict[int, Any]] = {}
    for line in lines:
        case = line["case"]
        key = tuple(
            case[name] for name in ("network", "noise", "save", "arm", "lr_factor", "options")
        )
        results.setdefault(key, {})[case["seed"]] = line
    for key in sorted(results):
        network, noise, save, arm, factor, options = key
        runs = results[key]
        control: dict[int, Any] = results.get((network, noise, save, "shorter", 1.0, ""), {})
        both = [
            runs[seed]["accuracy"] - control[seed]["accuracy"]
            for seed in sorted(runs.keys() & control.keys())
        ]
        accuracy = statistics.mean(100 * run["accuracy"] for run in runs.values())
        saved = statistics.mean(100 * run["saved"] for run in runs.values())
        name = arm + (f" x {factor:g}" if factor != 1 else "") + (f" {options}" if options else "")
        rows.append(
            f"| {network} | {noise} | {name} | {saved:.0f} % | {accuracy:.1f} | "
            f"{points(mean_difference(both)) if both else '-'} | {len(runs)} |"
        )
    return "\n".join(rows)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the finished runs."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the CIFAR-10 files")
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--networks", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--noise", nargs="+", default=["none", "symmetric", "asymmetric"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--save", type=float, default=0.25)
    parser.add_argument("--lr-factor", type=float, default=1.0)
    parser.add_argument("--options", default="", help="of Adaptive, as JSON")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    if not options.table:
        torch.set_num_threads(1)
        images, test = load_cifar10(options.data)
        cases = itertools.product(options.seeds, options.networks, options.noise, options.arms)
        for seed, network, noise, arm in cases:
            given = options.options if arm in ("adaptive", "truth") else ""
            case = Case(network, noise, arm, seed, options.save, options.lr_factor, given)
            if any(line["case"] == dataclasses.asdict(case) for line in read_lines(options.out)):
                continue
            name = hashlib.sha256(repr(case).encode()).hexdigest()[:16]
            lock = options.out.with_suffix(f".{name}.lock")
            with lock.open("w") as held:
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # Another process trains it.
                result = train(images, test, case)
            line = {"case": dataclasses.asdict(case), **result}
            line["hardware"] = dataclasses.asdict(describe("cpu", 1))
            line["torch"] = torch.__version__
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            lock.unlink()
            print(json.dumps({"case": line["case"], "accuracy": line["accuracy"]}), flush=True)
    print(table(read_lines(options.out)))


if __name__ == "__main__":
    main()
