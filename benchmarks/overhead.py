"""Measures what fine-pruning itself costs, compared with the training steps of LeNet.

    python benchmarks/overhead.py                 # 50,000 and 1.28 million samples
    python benchmarks/overhead.py --large         # also a selection over 100 million samples

LeNet steps with and without recording alternate, so that other work on the machine slows both of
them down equally. The results are medians. Bookkeeping is everything that a plain loop does not do:
the copies in each step, the marks and counts at the end of an epoch, and the selection.
"""

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

import fineprune as fp
from fineprune.networks.lenet import LeNet
from fineprune.pruning.dropping_count import keep_least_counted
from fineprune.training.hardware import describe

BATCH = 128
SCHEDULE = fp.Schedule(200, window=60, start=30, attenuation=2.0, block=3, count=2)

T = TypeVar("T")


def clock(work: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def step_times(pruner: fp.Pruner, repeats: int) -> tuple[float, float]:
    """Return the median seconds of a LeNet step and of recording its losses within such a step."""
    model = LeNet()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    x = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (BATCH,))
    steps: list[float] = []
    means: list[float] = []
    records: list[float] = []
    for repeat in range(repeats + 10):
        index = torch.randint(0, 50_000, (BATCH,))
        started = time.perf_counter()
        losses = F.cross_entropy(model(x), y, reduction="none")
        before = time.perf_counter()
        loss = losses.mean()
        after = time.perf_counter()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - started)
        # Record in a step of its own, so that the CPU caches hold the data of the network.
        losses = F.cross_entropy(model(x), y, reduction="none")
        recording = time.perf_counter()
        loss = pruner.record(index, losses)
        records.append(time.perf_counter() - recording)
        means.append(after - before)
        if repeat < 10:
            for warmup in (steps, means, records):
                warmup.clear()
    return statistics.median(steps), statistics.median(records) - statistics.median(means)


def epoch_times(samples: int, repeats: int = 7) -> tuple[float, float]:
    """Return the median seconds of ending an epoch and of selecting the samples of the next."""
    pruner = fp.Pruner(samples, fp.FinePruning(SCHEDULE, prune=0.25), batch_size=BATCH)
    losses = np.random.default_rng(0).random(samples, dtype=np.float32)
    ends, selections = [], []
    for epoch in range(31, 31 + repeats):
        seconds, _ = clock(partial(pruner.set_epoch, epoch))
        if SCHEDULE.prunes(epoch):
            selections.append(seconds)
        for index in pruner.sampler.order().split(BATCH):
            pruner.record(index, torch.from_numpy(losses[index.numpy()]))
        ends.append(clock(pruner.end_epoch)[0])
    return statistics.median(ends), statistics.median(selections)


def small_sizes(repeats: int) -> list[dict[str, Any]]:
    pruner = fp.Pruner(50_000, fp.FinePruning(SCHEDULE, prune=0.25), batch_size=BATCH)
    step, record = step_times(pruner, repeats)
    rows = []
    for samples in (50_000, 1_280_000):
        end, select = epoch_times(samples)
        steps = -(-samples // BATCH)
        bookkeeping = record * steps + end + select
        rows.append(
            {
                "samples": samples,
                "step_ms": step * 1e3,
                "record_us": record * 1e6,
                "end_epoch_ms": end * 1e3,
                "select_ms": select * 1e3,
                "bookkeeping_ms_per_epoch": bookkeeping * 1e3,
                "share_of_a_lenet_epoch": bookkeeping / (step * steps),
            }
        )
    return rows


def large_selection(samples: int = 100_000_000) -> list[dict[str, Any]]:
    """Return the time and the extra memory of a selection and, for comparison, of a shuffle."""
    tied = np.zeros(samples, dtype=np.uint8)
    spread = np.random.default_rng(0).integers(0, 60, samples, dtype=np.uint8)
    keep = samples // 4 * 3
    rows = []
    for name, counts in (("all counts equal", tied), ("counts 0 to 59", spread)):
        seconds = min(
            clock(partial(keep_least_counted, counts, keep, np.random.default_rng(1)))[0]
            for _ in range(3)
        )
        tracemalloc.start()
        kept = keep_least_counted(counts, keep, np.random.default_rng(1))
        peak = tracemalloc.get_traced_memory()[1] - kept.nbytes
        tracemalloc.stop()
        rows.append({"selection": name, "seconds": seconds, "megabytes_beyond": peak / 1e6})
        del kept
    seconds, order = clock(lambda: torch.randperm(samples))
    rows.append(
        {
            "selection": "for comparison: a shuffle",
            "seconds": seconds,
            "megabytes_beyond": order.nbytes / 1e6,
        }
    )
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    keys = list(rows[0])
    print("| " + " | ".join(key.replace("_", " ") for key in keys) + " |")
    print("|" + "---|" * len(keys))
    for row in rows:
        cells = [
            f"{v:,.4g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v
            for v in row.values()
        ]
        print("| " + " | ".join(cells) + " |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="also 100 million samples")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = small_sizes(options.repeats)
    large = large_selection() if options.large else []
    about = {**describe("cpu", torch.get_num_threads()), "torch": torch.__version__}
    if options.json:
        print(json.dumps({"about": about, "rows": rows, "large": large}))
        return
    print(about, f"n = {options.repeats} steps\n")
    show(rows)
    if large:
        show(large)


if __name__ == "__main__":
    main()
