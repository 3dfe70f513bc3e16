"""Measures what it costs to watch labels: the time of a record, and the memory of the evidence.

    python benchmarks/label_overhead.py

The first table is for training steps of LeNet and of a thin ResNet-18 with 128 images. ``record``
stands at its place in the step, after which the caches hold the data of the network. Its time is a
mean that includes adding the buffer to the sums, whenever it is full; the step is a median, of the
same steps without ``record``.

The second table is for the evidence on many samples: its bytes, the growth of the process while all
samples are recorded once and ranked (peak resident memory, read from /proc, so on Linux only), and
the time of recording a batch and of ranking. Each row is measured in a process of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from table import show

import fineprune as fp
from fineprune.networks.registry import build_network
from fineprune.training.hardware import describe

BATCH, CLASSES = 128, 10


def peak_bytes(reset: bool = False) -> int:
    """Return the largest resident memory of this process since the last reset, and reset it."""
    status = Path("/proc/self/status").read_text()
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(peak) * 1024


def step_costs(network: str, steps: int) -> dict[str, Any]:
    """Return the time of a training step, and of recording its batch."""
    model = build_network(network, CLASSES, 3)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    x = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (50_000,))
    watch = fp.LabelWatch(len(labels), CLASSES)
    trained, recorded = [], []
    for step in range(steps + 5):
        index = torch.randint(0, len(labels), (BATCH,))
        y = labels[index]
        started = time.perf_counter()
        logits = model(x)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = time.perf_counter()
        watch.record(index, logits, y)
        if step >= 5:
            recorded.append(time.perf_counter() - before)
            trained.append(before - started)
    step_time, record_time = statistics.median(trained), statistics.fmean(recorded)
    return {
        "network": network,
        "step, ms": step_time * 1e3,
        "record, us": record_time * 1e6,
        "its median, us": statistics.median(recorded) * 1e6,
        "share of the step, %": 100 * record_time / step_time,
    }


def evidence_costs(samples: int, classes: int) -> dict[str, Any]:
    """Return the memory and the time of the evidence on many samples, in this process."""
    labels = torch.randint(0, classes, (samples,))
    batches = torch.randperm(samples).split(BATCH)
    logits = torch.randn(BATCH, classes)
    few = fp.LabelWatch(BATCH, classes)
    for _ in range(100):  # The first call of an operation loads its code.
        few.record(torch.arange(BATCH), logits, labels[:BATCH])
    few.suspects()
    peak_bytes(reset=True)
    before = peak_bytes()
    watch = fp.LabelWatch(samples, classes)
    started = time.perf_counter()
    for index in batches:
        watch.record(index, logits[: len(index)], labels[index])
    recorded = time.perf_counter()
    after_recording = peak_bytes()
    watch.suspects()
    ranked = time.perf_counter()
    after_ranking = peak_bytes()
    sums = watch.state_dict()["evidence"]["sums"].values()
    return {
        "samples": samples,
        "classes": classes,
        "evidence, MB": sum(tensor.nbytes for tensor in sums) / 1e6,
        "growth while recording, MB": (after_recording - before) / 1e6,
        "while ranking, MB": (after_ranking - before) / 1e6,
        "record, us per batch": (recorded - started) / len(batches) * 1e6,
        "ranking, s": ranked - recorded,
    }


def in_own_process(samples: int, classes: int, threads: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--row", str(samples), str(classes)]
    done = subprocess.run(
        [*command, "--threads", str(threads)], check=True, capture_output=True, text=True
    )
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--classes", type=int, nargs="*", default=[10, 64, 1000])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--row", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.row:
        print(json.dumps(evidence_costs(*options.row)))
        return
    print(describe("cpu", options.threads), torch.__version__, f"{options.steps} steps\n")
    show([step_costs("lenet", options.steps), step_costs("resnet18", options.steps // 10)])
    show([in_own_process(options.samples, number, options.threads) for number in options.classes])


if __name__ == "__main__":
    main()
