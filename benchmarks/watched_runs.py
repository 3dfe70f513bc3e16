"""Trains networks on wrong labels and writes the logits of every step, for ``label_ranking.py``.

    python benchmarks/watched_runs.py --data DIR --out RUNS --seeds 3
    python benchmarks/watched_runs.py --data DIR --out RUNS --folds

Each run trains a thin ResNet-18 with one thread for 30 epochs on the first 10,000 training images
of CIFAR-10, of which some have wrong labels (see ``KINDS``). What ``LabelWatch.record`` would be
given is written to ``RUNS/KIND-SEED.npz``, so that rankings are compared without training again.
With ``--folds``, five networks are trained instead, each without a fifth of the images, and the
probabilities of the left-out images are written, which is what cleanlab asks for (seed 0).

A finished run is one line of ``RUNS/runs.jsonl``, and is not trained again: the command continues
with the first run that is not finished, and several processes can share the work.
"""

import argparse
import dataclasses
import fcntl
import itertools
import json
import os
import time
from collections.abc import Callable
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
from fineprune.datasets.label_noise import mapped_noise, symmetric_noise
from fineprune.networks.registry import build_network

SAMPLES, BATCH, CLASSES, EPOCHS, FOLDS = 10_000, 128, 10, 30, 5
SHARE = 0.3
RATE, MILESTONES = 0.154, (9, 18, 24)
SEED_STEP = 1_000_003
WEAK_EPOCHS = 5

Labels = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def symmetric(images: ImageSet, seed: int) -> Labels:
    """Replace 30 % of the labels by any other class."""
    return symmetric_noise(own_labels(images), CLASSES, SHARE, seed)


def cat_dog(images: ImageSet, seed: int) -> Labels:
    """Exchange 30 % of the labels of cats and dogs."""
    return mapped_noise(own_labels(images), {3: 5, 5: 3}, SHARE, seed)


def asymmetric(images: ImageSet, seed: int) -> Labels:
    """Map 30 % of truck to automobile, bird to airplane, cat and dog to each other, deer to horse.

    This is the usual map, of Patrini et al., CVPR 2017.
    """
    return mapped_noise(own_labels(images), {9: 1, 2: 0, 3: 5, 5: 3, 4: 7}, SHARE, seed)


def confused(images: ImageSet, seed: int) -> Labels:
    """Replace 30 % of the labels where, and by what, a LeNet takes the image for.

    The LeNet is trained for a few epochs on the second 10,000 images. The images whose labels are
    replaced are drawn without replacement in proportion to the probability that it gives to the
    other classes, and the new label is drawn from these.
    """
    others = images.subset(torch.arange(SAMPLES, 2 * SAMPLES))
    probabilities = lenet_probabilities(others, images.subset(torch.arange(SAMPLES)), seed)
    labels = own_labels(images)
    chance = np.random.default_rng([seed, 77])
    wrong = probabilities.astype(np.float64)
    wrong[np.arange(SAMPLES), labels] = 0
    total = wrong.sum(1)
    chosen = chance.choice(SAMPLES, round(SHARE * SAMPLES), replace=False, p=total / total.sum())
    noisy = labels.copy()
    for sample in chosen:
        noisy[sample] = chance.choice(CLASSES, p=wrong[sample] / total[sample])
    return noisy


KINDS: dict[str, Callable[[ImageSet, int], Labels]] = {
    "symmetric": symmetric,
    "cat-dog": cat_dog,
    "asymmetric": asymmetric,
    "confused": confused,
}


def own_labels(images: ImageSet) -> Labels:
    """Return the true labels of the images to train on; int64, shape (SAMPLES,)."""
    return images.labels[:SAMPLES].numpy().astype(np.int64)


def rate_at(progress: float) -> float:
    """Return the learning rate at a point of the training, measured in epochs."""
    return float(RATE * 0.2 ** sum(milestone <= progress for milestone in MILESTONES))


