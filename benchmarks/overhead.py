"""Measures what skipping samples itself costs, compared with LeNet's training steps and InfoBatch.

    python benchmarks/overhead.py                 # 50,000 and 1.28 million samples
    python benchmarks/overhead.py --large         # also a selection over 100 million samples

LeNet steps with and without recording alternate, so that other work on the machine slows both of
them down equally; so do the updates of InfoBatch. The results are medians. Bookkeeping is
everything that a plain loop does not do: the copies in each step, the marks and counts at the end
of an epoch, and the selection.
"""

import argparse
import collections
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from table import show

import fineprune as fp
from fineprune.networks.lenet import LeNet
from fineprune.pruning.dropping_count import keep_least_counted
from fineprune.training.hardware import describe

BATCH = 128
# As many batches as ``record`` counts at a time.
GROUP = 64
# For the time of ``record``, which does not depend on it: more samples than the benchmark records.
MANY_SAMPLES = 4_000_000
# Number of epochs over which the work between two epochs is timed.
EPOCHS = 7

T = TypeVar("T")

# Takes the indices and the losses of a batch, both of shape (B,), and returns the mean loss.
Reduce = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def clock(work: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


class InfoBatchBookkeeping:
    """What InfoBatch does per batch and per epoch, in the way its authors published it (ICLR 2024).

    Each batch gathers its weights, scatters its losses, and multiplies the losses in place. Between
    two epochs, the indices become a Python list, which is shuffled and then read one by one.

    Args:
        samples: Number of samples in the data set.
        ratio: The share of the well-learned samples that is skipped.
    """

    def __init__(self, samples: int, ratio: float = 0.5) -> None:
        self.scores = torch.full((samples,), 3.0)
        self.weights = torch.ones(samples)
        self.keep = 1 - ratio
        self.remaining: Iterator[int] = iter(())

    def update(self, index: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """Store the losses of a batch, and return the mean of the weighted losses."""
        device = losses.device
        weights = self.weights[index].to(device)
        values = losses.detach().clone()
        self.scores[index.cpu().long()] = values.cpu()
        losses.mul_(weights)
        return losses.mean()

    def begin_epoch(self) -> None:
        """Choose and shuffle the samples of the next epoch."""
        learned = (self.scores < self.scores.mean()).numpy()
        candidates = np.where(learned)[0]
        kept = np.where(~learned)[0].tolist()
        chosen = np.random.choice(candidates, int(self.keep * len(candidates)), replace=False)  # noqa: NPY002
        self.weights[:] = 1
        self.weights[chosen] = 1 / self.keep
        kept.extend(chosen)
        np.random.shuffle(kept)  # noqa: NPY002
        self.remaining = iter(kept)

    def __iter__(self) -> "InfoBatchBookkeeping":
        return self

    def __next__(self) -> int:
        return next(self.remaining)


def policies(epochs: int) -> dict[str, fp.Policy]:
    """Return the measured policies, each of which skips samples in the second half."""
    half = epochs // 2
    schedule = fp.Schedule(epochs, window=epochs, start=half)
    rates = [1.0] * half + [0.1] * (epochs - half)
    return {
        "fine-pruning": fp.FinePruning(schedule, prune=0.25),
        "adaptive": fp.Adaptive(epochs, save=0.35, rates=rates),
    }


def step_times(pruners: Sequence[fp.Pruner], repeats: int) -> list[float]:
    """Return the median seconds of a LeNet step, of each pruner's record and of InfoBatch's update.

    Records and updates include the mean of the losses, which a plain loop needs too; the last value
    is the median of this mean.
    """
    model = LeNet()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    x = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (BATCH,))
    infobatch = InfoBatchBookkeeping(50_000)
    reduce: list[Reduce] = [
        *(pruner.record for pruner in pruners),
        infobatch.update,
        lambda index, losses: losses.mean(),
    ]
    times: list[list[float]] = [[] for _ in range(1 + len(reduce))]
    for _ in range(repeats + 10):
        index = torch.randint(0, 50_000, (BATCH,))
        for number, work in enumerate(reduce):
            # Each is timed in a step of its own, so that the caches hold the network's data.
            started = time.perf_counter()
            losses = F.cross_entropy(model(x), y, reduction="none")
            before = time.perf_counter()
            loss = work(index, losses)
            times[1 + number].append(time.perf_counter() - before)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        times[0].append(time.perf_counter() - started)
    return [typical(seconds[10:]) for seconds in times]


def typical(seconds: Sequence[float]) -> float:
    """Return the median of the means of consecutive groups.

    ``record`` counts many batches at a time, so a median of single calls would leave this out.
    """
    groups = [seconds[first : first + GROUP] for first in range(0, len(seconds), GROUP)]
    return statistics.median(statistics.fmean(group) for group in groups if len(group) == GROUP)


def warm_times(pruners: Sequence[fp.Pruner], repeats: int) -> list[float]:
    """Return the median seconds of each pruner's record and of InfoBatch's update in a short loop.

    In such a loop, the caches hold what these functions need; the mean of the losses is subtracted.
    """
    infobatch = InfoBatchBookkeeping(50_000)
    index = torch.randint(0, 50_000, (BATCH,))
    losses = torch.rand(BATCH, requires_grad=True)
    work: list[Reduce] = [
        *(pruner.record for pruner in pruners),
        infobatch.update,
        lambda index, values: values.mean(),
    ]
    times: list[list[float]] = [[] for _ in work]
    for _ in range(repeats):
        for seconds, function in zip(times, work, strict=True):
            values = [losses.mul(1.0) for _ in range(20)]  # InfoBatch changes them in place.
            started = time.perf_counter()
            for value in values:
                function(index, value)
            seconds.append((time.perf_counter() - started) / len(values))
    *medians, mean = [typical(seconds) for seconds in times]
    return [median - mean for median in medians]


def epoch_times(samples: int, policy: fp.Policy, repeats: int) -> list[float]:
    """Return the median seconds of a selection, of reading the order, and of ending an epoch."""
    pruner = fp.Pruner(samples, policy, batch_size=BATCH)
    losses = torch.from_numpy(np.random.default_rng(0).random(samples, dtype=np.float32))
    times = []
    for epoch in range(policy.epochs - repeats, policy.epochs):
        select = clock(partial(pruner.set_epoch, epoch))[0]
        read = clock(partial(read_all, pruner.sampler))[0]
        for index in pruner.sampler.order().split(BATCH):
            pruner.record(index, losses[index])
        times.append((select, read, clock(pruner.end_epoch)[0]))
    return [statistics.median(column) for column in zip(*times, strict=True)]


def infobatch_epoch_times(samples: int, repeats: int) -> list[float]:
    """Return the median seconds in which InfoBatch selects and in which its order is read."""
    infobatch = InfoBatchBookkeeping(samples)
    times = []
    for _ in range(repeats):
        infobatch.scores.uniform_()
        select = clock(infobatch.begin_epoch)[0]
        times.append((select, clock(partial(read_all, infobatch))[0]))
    return [statistics.median(column) for column in zip(*times, strict=True)]


def read_all(indices: Iterable[int]) -> None:
    """Read indices one by one without keeping them."""
    collections.deque(indices, maxlen=0)


def small_sizes(repeats: int) -> list[dict[str, Any]]:
    """Return one row per method and number of samples."""
    made = policies(2 * EPOCHS)
    pruners = [fp.Pruner(MANY_SAMPLES, policy, batch_size=BATCH) for policy in made.values()]
    step, *records, update, mean = step_times(pruners, repeats)
    warm = dict(zip([*made, "infobatch"], warm_times(pruners, repeats), strict=True))
    rows = []
    for samples in (50_000, 1_280_000):
        select, read = infobatch_epoch_times(samples, EPOCHS)
        measured = {"infobatch": (update - mean, select, read, 0.0)}
        for (name, policy), record in zip(made.items(), records, strict=True):
            select, read, end = epoch_times(samples, policy, EPOCHS)
            measured[name] = (record - mean, select, read, end)
        peer_epoch = sum(measured["infobatch"][1:])
        for name, (record, select, read, end) in measured.items():
            steps = -(-samples // BATCH)
            bookkeeping = record * steps + end + select
            rows.append(
                {
                    "samples": samples,
                    "method": name,
                    "step_ms": step * 1e3,
                    "record_us": record * 1e6,
                    "record_warm_us": warm[name] * 1e6,
                    "record_warm_to_infobatch": warm[name] / warm["infobatch"],
                    "end_epoch_ms": end * 1e3,
                    "select_ms": select * 1e3,
                    "read_order_ms": read * 1e3,
                    "epoch_to_infobatch": (end + select + read) / peer_epoch,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="also 100 million samples")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = small_sizes(options.repeats)
    large = large_selection() if options.large else []
    about = {**vars(describe("cpu", torch.get_num_threads())), "torch": torch.__version__}
    if options.json:
        print(json.dumps({"about": about, "rows": rows, "large": large}))
        return
    print(about, f"n = {options.repeats} steps\n")
    show(rows, digits=4)
    if large:
        show(large, digits=4)


if __name__ == "__main__":
    main()
