"""Tries variants of the adaptive policy on held-out images.

    python benchmarks/adaptive_variants.py --data DIR --out variants.jsonl

Each variant trains a thin ResNet-18 with one thread on the first 10,000 training images of
CIFAR-10, and is evaluated on the last 10,000 training images; the test set is not used. A result
is one JSON line. Variants that have a line are skipped, so the command continues where it stopped,
and several processes can share the work. ``--only PART`` limits it to variants by name.

The variants were tried before ``fineprune.Adaptive`` was written. They are kept here as they were,
in one loop, because most of them are not options of the policy.
"""

import argparse
import dataclasses
import fcntl
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fineprune.datasets.augment import Augment
from fineprune.datasets.cifar import load_cifar10
from fineprune.datasets.device_loader import DeviceImages, EvaluationBatches
from fineprune.datasets.image_set import ImageSet, channel_statistics
from fineprune.networks.registry import build_network

SAMPLES, BATCH, HELD_OUT, CLASSES = 10_000, 128, 10_000, 10
LONGEST = 30
SEED_STEP = 1_000_003
SMALLEST_SHARE = 0.05
SMOOTHING = 0.5

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to skip samples.

    Attributes:
        noise: The share of the training labels that are replaced by another class.
        epochs, milestones, lr: The length and the learning rate, which is multiplied by 0.2 at each
            milestone.
        cosine: Whether the rate follows half a cosine instead.
        save: The share of the sample-steps to save; None to save nothing but the samples that
            contradict the others.
        power: Epochs keep samples in proportion to this power of their learning rate.
        select: How a shortened epoch chooses: ``random`` (without repeats until all were chosen),
            ``gradient-norm`` (in proportion to ``1 - exp(-smoothed loss)``, with inverse weights),
            ``gradient-norm-1`` (the same, with weights whose mean is one) or ``hardest``.
        patience: Samples above chance in this many epochs in a row are skipped; 0 for none.
        patience_late: The same while the rate is below half of the largest one; None for the same.
        skip_from: The first epoch that skips such samples.
        returning: The share of these samples that are trained all the same.
        returning_late: The same while the rate is at most a tenth of the largest one.
        smoothed_late: While the rate is below half of the largest one, samples are also skipped if
            their smoothed loss is above this multiple of chance; None for never.
        smoothed: From epoch 5 on, samples are skipped if their smoothed loss is above this multiple
            of chance, instead of by ``patience``; None for ``patience``.
        wrong_only: Whether only those samples are skipped whose label is wrong.
        oracle_from: From this epoch on, exactly the wrong labels are skipped; None for never.
    """

    noise: float = 0.0
    epochs: int = LONGEST
    milestones: tuple[int, ...] = (9, 18, 24)
    lr: float = 0.1
    cosine: bool = False
    save: float | None = 0.0
    power: float = 1.0
    select: str = "random"
    patience: int = 0
    patience_late: int | None = None
    skip_from: int = 0
    returning: float = 0.1
    returning_late: float | None = None
    smoothed_late: float | None = None
    smoothed: float | None = None
    wrong_only: bool = False
    oracle_from: int | None = None

    def rate(self, progress: float) -> float:
        """Return the learning rate at a point of the training, measured in epochs."""
        if self.cosine:
            return self.lr * (1 + math.cos(math.pi * progress / self.epochs)) / 2
        return self.lr * 0.2 ** sum(milestone <= progress for milestone in self.milestones)


def variants() -> dict[str, Variant]:
    """Return all variants by name. Names begin with the share of wrong labels in percent."""
    made: dict[str, Variant] = {}
    for noise in (0.0, 0.3):
        at = f"{round(100 * noise)}% "
        plain = Variant(noise=noise)
        fewer = dataclasses.replace(plain, epochs=20, milestones=(6, 12, 16))
        late = dataclasses.replace(plain, epochs=20, milestones=(9, 18, 19))
        budget = dataclasses.replace(plain, save=0.35)
        made |= {
            at + "full": plain,
            at + "full, rate scaled": dataclasses.replace(plain, lr=0.154),
            at + "fewer epochs": fewer,
            at + "fewer epochs, rate scaled": dataclasses.replace(fewer, lr=0.154),
            at + "fewer epochs, late": late,
            at + "fewer epochs, late, rate scaled": dataclasses.replace(late, lr=0.154),
            at + "budget": budget,
            at + "budget, rate scaled": dataclasses.replace(budget, lr=0.154),
            at + "budget, power 0.5": dataclasses.replace(budget, power=0.5),
            at + "budget, patience 5": dataclasses.replace(budget, patience=5),
        }
    clean, weak = made["0% budget"], made["30% budget, patience 5"]
    no_patience = made["30% budget"]
    made |= {
        "30% budget, patience 5, rate scaled": dataclasses.replace(weak, lr=0.154),
        "0% budget, gradient norm": dataclasses.replace(clean, select="gradient-norm"),
        "0% budget, gradient norm, mean one": dataclasses.replace(clean, select="gradient-norm-1"),
        "0% budget, hardest": dataclasses.replace(clean, select="hardest"),
        "0% budget 50%": dataclasses.replace(clean, save=0.5),
        "0% fewer epochs 50%, late": Variant(epochs=15, milestones=(9, 13, 14)),
        "30% patience 5 only": dataclasses.replace(weak, save=None),
        "30% budget, patience 3": dataclasses.replace(weak, patience=3),
        "30% budget, patience 5 from epoch 18": dataclasses.replace(weak, skip_from=18),
        "30% budget, patience 5, none return late": dataclasses.replace(weak, returning_late=0.0),
        "30% budget, patience 5, late 2": dataclasses.replace(weak, patience_late=2),
        "30% budget, patience 5, late smoothed": dataclasses.replace(
            weak, smoothed_late=0.9, returning_late=0.0
        ),
        "30% budget, patience 5, wrong labels only": dataclasses.replace(weak, wrong_only=True),
        "30% budget, smoothed loss above 1.25 chance": dataclasses.replace(weak, smoothed=1.25),
        "30% budget, smoothed loss above chance": dataclasses.replace(weak, smoothed=1.0),
        "30% budget, oracle from 5": dataclasses.replace(no_patience, oracle_from=5, returning=0.0),
        "30% budget, oracle from 18": dataclasses.replace(
            no_patience, oracle_from=18, returning=0.0
        ),
        "30% budget 50%, patience 5": dataclasses.replace(weak, save=0.5),
    }
    cosine = Variant(cosine=True)
    made |= {
        "0% cosine full": cosine,
        "0% cosine fewer epochs": dataclasses.replace(cosine, epochs=20),
        "30% cosine full": dataclasses.replace(cosine, noise=0.3),
        "30% cosine budget, power 0.5, patience 5": dataclasses.replace(
            weak, cosine=True, power=0.5
        ),
    }
    for power in (0.0, 0.5, 1.0):
        name = f"0% cosine budget, power {power}"
        made[name] = dataclasses.replace(cosine, save=0.35, power=power)
    made["0% cosine budget, power 0.5, gradient norm, mean one"] = dataclasses.replace(
        cosine, save=0.35, power=0.5, select="gradient-norm-1"
    )
    return made


def wrong_labels(labels: Indices, share: float, seed: int) -> Indices:
    """Return the labels, of which this share is replaced by another class."""
    chance = np.random.default_rng([seed, 77])
    labels = labels.copy()
    chosen = chance.choice(len(labels), int(share * len(labels)), replace=False)
    labels[chosen] = (labels[chosen] + chance.integers(1, CLASSES, len(chosen))) % CLASSES
    return labels


def shares(rates: Floats, available: float, budget: float) -> Floats:
    """Return the share of the samples of each epoch, in proportion to the rates."""
    low, high = 0.0, 1e9
    rates = np.maximum(rates, 1e-12)
    for _ in range(200):
        middle = math.sqrt(max(low, 1e-9) * high) if high > 1 else (low + high) / 2
        if (available * np.clip(middle * rates, SMALLEST_SHARE, 1)).sum() < budget:
            low = middle
        else:
            high = middle
    return np.asarray(np.clip(high * rates, SMALLEST_SHARE, 1))


def by_gradient_norm(
    smoothed: Floats, number: int, chance: np.random.Generator
) -> tuple[Indices, Floats]:
    """Choose by systematic sampling, and return positions and inverse probabilities."""
    norms = np.maximum(1 - np.exp(-np.nan_to_num(smoothed, nan=5.0)), 0.02)
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = math.sqrt(max(low, 1e-6) * high)
        if np.minimum(1, middle * norms).sum() < number:
            low = middle
        else:
            high = middle
    probabilities = np.minimum(1, high * norms)
    order = chance.permutation(len(norms))
    ends = np.cumsum(probabilities[order])
    offset = chance.random()
    starts = np.concatenate([[0], ends[:-1]])
    chosen = order[np.floor(ends + offset) > np.floor(starts + offset)]
    return chosen, 1 / probabilities[chosen]


class Chooser:
    """Chooses the samples of each epoch of one variant, from the losses of earlier epochs."""

    def __init__(self, variant: Variant, wrong: Mask, seed: int) -> None:
        self.variant, self.wrong, self.seed = variant, wrong, seed
        self.streaks = np.zeros(SAMPLES, np.int32)
        self.smoothed = np.full(SAMPLES, np.nan)
        self.chance = math.nan
        self.used = 0
        self.rates = np.array([variant.rate(epoch + 0.5) for epoch in range(variant.epochs)])
        self._unseen: Indices = np.empty(0, np.int64)

    def contradicting(self, epoch: int) -> Mask:
        """Return the samples to skip."""
        variant = self.variant
        small = self.rates[epoch] < 0.5 * self.rates.max()
        patience = variant.patience
        if small and variant.patience_late is not None:
            patience = variant.patience_late
        chosen: Mask = np.zeros(SAMPLES, np.bool_)
        if patience:
            chosen = self.streaks >= patience
        if small and variant.smoothed_late is not None:
            chosen |= np.nan_to_num(self.smoothed, nan=0) > self.chance * variant.smoothed_late
        if epoch < variant.skip_from:
            chosen[:] = False
        if variant.wrong_only:
            chosen &= self.wrong
        if variant.smoothed is not None and epoch >= 5:
            chosen = np.nan_to_num(self.smoothed, nan=0) > self.chance * variant.smoothed
        if variant.oracle_from is not None and epoch >= variant.oracle_from:
            chosen = self.wrong.copy()
        return chosen

    def choose(self, epoch: int) -> tuple[Indices, Floats | None, Mask]:
        """Return the samples of an epoch in ascending order, their weights, and those to skip."""
        variant, chance = self.variant, np.random.default_rng([self.seed, epoch, 5])
        skipped = self.contradicting(epoch)
        returning = variant.returning
        if variant.returning_late is not None and self.rates[epoch] <= 0.1 * self.rates.max():
            returning = variant.returning_late
        candidates = np.flatnonzero(skipped)
        back = chance.permutation(candidates)[: round(returning * len(candidates))]
        mask = ~skipped
        mask[back] = True
        available = np.flatnonzero(mask)
        number = len(available)
        if variant.save:
            budget = (1 - variant.save) * variant.epochs * SAMPLES - self.used
            relative = (self.rates / self.rates.max()) ** variant.power
            number = round(shares(relative[epoch:], len(available), budget)[0] * len(available))
            if epoch == variant.epochs - 1:
                number = int(min(len(available), max(BATCH, round(budget))))
        kept, weights = self._among(available, mask, number, chance)
        order = np.argsort(kept)
        self.used += len(kept)
        return kept[order], None if weights is None else weights[order], skipped

    def _among(
        self, available: Indices, mask: Mask, number: int, chance: np.random.Generator
    ) -> tuple[Indices, Floats | None]:
        if number >= len(available):
            return available, None
        if self.variant.select == "random":
            self._unseen = self._unseen[mask[self._unseen]]
            if len(self._unseen) < number:
                rest = chance.permutation(np.setdiff1d(available, self._unseen))
                self._unseen = np.concatenate([self._unseen, rest])
            kept, self._unseen = self._unseen[:number], self._unseen[number:]
            return kept, None
        if self.variant.select == "hardest":
            order = np.argsort(-np.nan_to_num(self.smoothed[available], nan=5.0))
            return available[order[:number]], None
        positions, weights = by_gradient_norm(self.smoothed[available], number, chance)
        if self.variant.select == "gradient-norm-1":
            weights = weights / weights.mean()
        return available[positions], weights

    def observe(self, index: Indices, losses: Floats) -> None:
        """Take the losses of a batch."""
        if math.isnan(self.chance):
            self.chance = float(losses.mean())
        self.streaks[index] = np.where(losses > self.chance, self.streaks[index] + 1, 0)
        before = self.smoothed[index]
        smoothed = (1 - SMOOTHING) * before + SMOOTHING * losses
        self.smoothed[index] = np.where(np.isnan(before), losses, smoothed)


def accuracy(model: torch.nn.Module, batches: Any) -> float:
    """Return the share of the evaluated images that are classified correctly."""
    model.eval()
    right = total = 0
    with torch.inference_mode():
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                right += int((model(x).argmax(1) == y).sum())
            total += len(y)
    return right / total


def train(variant: Variant, images: ImageSet, seed: int) -> dict[str, Any]:
    """Train a variant, and return its result."""
    seed *= SEED_STEP
    torch.manual_seed(seed)
    model = build_network("resnet18", CLASSES, 3)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    true = images.labels[:SAMPLES].numpy()
    labels = wrong_labels(true, variant.noise, seed) if variant.noise else true
    wrong = labels != true
    part = dataclasses.replace(
        images.subset(torch.arange(SAMPLES)), labels=torch.from_numpy(labels)
    )
    mean, std = channel_statistics(part.images)
    held_out = images.subset(torch.arange(len(images) - HELD_OUT, len(images)))
    batches = EvaluationBatches(held_out, batch_size=500, device="cpu", mean=mean, std=std)
    augment = Augment(padding=4, flip=True)
    loader = DeviceImages(part, seed=seed, device="cpu", augment=augment, mean=mean, std=std)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=variant.lr,
        momentum=0.9,
        nesterov=True,
        weight_decay=5e-4,
        fused=True,
    )
    chooser = Chooser(variant, wrong, seed)
    log: list[dict[str, Any]] = []
    began = time.monotonic()
    for epoch in range(variant.epochs):
        kept, weights, skipped = chooser.choose(epoch)
        of_sample = torch.ones(SAMPLES)
        if weights is not None:
            of_sample[kept] = torch.from_numpy(weights).float()
        shuffle = torch.Generator()
        shuffle.manual_seed(seed + epoch)
        order = torch.from_numpy(kept)[torch.randperm(len(kept), generator=shuffle)]
        model.train()
        parts = order.split(BATCH)
        for number, index in enumerate(parts):
            if len(index) < 2:  # Batch normalization needs two samples.
                continue
            for group in optimizer.param_groups:
                group["lr"] = variant.rate(epoch + number / len(parts))
            x, y = loader.fetch(index, epoch)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            losses = F.cross_entropy(logits.float(), y, reduction="none")
            loss = losses.mean() if weights is None else (losses * of_sample[index]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            chooser.observe(index.numpy(), losses.detach().numpy())
        log.append(
            {
                "kept": len(kept),
                "skipped": int(skipped.sum()),
                "precision": float(wrong[skipped].mean()) if skipped.any() else None,
                "recall": float(skipped[wrong].mean()) if wrong.any() else None,
            }
        )
        if (epoch + 1) % 6 == 0 or epoch >= variant.epochs - 3:
            log[-1]["accuracy"] = accuracy(model, batches)
    return {
        "accuracy": log[-1]["accuracy"],
        "share_trained": chooser.used / (LONGEST * SAMPLES),
        "seconds": time.monotonic() - began,
        "epochs": log,
    }


def finished(out: Path) -> set[tuple[str, int]]:
    """Return name and seed of each variant that has a result."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {(line["variant"], line["seed"]) for line in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--out", type=Path, required=True, help="file of the results, JSON lines")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="part of the names of the variants to train")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = load_cifar10(options.data)[0]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        for name, variant in variants().items():
            if options.only not in name:
                continue
            claim = options.out.with_name(f".{name} {seed}.lock").open("w")
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # Another process trains it.
            if (name, seed) in finished(options.out):
                continue
            result = {"variant": name, "seed": seed, **train(variant, images, seed)}
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{name}, seed {seed}: {100 * result['accuracy']:.2f} %", flush=True)


if __name__ == "__main__":
    main()
