"""Measures ShardedPruner at up to a billion samples, and what its ranks send each other.

    python benchmarks/sizes.py                  # each size in a process of its own, three times
    unshare -rn sh -c 'ip link set lo up; python benchmarks/sizes.py --only bytes'

The sizes are 1, 10 and 100 million samples in one process, and one rank of eight that share a
billion. The other seven ranks of the latter do not run: the histogram of each of them is drawn from
the distribution of its counts, and it answers in the exchange with the numbers that follow from
this histogram. Counts are random from 0 to 59, and three quarters of the samples are kept.

The bytes are those that several processes send over the loopback interface in one epoch. Only in a
network namespace of their own are they not mixed up with those of other programs.
"""

import argparse
import collections
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from table import show
from torch.multiprocessing.spawn import spawn

import fineprune as fp
from fineprune.pruning.dropping_count import threshold_of
from fineprune.pruning.epoch_cycle import EpochCycle
from fineprune.pruning.replicas import Number, Replicas
from fineprune.pruning.sharded.fine_pruning import OwnedFinePruning
from fineprune.pruning.sharded.sampler import ShardedSampler
from fineprune.pruning.sharded.selection import pruned_share
from fineprune.pruning.sharded.share import Share, owned_samples
from fineprune.training.hardware import describe

# Number of samples of all ranks, and number of ranks.
SIZES = ((1_000_000, 1), (10_000_000, 1), (100_000_000, 1), (1_000_000_000, 8))
COUNTS = 60  # Counts are from 0 to 59.
KEPT = 0.75
ROUNDS = 15


# --- Time and memory ----------------------------------------------------------------------------


