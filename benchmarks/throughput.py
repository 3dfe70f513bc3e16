"""Images per second of our training loop, beside a plain loop and beside the machine's limit.

    python benchmarks/throughput.py                                    # LeNet
    python benchmarks/throughput.py --network resnet18 --samples 6400

Three loops train the same network on the same images with the same batch, epoch by epoch in turn,
so that a noisy machine hurts all alike. Each round gives one ratio; medians of those are shown.

- ours: ``fineprune.training.loop.train`` with pruning, as ``fineprune train`` runs it, with the
  precision and the compiler that "auto" means on this machine;
- plain: a ``DataLoader`` with two workers that crop, flip and normalise image by image with Pillow,
  float32, and ``loss.item()`` in every step, as most scripts have it;
- limit: forward and backward on one fixed batch, nothing else, with our precision and compiler.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from fineprune.datasets.synthetic import make_synthetic
from fineprune.networks.registry import build_network
from fineprune.training.hardware import describe, resolved
from fineprune.training.loop import train
from fineprune.training.recipe import make_recipe
from fineprune.training.settings import RunSettings

BATCH = 128
WORKERS = 2


class PillowImages(Dataset[tuple[torch.Tensor, int]]):
    """The usual transforms of CIFAR scripts, one image at a time."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images = images.permute(0, 2, 3, 1).numpy()
        self.labels: list[int] = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = ImageOps.expand(Image.fromarray(self.images[index]), 4)
        left, top = random.randrange(9), random.randrange(9)
        image = image.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        return (x - 0.5) / 0.25, self.labels[index]


class PlainLoop:
    """An epoch as most scripts have it."""

    def __init__(self, network: str, samples: int, device: str) -> None:
        data = make_synthetic(samples)[0]
        self.samples = samples
        self.device = device
        self.model = build_network(network, 10, 3).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.loader = DataLoader(
            PillowImages(data.images, data.labels),
            batch_size=BATCH,
            shuffle=True,
            num_workers=WORKERS,
            persistent_workers=True,
            pin_memory=device != "cpu",
            generator=torch.Generator().manual_seed(0),
        )

    def epoch(self) -> int:
        total = 0.0
        for x, y in self.loader:
            x, y = x.to(self.device), y.to(self.device)
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return self.samples


class FixedBatch:
    """Forward and backward on one batch that never changes."""

    def __init__(self, network: str, steps: int, run: RunSettings) -> None:
        self.steps = steps
        self.autocast = torch.autocast(
            run.device, dtype=torch.bfloat16, enabled=run.precision == "bfloat16"
        )
        self.model = build_network(network, 10, 3).to(run.device)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        mode = "default" if run.device == "cpu" else "reduce-overhead"
        self.forward = (
            torch.compile(self.model, dynamic=False, mode=mode)
            if run.compile == "on"
            else self.model
        )
        x = torch.randn(BATCH, 3, 32, 32, device=run.device)
        self.x = x.contiguous(memory_format=torch.channels_last)
        self.y = torch.randint(0, 10, (BATCH,), device=run.device)

    def epoch(self) -> int:
        for _ in range(self.steps):
            with self.autocast:
                logits = self.forward(self.x)
            F.cross_entropy(logits.float(), self.y).backward()
            self.model.zero_grad()
        return self.steps * BATCH


def clock(epoch: Callable[[], int], device: str) -> float:
    """Images per second of one epoch."""
    wait: Callable[[], None] = torch.cuda.synchronize if device != "cpu" else lambda: None
    wait()
    started = time.perf_counter()
    images = epoch()
    wait()
    return images / (time.perf_counter() - started)


def measure(
    network: str, samples: int, rounds: int, device: str
) -> tuple[list[dict[str, float]], RunSettings]:
    """Images per second of each loop, a line a round; the first round warms up and is left out."""
    made = make_recipe(
        {
            "data": {"name": "synthetic", "train_size": samples},
            "network": {"name": network},
            "training": {
                "epochs": rounds + 1,
                "batch_size": BATCH,
                "lr": 0.01,
                "evaluate_every": rounds + 1,
                "evaluate_last": 1,
            },
            # A quarter of the samples is skipped in every epoch after the first, as at its most.
            "pruning": {"window": rounds + 2, "start": 2, "prune": 0.25},
            "run": {"device": device, "checkpoint_every": rounds + 1},
        }
    )
    run = resolved(made).run
    plain = PlainLoop(network, samples, run.device)
    limit = FixedBatch(network, -(-samples // BATCH), run)
    lines: list[dict[str, float]] = []

    def others(metrics: dict[str, Any]) -> None:
        line = {
            "ours": metrics["samples"] / metrics["seconds"],
            "plain": clock(plain.epoch, run.device),
            "limit": clock(limit.epoch, run.device),
        }
        lines.append(line)

    with tempfile.TemporaryDirectory() as folder:
        train(made, Path(folder) / "run", on_epoch=others)
    return lines[1:], run


def summary(lines: list[dict[str, float]]) -> dict[str, float]:
    """Medians, and the medians and extremes of each round's ratios."""
    result = {key: statistics.median(line[key] for line in lines) for key in lines[0]}
    for other in ("plain", "limit"):
        ratios = [line["ours"] / line[other] for line in lines]
        result[f"ours_to_{other}"] = statistics.median(ratios)
        result[f"ours_to_{other}_least"] = min(ratios)
        result[f"ours_to_{other}_most"] = max(ratios)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="lenet")
    parser.add_argument("--samples", type=int, default=25_600, help="images in an epoch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lines, run = measure(options.network, options.samples, options.rounds, options.device)
    result = summary(lines)
    about = {
        **vars(describe(run.device, run.threads)),
        "precision": run.precision,
        "compile": run.compile,
        "torch": torch.__version__,
    }
    if options.json:
        print(json.dumps({"about": about, "rounds": lines, "summary": result}))
        return
    print(about, f"n = {options.rounds} rounds of {options.samples:,} images\n")
    print("| network | ours, images/s | plain | limit | ours / plain | ours / limit |")
    print("|---|---|---|---|---|---|")
    ratios = [
        f"{result[key]:.2f} ({result[key + '_least']:.2f} to {result[key + '_most']:.2f})"
        for key in ("ours_to_plain", "ours_to_limit")
    ]
    speeds = [f"{result[key]:,.0f}" for key in ("ours", "plain", "limit")]
    print("| " + " | ".join([options.network, *speeds, *ratios]) + " |")


if __name__ == "__main__":
    main()