def lenet_probabilities(train: ImageSet, evaluated: ImageSet, seed: int) -> Floats:
    """Return what a LeNet that was trained for a few epochs says of other images."""
    torch.manual_seed(seed)
    model = build_network("lenet", CLASSES, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    mean, std = channel_statistics(train.images)
    batches = DeviceImages(
        train, seed=seed, device="cpu", augment=Augment(flip=True), mean=mean, std=std
    )
    for epoch in range(WEAK_EPOCHS):
        shuffle = torch.Generator().manual_seed(seed + epoch)
        for index in torch.randperm(len(train), generator=shuffle).split(BATCH):
            x, y = batches.fetch(index, epoch)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return probabilities_of(model, evaluated, mean, std)


def probabilities_of(
    model: torch.nn.Module, images: ImageSet, mean: tuple[float, ...], std: tuple[float, ...]
) -> Floats:
    """Return the softmax of all images without augmentation; float32, shape (n, CLASSES)."""
    model.eval()
    parts = []
    batches = EvaluationBatches(images, batch_size=500, device="cpu", mean=mean, std=std)
    with torch.inference_mode():
        for x, _ in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            parts.append(logits.float().softmax(1).numpy())
    return np.concatenate(parts)


@dataclasses.dataclass(frozen=True)
class Training:
    """What is needed to train.

    Attributes:
        model: The network, with the weights of the seed.
        batches: Fetches the augmented images of a batch.
        optimizer: The optimizer. Its rate must be set.
        mean: The mean of each channel of the images to train on.
        std: The standard deviation.
    """

    model: torch.nn.Module
    batches: DeviceImages
    optimizer: torch.optim.SGD
    mean: tuple[float, ...]
    std: tuple[float, ...]


def training_of(network: str, images: ImageSet, labels: Labels, seed: int) -> Training:
    """Return what is needed to train a network on the first ``SAMPLES`` images."""
    torch.manual_seed(seed)
    model = build_network(network, CLASSES, 3)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    part = dataclasses.replace(
        images.subset(torch.arange(SAMPLES)), labels=torch.from_numpy(labels)
    )
    mean, std = channel_statistics(part.images)
    augment = Augment(padding=4, flip=True)
    batches = DeviceImages(part, seed=seed, device="cpu", augment=augment, mean=mean, std=std)
    return Training(model, batches, optimizer_of(model), mean, std)


def optimizer_of(model: torch.nn.Module) -> torch.optim.SGD:
    """Return the optimizer of a network."""
    return torch.optim.SGD(
        model.parameters(), lr=RATE, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
    )


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained network, and what was recorded while it trained.

    Attributes:
        model: The network.
        order: The samples in the order of the steps; int16, shape (EPOCHS, n).
        logits: Their logits, as the bits of bfloat16; int16, shape (EPOCHS, n, CLASSES).
    """

    model: torch.nn.Module
    order: npt.NDArray[np.int16]
    logits: npt.NDArray[np.int16]


def train(images: ImageSet, labels: Labels, kept: Labels, seed: int) -> Trained:
    """Train on some of the images.

    Args:
        images: The images of CIFAR-10, of which the first ``SAMPLES`` are used.
        labels: The labels to train with; int64, shape (SAMPLES,).
        kept: The samples to train on, in ascending order; int64, shape (n,).
        seed: The seed of the run.
    """
    prepared = training_of("resnet18", images, labels, seed)
    model, optimizer = prepared.model, prepared.optimizer
    order = np.empty((EPOCHS, len(kept)), np.int16)
    recorded = np.empty((EPOCHS, len(kept), CLASSES), np.int16)
    for epoch in range(EPOCHS):
        model.train()
        shuffle = torch.Generator().manual_seed(seed + epoch)
        shuffled = torch.from_numpy(kept)[torch.randperm(len(kept), generator=shuffle)]
        order[epoch] = shuffled.numpy()
        parts = shuffled.split(BATCH)
        for number, index in enumerate(parts):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(epoch + number / len(parts))
            x, y = prepared.batches.fetch(index, epoch)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            F.cross_entropy(logits.float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            first = number * BATCH
            recorded[epoch, first : first + len(index)] = (
                logits.detach().bfloat16().view(torch.int16).numpy()
            )
    return Trained(model, order, recorded)


def watched(images: ImageSet, test: ImageSet, kind: str, seed: int, file: Path) -> dict[str, Any]:
    """Train on all samples and write the logits of every step."""
    seed *= SEED_STEP
    labels, true = KINDS[kind](images, seed), own_labels(images)
    trained = train(images, labels, np.arange(SAMPLES), seed)
    write(file, order=trained.order, logits=trained.logits, labels=labels, true=true)
    mean, std = channel_statistics(images.subset(torch.arange(SAMPLES)).images)
    said = probabilities_of(trained.model, test, mean, std).argmax(1)
    return {
        "wrong": int((labels != true).sum()),
        "test_accuracy": float((said == test.labels.numpy()).mean()),
    }


def fold(images: ImageSet, run: Path, number: int, file: Path) -> dict[str, Any]:
    """Train without a fifth of the samples of a run and write what the network says of them."""
    with np.load(run) as arrays:
        labels = arrays["labels"]
    held_out = np.random.default_rng(0).permutation(SAMPLES) % FOLDS == number
    trained = train(images, labels, np.flatnonzero(~held_out), seed=0)
    mean, std = channel_statistics(images.subset(torch.arange(SAMPLES)).images)
    left = torch.from_numpy(np.flatnonzero(held_out))
    probabilities = probabilities_of(trained.model, images.subset(left), mean, std)
    write(file, index=left.numpy(), probabilities=probabilities)
    return {}


def write(file: Path, **arrays: npt.NDArray[Any]) -> None:
    """Write arrays to a file, which appears when it is complete."""
    unfinished = file.with_suffix(".part")
    with unfinished.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)
    os.replace(unfinished, file)


def finished(out: Path) -> set[str]:
    """Return the names of the runs that have a line."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {json.loads(line)["run"] for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--folds", action="store_true", help="train cleanlab's networks, seed 0")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images, test = load_cifar10(options.data)
    options.out.mkdir(parents=True, exist_ok=True)
    lines = options.out / "runs.jsonl"
    for number, kind in itertools.product(
        range(FOLDS if options.folds else options.seeds), options.kinds
    ):
        name = f"{kind}-0-fold-{number}" if options.folds else f"{kind}-{number}"
        claim = (options.out / f".{name}.lock").open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # Another process trains it.
        if name in finished(lines):
            continue
        began = time.monotonic()
        written = options.out / f"{name}.npz"
        if options.folds:
            result = fold(images, options.out / f"{kind}-0.npz", number, written)
        else:
            result = watched(images, test, kind, number, written)
        result = {"run": name, **result, "seconds": round(time.monotonic() - began, 1)}
        with lines.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