class FirstOfMany(Replicas):
    """Rank 0 of several, of which the others are their histograms of counts only.

    Args:
        samples: Number of samples N of all ranks together.
        ranks: Number of ranks.
        num_kept: Number of samples that all ranks together keep.
    """

    def __init__(self, samples: int, ranks: int, num_kept: int) -> None:
        super().__init__()
        self.size = ranks
        self._num_kept = num_kept
        self._owned = [owned_samples(samples, ranks, rank) for rank in range(1, ranks)]
        rng = np.random.default_rng(1)
        shares = np.full(COUNTS, 1 / COUNTS)
        self._others = [rng.multinomial(len(owned), shares) for owned in self._owned]
        self._threshold: int | None = None

    def maximum(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        return values  # This rank has the largest count too.

    def sum(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        total: Any = values + np.sum(self._others, axis=0) if self._others else values
        self._threshold = threshold_of(total, self._num_kept).value
        return total  # type: ignore[no-any-return]

    def gather(self, values: npt.NDArray[Number]) -> list[npt.NDArray[Number]]:
        if self._threshold is not None:  # The numbers of samples below and at the threshold.
            value, self._threshold = self._threshold, None
            others: list[Any] = [np.array([h[:value].sum(), h[value]]) for h in self._others]
        else:  # The samples that the other ranks hand over, more than they would.
            number = 10 * math.isqrt(self._num_kept // self.size)
            others = [np.arange(owned.start, owned.start + number) for owned in self._owned]
        return [values, *others]


def peak_bytes(reset: bool = False) -> int:
    """Return the largest resident memory of this process since the last reset, and reset it."""
    status = Path("/proc/self/status").read_text()
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(peak) * 1024


def clock(work: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Return the median seconds of some work, and the median seconds of CPU time."""
    walls, cpus = [], []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus)


def measure(samples: int, ranks: int) -> dict[str, Any]:
    """Return the time and the memory of a selection and of reading a whole epoch of it."""
    num_kept = int(samples * KEPT) // ranks * ranks
    replicas = FirstOfMany(samples, ranks, num_kept)
    own = len(owned_samples(samples, ranks, 0))
    cycle: EpochCycle[Share] = EpochCycle()
    sampler = ShardedSampler(cycle, lambda epoch: None, ranks)
    # The first call of a function loads code that is no part of its working memory.
    warm_up(cycle, sampler)
    peak_bytes(reset=True)
    before = peak_bytes()
    held = counted(own)
    rounds = max(1, min(ROUNDS, 20_000_000 // own))  # Small sizes take too little time for one.
    select = partial(pruned_share, 0, samples, num_kept, held.owned_counts, replicas, seed=0)
    peak_bytes(reset=True)
    selecting, selecting_cpu = clock(select, rounds)
    selected = peak_bytes()
    share = select()
    follow(cycle, sampler, share)
    peak_bytes(reset=True)
    reading, reading_cpu = clock(lambda: collections.deque(sampler, maxlen=0), rounds)
    read = peak_bytes()
    assert share.kept is not None
    assert share.number * ranks == num_kept
    return {
        "samples": samples,
        "ranks": ranks,
        "own samples": own,
        "selection, s": selecting,
        "selection, CPU s": selecting_cpu,
        "epoch, s": reading,
        "epoch, CPU s": reading_cpu,
        "counts and marks, bytes": held._counts.nbytes + held._marks.nbytes,
        "kept indices, bytes": share.kept.nbytes + share.received.nbytes,
        "peak growth, selection, bytes": selected - before,
        "peak growth, epoch, bytes": read - before,
        "handed over or received": abs(len(share.kept) - share.number),
    }


def follow(cycle: EpochCycle[Share], sampler: ShardedSampler, share: Share) -> None:
    cycle.follow(share, share.number)
    cycle.drive(sampler)  # Several readings of one epoch are no mistake here.
    sampler.follow(share)


def warm_up(cycle: EpochCycle[Share], sampler: ShardedSampler) -> None:
    counts = counted(100_000).owned_counts
    share = pruned_share(0, 100_000, 75_000, counts, FirstOfMany(100_000, 1, 75_000), 0)
    follow(cycle, sampler, share)
    collections.deque(sampler, maxlen=0)


def counted(own: int) -> OwnedFinePruning:
    """Return what a rank holds of its samples, with random counts, all of it in memory."""
    rng = np.random.default_rng(0)
    policy = fp.FinePruning(fp.Schedule(COUNTS, COUNTS, 1), prune=1 - KEPT)
    held = OwnedFinePruning(policy, range(own))
    held.bind(own)
    for begin in range(0, own, 1 << 20):
        piece = held.owned_counts[begin : begin + (1 << 20)]
        piece[:] = rng.integers(0, COUNTS, len(piece), dtype=np.uint8)
    held._marks[:] = False
    return held


def measured_apart(samples: int, ranks: int, repeats: int) -> list[dict[str, Any]]:
    """Measure a size in processes of their own, one after the other."""
    command = [sys.executable, __file__, "--child", str(samples), str(ranks)]
    return [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(repeats)
    ]


def size_rows(measured: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row of medians per size, compared with the first size."""
    rows: list[dict[str, Any]] = []
    for runs in measured:
        median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        own = median["own samples"]
        row = {
            "samples": int(median["samples"]),
            "of ranks": int(median["ranks"]),
            "own samples": int(own),
            **{name: value for name, value in median.items() if name.endswith(" s")},
        }
        for name in ("selection", "epoch"):
            first = rows[0] if rows else row
            per_sample = first[f"{name}, CPU s"] / first["own samples"]
            row[f"{name}, CPU time to linear"] = row[f"{name}, CPU s"] / own / per_sample
        kept = median["kept indices, bytes"]
        row["kept indices, MB"] = kept / 1e6
        row["counts and marks, bytes per sample"] = median["counts and marks, bytes"] / own
        for name in ("selection", "epoch"):
            beyond = median[f"peak growth, {name}, bytes"] - kept
            row[f"peak of the {name} beyond kept, bytes per sample"] = beyond / own
        rows.append(row)
    return rows


# --- Bytes --------------------------------------------------------------------------------------


def sent_over_loopback() -> int:
    """Return the number of bytes that the loopback interface of this namespace has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (loopback,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.partition(":")[2].split()[8])


def losses_of(epoch: int, index: torch.Tensor) -> torch.Tensor:
    """Return made-up losses, which are new in each epoch."""
    return ((index * 2654435761 + epoch * 40503) % 9973).float()


def gather_at_every_step(index: torch.Tensor, losses: torch.Tensor) -> None:
    """Gather the indices (int64) and the losses (float32) of a batch from all ranks."""
    for values in (index, losses):
        dist.all_gather([torch.empty_like(values) for _ in range(dist.get_world_size())], values)


def send(rank: int, ranks: int, samples: int, batch: int, folder: str) -> None:
    """Run one epoch that skips samples in three ways, and write what rank 0 has seen sent."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    schedule = fp.Schedule(3, window=3, start=2)  # The second epoch skips samples.
    policy = fp.FinePruning(schedule, prune=int(samples * (1 - KEPT)))
    sent = {}
    for name, make in (
        ("ShardedPruner", fp.ShardedPruner),
        ("Pruner", fp.Pruner),
        ("a gather at every step", None),
    ):
        pruner: Any = (make or fp.Pruner)(samples, policy, batch_size=batch)
        for epoch in (0, 1):
            dist.barrier()
            before = sent_over_loopback()
            pruner.set_epoch(epoch)
            trained = torch.tensor(list(pruner.sampler)).split(batch)
            for index in trained:
                losses = losses_of(epoch, index)
                if make is None:
                    gather_at_every_step(index, losses)
                else:
                    pruner.record(index, losses)
            if make is not None:
                pruner.end_epoch()
            dist.barrier()
            sent[name] = sent_over_loopback() - before
    if rank == 0:
        kept = sum(map(len, trained)) * ranks
        Path(folder, "sent.json").write_text(json.dumps({"kept": kept, "sent": sent}))
    dist.barrier()
    dist.destroy_process_group()


def byte_rows(ranks: int, samples: int, batch: int) -> list[dict[str, Any]]:
    """Return one row for each way to exchange what an epoch learns."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(send, args=(ranks, samples, batch, folder), nprocs=ranks)
        result = json.loads(Path(folder, "sent.json").read_text())
    kept = result["kept"]
    batches = kept // ranks // batch
    # What all ranks together send in rings: an all-reduce takes 2 (R - 1) times its bytes, a gather
    # R (R - 1) times those of one rank. What the ranks hand over is not included.
    arithmetic = {
        "ShardedPruner": 2 * (ranks - 1) * 24 * batches,
        "Pruner": 2 * (ranks - 1) * (24 * batches + samples),
        "a gather at every step": 12 * kept * (ranks - 1),
    }
    return [
        {
            "exchange": name,
            "samples": samples,
            "ranks": ranks,
            "batch": batch,
            "expected, bytes": arithmetic[name],
            "sent, bytes": sent,
            "sent per kept sample, bytes": sent / kept,
        }
        for name, sent in result["sent"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("sizes", "bytes"))
    parser.add_argument("--sizes", type=int, nargs="*", help="numbers of samples of one process")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8, help="number of processes that send")
    parser.add_argument("--samples", type=int, default=1_000_000, help="their number of samples")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child)))
        return
    result: dict[str, Any] = {
        "about": {
            **vars(describe("cpu", 1)),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "numpy": np.__version__,
            "repeats": options.repeats,
        }
    }
    if options.only != "bytes":
        sizes = SIZES if options.sizes is None else [(number, 1) for number in options.sizes]
        runs = [measured_apart(samples, ranks, options.repeats) for samples, ranks in sizes]
        result |= {"runs": runs, "sizes": size_rows(runs)}
    if options.only != "sizes":
        result["bytes"] = byte_rows(options.ranks, options.samples, options.batch)
    if options.json:
        print(json.dumps(result))
        return
    print(result["about"], "\n")
    for part in ("sizes", "bytes"):
        if part in result:
            show(result[part])


if __name__ == "__main__":
    main()
