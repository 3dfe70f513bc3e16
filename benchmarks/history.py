"""Measures what it costs to keep the loss and the prediction of each sample.

    python benchmarks/history.py

The first table is for training steps of a thin ResNet-18 and of LeNet, whose time alternates with
that of keeping a batch; the results are medians. The second one is for an epoch of many samples:
keeping all batches, packing them at the end of the epoch, and writing the file.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from table import show

from fineprune.distributed.all_reduce import RankGroup
from fineprune.networks.registry import build_network
from fineprune.runs.files import write_array
from fineprune.runs.history import pack_epoch
from fineprune.training.hardware import describe
from fineprune.training.sample_history import SampleHistory

BATCH, CLASSES = 128, 10


def step_costs(network: str, repeats: int) -> dict[str, Any]:
    """Return the median time of a training step, and of keeping its batch."""
    model = build_network(network, CLASSES, 3)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    x = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, CLASSES, (BATCH,))
    history = SampleHistory(50_000, "cpu")
    steps, kept = [], []
    for _ in range(repeats + 5):
        index = torch.randint(0, 50_000, (BATCH,))
        started = time.perf_counter()
        logits = model(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        before = time.perf_counter()
        history.add(index, losses, logits)
        kept.append(time.perf_counter() - before)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - started - kept[-1])
    step, keep = statistics.median(steps[5:]), statistics.fmean(kept[5:])
    return {
        "network": network,
        "step, ms": step * 1e3,
        "keeping a batch, us": keep * 1e6,
        "share of the step, %": 100 * keep / step,
    }


def epoch_costs(samples: int, folder: Path) -> dict[str, Any]:
    """Return the time of keeping the batches of an epoch, and of its end."""
    history = SampleHistory(samples, "cpu")
    logits = torch.randn(BATCH, CLASSES)
    losses = torch.rand(BATCH)
    batches = torch.randperm(samples).split(BATCH)
    started = time.perf_counter()
    for index in batches:
        history.add(index, losses[: len(index)], logits[: len(index)])
    kept = time.perf_counter()
    stored, predictions = history.merged(RankGroup())
    records = pack_epoch(stored.numpy(), predictions.numpy(), CLASSES)
    packed = time.perf_counter()
    file = folder / f"{samples}.npy"
    write_array(file, records)
    written = time.perf_counter()
    size = file.stat().st_size
    return {
        "samples": samples,
        "keeping, s": kept - started,
        "packing, s": packed - kept,
        "writing, s": written - packed,
        "bytes per sample in memory": (stored.nbytes + predictions.nbytes) / samples,
        "bytes per sample on disk": size / samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--samples", type=int, nargs="*", default=[1_000_000, 10_000_000])
    options = parser.parse_args()
    print(
        vars(describe("cpu", torch.get_num_threads())),
        torch.__version__,
        f"n = {options.repeats}\n",
    )
    show([step_costs(network, options.repeats) for network in ("resnet18", "lenet")])
    with tempfile.TemporaryDirectory() as folder:
        show([epoch_costs(samples, Path(folder)) for samples in options.samples])


if __name__ == "__main__":
    main()
