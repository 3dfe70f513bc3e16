"""Measures what recording costs in a training step on a GPU, or any other device.

    python benchmarks/device_overhead.py --device cuda

Three loops alternate, a block of steps each: a plain one; one that calls ``Pruner.record`` with the
losses and the logits; and one that calls ``LabelWatch.record``. The device is synchronized before
and after a block only. On a GPU, the same block is first run with an error for every operation that
waits for the GPU. The times are medians over the blocks, and the ratios are to the plain block of
the same round, with their smallest and largest value.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from table import show

import fineprune as fp
from fineprune.networks.registry import build_network
from fineprune.training.hardware import describe

BATCH, CLASSES, SAMPLES = 128, 10, 50_000

# Takes the indices, the logits, the labels and the losses of a batch; returns the loss to minimise.
Record = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plain(
    index: torch.Tensor, logits: torch.Tensor, y: torch.Tensor, losses: torch.Tensor
) -> torch.Tensor:
    return losses.mean()


def recorders() -> dict[str, Record]:
    """Return what each loop does with a batch."""
    policy = fp.Adaptive(
        epochs=30, save=0.35, rates=[0.1 * (1 - epoch / 30) for epoch in range(30)]
    )
    pruner = fp.Pruner(SAMPLES, policy, batch_size=BATCH)
    watch = fp.LabelWatch(SAMPLES, CLASSES)

    def watched(
        index: torch.Tensor, logits: torch.Tensor, y: torch.Tensor, losses: torch.Tensor
    ) -> torch.Tensor:
        watch.record(index, logits, y)
        return losses.mean()

    def pruned(
        index: torch.Tensor, logits: torch.Tensor, y: torch.Tensor, losses: torch.Tensor
    ) -> torch.Tensor:
        return pruner.record(index, losses, logits, y)

    return {"plain": plain, "Pruner.record": pruned, "LabelWatch.record": watched}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def costs(network: str, steps: int, rounds: int, device: torch.device) -> list[dict[str, object]]:
    """Return a row for each loop."""
    model = build_network(network, CLASSES, 3)
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    x = torch.randn(BATCH, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    order = torch.randperm(SAMPLES, device=device)[: steps * BATCH].split(BATCH)
    labels = torch.randint(0, CLASSES, (BATCH,), device=device)

    def block(name: str, watched: bool = False) -> float:
        record = recorders()[name]  # New ones, because a sample is recorded once per epoch.
        wait(device)
        started = time.perf_counter()
        for step, index in enumerate(order):
            if watched and step == 1:  # The first record of a training makes its buffers.
                torch.cuda.set_sync_debug_mode("error")
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits = model(x)
            losses = F.cross_entropy(logits.float(), labels, reduction="none")
            record(index, logits, labels, losses).backward()
            optimizer.step()
            optimizer.zero_grad()
        if watched:
            torch.cuda.set_sync_debug_mode("default")
        wait(device)
        return (time.perf_counter() - started) / len(order)

    names = list(recorders())
    for name in names:
        block(name)  # The first steps load kernels and choose algorithms.
        if device.type == "cuda":
            block(name, watched=True)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            times[name].append(block(name))
    rows: list[dict[str, object]] = []
    for name, seconds in times.items():
        ratios = [1e2 * (a / b - 1) for a, b in zip(seconds, times["plain"], strict=True)]
        rows.append(
            {
                "network": network,
                "loop": name,
                "us per step": 1e6 * statistics.median(seconds),
                "to plain, %": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--networks", nargs="+", default=["lenet", "resnet18"])
    parser.add_argument("--steps", type=int, default=256, help="of a block")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    device = torch.device(options.device)
    print(describe(options.device, torch.get_num_threads()), torch.__version__)
    for network in options.networks:
        show(costs(network, options.steps, options.rounds, device))


if __name__ == "__main__":
    main()
