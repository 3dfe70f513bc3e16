"""Trains on the hardest half of each batch, as a small network sees it, beside a shorter training.

    python benchmarks/proxy.py --data DIR --out runs/proxy.jsonl --seeds 3
    python benchmarks/proxy.py --out runs/proxy.jsonl --table

A proxy with half the channels is trained beside the network. It scores twice as many samples as a
step trains, and the half with the larger losses trains both networks. So losses are fresh, unlike
those of policies, which are an epoch old. Jordan's fast trainings of CIFAR-10 (airbench96_faster)
do this in a regime in which nearly all samples are learned.

The ResNet-9 trains on the first 10,000 images of CIFAR-10 with their own labels: batches of 128,
Nesterov momentum 0.9, weight decay 5e-4, crops and flips, bfloat16, a rate that rises for 15 % of
the steps and then falls as 1 - u^2. The cost is counted in floating-point operations of both
networks, as a share of 30 epochs on all images. ``proxy`` passes over all images 28 times;
``shorter`` trains on whole batches for as many steps as cost the same, and ``random`` for as many
steps as ``proxy``. Each arm and each multiple of the rate is a case. The rate of an arm is chosen
by the accuracy of the first seed on 10,000 other training images (``held_out``).

A finished run is a line of the file, with which a later call continues.
"""

import argparse
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
from watched_runs import (
    BATCH,
    CLASSES,
    SAMPLES,
    SEED_STEP,
    optimizer_of,
    own_labels,
    probabilities_of,
    training_of,
)

from fineprune.datasets.cifar import load_cifar10
from fineprune.datasets.image_set import ImageSet
from fineprune.experiments.arm_table import mean_difference
from fineprune.networks.resnet9 import ResNet9
from fineprune.report.table import points

ARMS = ("proxy", "shorter", "random")
PROXY_WIDTH = 8
RATE, WARMUP = 0.3, 0.15
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


def costs() -> dict[str, int]:
    """Return the floating-point operations of a step of each arm; a backward pass counts twice."""
    network = 3 * operations(ResNet9(CLASSES), BATCH)
    proxy = ResNet9(CLASSES, width=PROXY_WIDTH)
    # The scores come from a forward pass of their own, over twice the batch.
    both = network + operations(proxy, 2 * BATCH) + 3 * operations(proxy, BATCH)
    return {"proxy": both, "shorter": network, "random": network}


def shuffled(seed: int, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the epoch and the samples of each batch, without end."""
    for epoch in itertools.count():
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed + epoch))
        yield from ((epoch, index) for index in order.split(size) if len(index) == size)


def train(
    images: ImageSet, test: ImageSet, arm: str, seed: int, factor: float, passes: int
) -> dict[str, Any]:
    """Train one case, and return what its line says."""
    seed *= SEED_STEP
    cost, proxy_steps = costs(), passes * (SAMPLES // (2 * BATCH))
    steps = proxy_steps
    if arm == "shorter":
        steps = round(proxy_steps * cost["proxy"] / cost["shorter"])
    labels = own_labels(images)
    network = training_of("resnet9", images, labels, seed)
    trained = [(network.model, network.optimizer)]
    if arm == "proxy":
        proxy = ResNet9(CLASSES, width=PROXY_WIDTH)
        proxy.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        trained.append((proxy, optimizer_of(proxy)))
    batches = shuffled(seed, 2 * BATCH if arm == "proxy" else BATCH)
    for step, (epoch, index) in enumerate(itertools.islice(batches, steps)):
        x, y = network.batches.fetch(index, epoch)
        if arm == "proxy":
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                logits = proxy.train()(x)
            losses = F.cross_entropy(logits.float(), y, reduction="none")
            hardest = losses.topk(BATCH, sorted=False).indices
            x, y = x[hardest], y[hardest]
        for model, optimizer in trained:
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step / steps, factor * RATE)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            F.cross_entropy(logits.float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    full = math.ceil(SAMPLES / BATCH) * EPOCHS * cost["shorter"]
    result: dict[str, Any] = {"steps": steps, "cost": steps * cost[arm] / full}
    others = images.subset(torch.arange(len(images) - SAMPLES, len(images)))
    for name, evaluated in (("held_out", others), ("test", test)):
        said = probabilities_of(network.model, evaluated, network.mean, network.std).argmax(1)
        result[name] = float((said == evaluated.labels.numpy()).mean())
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
        rows.append(
            f"| {arm} | {first['factor'] * RATE:g} | {first['steps']:,} | {first['cost']:.0%} | "
            f"{accuracy:.2f} | {points(mean_difference(both)) if both else '-'} | {len(runs)} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the CIFAR-10 files")
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--factors", type=float, nargs="+", default=list(FACTORS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    lines = []
    if options.out.exists():
        lines = [json.loads(line) for line in options.out.read_text().splitlines()]
    if not options.table:
        torch.set_num_threads(1)
        images, test = load_cifar10(options.data)
        cases = itertools.product(range(options.seeds), options.arms, options.factors)
        for seed, arm, factor in cases:
            case = {"arm": arm, "seed": seed, "factor": factor, "passes": options.passes}
            if any(case.items() <= line.items() for line in lines):
                continue
            result = train(images, test, arm, seed, factor, options.passes)
            lines.append(case | result | {"torch": torch.__version__})
            with options.out.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(json.dumps(lines[-1]), flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
