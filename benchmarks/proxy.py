"""Trains on the hardest half of each batch, as a small network sees it, beside a shorter training.

    python benchmarks/proxy.py --data DIR --out runs/proxy.jsonl --seeds 3
    python benchmarks/proxy.py --out runs/proxy.jsonl --table
    python benchmarks/proxy.py --data DIR --out runs/proxy-gpu.jsonl --device cuda --images 45000 \
        --width 64 --proxy-width 16 --rate 0.1

A proxy with fewer channels is trained beside the network. It scores twice as many samples as a
step trains, and the half with the larger losses trains both networks. So losses are fresh, unlike
those of policies, which are an epoch old. Jordan's fast trainings of CIFAR-10 (airbench96_faster)
do this in a regime in which nearly all samples are learned.

The ResNet-9 trains on the first images of CIFAR-10, 10,000 by default, with their own labels:
batches of 128, Nesterov momentum 0.9, weight decay 5e-4, crops and flips, bfloat16, a rate that
rises for 15 % of the steps and then falls as 1 - u^2. The cost is counted in floating-point
operations of both networks, as a share of 30 epochs on all images. ``proxy`` passes over all images
28 times; ``shorter`` trains on whole batches for as many steps as cost the same, ``random`` for as
many steps as ``proxy``, and ``full`` for 30 epochs. Each arm and each multiple of the rate is a
case. The rate of an arm is chosen by the accuracy of the first seed on the training images that are
left, at most the last 10,000 (``held_out``).

A finished run is a line of the file, with which a later call continues.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from watched_runs import BATCH, CLASSES, SEED_STEP, optimizer_of

from fineprune.datasets.augment import Augment
from fineprune.datasets.cifar import load_cifar10
from fineprune.datasets.device_loader import DeviceImages, EvaluationBatches
from fineprune.datasets.image_set import ImageSet, channel_statistics
from fineprune.experiments.arm_table import mean_difference
from fineprune.networks.resnet9 import ResNet9
from fineprune.report.table import points
from fineprune.training.evaluate import evaluate

ARMS = ("proxy", "shorter", "random", "full")
WARMUP = 0.15
HELD_OUT = 10_000
EPOCHS, PASSES = 30, 28
FACTORS = (1.0, 1.5, 2.0)


def rate_at(progress: float, peak: float) -> float:
    """Return the learning rate after a share of the steps."""
    if progress < WARMUP:
        return peak * max(progress, 1e-3) / WARMUP
    return peak * (1 - ((progress - WARMUP) / (1 - WARMUP)) ** 2)


def operations(model: torch.nn.Module, samples: int) -> int:
    """Return the floating-point operations of a forward pass."""
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model.eval()(torch.zeros(samples, 3, 32, 32))
    return int(counted.get_total_flops())


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all cases have in common.

    Attributes:
        images: The number of images to train on.
        width: The channels of the network after its first convolution.
        proxy_width: Those of the proxy.
        passes: How often the proxy passes over all images.
        rate: The largest learning rate, before it is multiplied by a factor.
        device: Where the networks are trained.
    """

    images: int
    width: int
    proxy_width: int
    passes: int
    rate: float
    device: str

    @functools.cached_property
    def costs(self) -> dict[str, int]:
        """The floating-point operations of a step of each arm; a backward pass counts twice."""
        network = 3 * operations(ResNet9(CLASSES, width=self.width), BATCH)
        proxy = ResNet9(CLASSES, width=self.proxy_width)
        # The scores come from a forward pass of their own, over twice the batch.
        both = network + operations(proxy, 2 * BATCH) + 3 * operations(proxy, BATCH)
        return {"proxy": both, "shorter": network, "random": network, "full": network}

    def steps(self, arm: str) -> int:
        """Return the number of steps of an arm."""
        if arm == "full":
            return math.ceil(self.images / BATCH) * EPOCHS
        steps = self.passes * (self.images // (2 * BATCH))
        if arm == "shorter":
            return round(steps * self.costs["proxy"] / self.costs["shorter"])
        return steps

    def network(self, width: int) -> tuple[torch.nn.Module, torch.optim.SGD]:
        """Return a network with new weights, and its optimizer."""
        model = ResNet9(CLASSES, width=width)
        model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, optimizer_of(model)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.partition(":")[0], dtype=torch.bfloat16)


def shuffled(samples: int, seed: int, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the epoch and the samples of each batch, without end."""
    for epoch in itertools.count():
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))
        yield from ((epoch, index) for index in order.split(size) if len(index) == size)


def train(
    images: ImageSet, test: ImageSet, arm: str, seed: int, factor: float, setting: Setting
) -> dict[str, Any]:
    """Train one case, and return what its line says."""
    seed *= SEED_STEP
    steps = setting.steps(arm)
    part = images.subset(torch.arange(setting.images))
    mean, std = channel_statistics(part.images)
    augment = Augment(padding=4, flip=True)
    made = DeviceImages(part, seed=seed, device=setting.device, augment=augment, mean=mean, std=std)
    torch.manual_seed(seed)
    trained = [setting.network(setting.width)]
    network = trained[0][0]
    if arm == "proxy":
        trained.append(setting.network(setting.proxy_width))
    batches = shuffled(len(part), seed, 2 * BATCH if arm == "proxy" else BATCH)
    for step, (epoch, index) in enumerate(itertools.islice(batches, steps)):
        x, y = made.fetch(index, epoch)
        if arm == "proxy":
            with torch.no_grad(), setting.autocast():
                logits = trained[1][0].train()(x)
            losses = F.cross_entropy(logits.float(), y, reduction="none")
            hardest = losses.topk(BATCH, sorted=False).indices
            x, y = x[hardest], y[hardest]
        for model, optimizer in trained:
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step / steps, factor * setting.rate)
            with setting.autocast():
                logits = model(x)
            F.cross_entropy(logits.float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    full = setting.steps("full") * setting.costs["full"]
    result: dict[str, Any] = {"steps": steps, "cost": steps * setting.costs[arm] / full}
    first = max(setting.images, len(images) - HELD_OUT)
    held_out = images.subset(torch.arange(first, len(images)))
    for name, evaluated in (("held_out", held_out), ("test", test)):
        ordered = EvaluationBatches(
            evaluated, batch_size=500, device=setting.device, mean=mean, std=std
        )
        evaluation = evaluate(network, ordered, setting.device, setting.autocast(), CLASSES)
        result[name] = evaluation.accuracy
    return result


def table(lines: list[dict[str, Any]]) -> str:
    """Return a table of the arms, each with the rate that was best on the held-out images."""
    rows = ["| arm | rate | steps | operations | accuracy | to `shorter` | n |"]
    rows.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    chosen: dict[str, dict[int, dict[str, Any]]] = {}
    for arm in ARMS:
        trials = [line for line in lines if line["arm"] == arm and line["seed"] == 0]
        if trials:
            best = max(trials, key=lambda line: line["held_out"])["factor"]
            chosen[arm] = {
                line["seed"]: line
                for line in lines
                if line["arm"] == arm and line["factor"] == best
            }
    control = chosen.get("shorter", {})
    for arm, runs in chosen.items():
        both = [runs[seed]["test"] - control[seed]["test"] for seed in runs.keys() & control.keys()]
        first = next(iter(runs.values()))
        accuracy = statistics.mean(100 * run["test"] for run in runs.values())
        to_shorter = points(mean_difference(both)) if both else "-"
        rows.append(
            f"| {arm} | {first['factor'] * first['rate']:g} | {first['steps']:,} | "
            f"{first['cost']:.0%} | {accuracy:.2f} | {to_shorter} | {len(runs)} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the CIFAR-10 files")
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--arms", nargs="+", default=list(ARMS[:3]), choices=ARMS)
    parser.add_argument("--factors", type=float, nargs="+", default=list(FACTORS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--images", type=int, default=10_000, help="to train on")
    parser.add_argument("--width", type=int, default=16, help="of the network")
    parser.add_argument("--proxy-width", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    lines = []
    if options.out.exists():
        lines = [json.loads(line) for line in options.out.read_text().splitlines()]
    if not options.table:
        torch.set_num_threads(1)
        images, test = load_cifar10(options.data)
        cases = itertools.product(range(options.seeds), options.arms, options.factors)
        setting = Setting(
            **{field.name: getattr(options, field.name) for field in dataclasses.fields(Setting)}
        )
        for seed, arm, factor in cases:
            case = {"arm": arm, "seed": seed, "factor": factor, **dataclasses.asdict(setting)}
            if any(case.items() <= line.items() for line in lines):
                continue
            result = train(images, test, arm, seed, factor, setting)
            lines.append(case | result | {"torch": torch.__version__})
            with options.out.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(json.dumps(lines[-1]), flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
