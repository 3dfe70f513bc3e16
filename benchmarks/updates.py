"""What an update with parameter servers costs, and whether loading overlaps computing.

    python benchmarks/updates.py
    python benchmarks/updates.py --against ../before    # and another checkout, in turns

Each measurement is a training with asynchronous workers:

- **LeNet**: batches of 128 samples in memory, in one process, with one worker and one server, and
  with two workers and one server. The time per update, and the processor time of the driver for it.
  Two asynchronous workers are worth it if their time per update is below that of one process.
- **Idle**: four workers compute nothing. The number of updates per second is what the driver
  sustains on this machine, whose cores it shares with the workers and the server.
- **Large**: 25 million parameters and steps that compute nothing, with one worker and one server,
  and with two of each. The time per update is that of 100 MB each way.
- **Loading**: loading a batch takes 160 ms and a step takes 160 ms, eight times per epoch. Both
  sleep, so one core is enough.
- **Start**: from the call until all workers have begun, in the LeNet training.

With ``--against``, the checkouts take turns within each round, so that other load on the machine
affects both. The other one may be the first edition, whose servers had an engine of their own.
Medians over the rounds are compared. The machine should be idle; the load is printed.
"""

import argparse
import contextlib
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fineprune.distributed.strategy import Strategy
from fineprune.networks.lenet import LeNet
from fineprune.training.hardware import describe

SAMPLES = 128
SLEEP, BATCHES = 0.16, 8
# The epochs that are measured, after one that warms up.
EPOCHS = 3


class LeNetReplica:
    """LeNet with CIFAR-10's shapes, on random images."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = LeNet()
        self.images = torch.randn(2048, 3, 32, 32)
        self.labels = torch.randint(10, (2048,))

    def load(self, key: Any, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        indices = indices % len(self.images)
        return self.images[indices], self.labels[indices]

    def step(self, batch: Any, weights: torch.Tensor | None) -> torch.Tensor:
        losses = nn.functional.cross_entropy(self.model(batch[0]), batch[1], reduction="none")
        losses.mean().backward()
        return losses.detach()


class Nothing:
    """A replica whose steps compute nothing."""

    def __init__(self, rank: int) -> None:
        self.model: nn.Module = nn.Linear(16, 16)

    def load(self, key: Any, indices: torch.Tensor) -> torch.Tensor:
        return indices

    def step(self, batch: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(len(batch))


class Large(Nothing):
    """The same with many parameters."""

    def __init__(self, elements: int, rank: int) -> None:
        self.model = nn.Linear(elements, 1, bias=False)


class Sleeping(Nothing):
    """A replica that sleeps while it loads and while it computes."""

    def load(self, key: Any, indices: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        return indices

    def step(self, batch: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        time.sleep(SLEEP)
        return torch.zeros(len(batch))


def make_optimizer(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@contextlib.contextmanager
def serving(strategy: Strategy, model: nn.Module, build: Callable[[int], Any]) -> Iterator[Any]:
    """Start a training on servers, with this edition or with the first one."""
    try:
        from fineprune.distributed.parameter_servers.start import parameter_servers
    except ModuleNotFoundError:
        package = "fineprune.distributed.parameter_servers"
        names = ("coordinator", "placement", "processes")
        made: Any = {name: __import__(f"{package}.{name}", fromlist=["_"]) for name in names}
        places = made["placement"].Places(strategy.groups, servers=strategy.servers)
        with tempfile.TemporaryDirectory() as folder, made["processes"].cluster(places) as cluster:
            parts = cluster, strategy, model, build, make_optimizer, Path(folder) / "s"
            with contextlib.closing(made["coordinator"].Coordinator(*parts)) as training:
                yield training
    else:
        with parameter_servers(strategy, model, build, make_optimizer) as training:
            yield training


def trained(
    workers: int, servers: int, model: nn.Module, build: Callable[[int], Any], updates: int
) -> dict[str, float]:
    """Return the medians over epochs: seconds and the driver's processor seconds per update."""
    strategy = Strategy("async", workers=workers, servers=servers, snapshot_every=0)
    batches = list(torch.arange(updates * SAMPLES).split(SAMPLES))
    lines = []
    began = time.perf_counter()
    with serving(strategy, model, build) as training:
        training.wait_for_workers()
        start = time.perf_counter() - began
        for epoch in range(EPOCHS + 1):
            began, own = time.perf_counter(), processor_seconds()
            result = training.run_epoch(epoch, batches, lambda applied: 0.001)
            seconds = time.perf_counter() - began - getattr(result, "snapshot_seconds", 0.0)
            lines.append((seconds / updates, (processor_seconds() - own) / updates))
    each, own_each = zip(*lines[1:], strict=True)  # the first epoch warms up
    return {
        "seconds": statistics.median(each),
        "driver": statistics.median(own_each),
        "start": start,
    }


def trained_alone(updates: int) -> float:
    """Return the median over epochs of the seconds per update of LeNet in this process."""
    replica = LeNetReplica(0)
    optimizer = make_optimizer(list(replica.model.parameters()))
    seconds = []
    for _ in range(EPOCHS + 1):
        began = time.perf_counter()
        for batch in torch.arange(updates * SAMPLES).split(SAMPLES):
            optimizer.zero_grad()
            replica.step(replica.load(None, batch), None)
            optimizer.step()
        seconds.append((time.perf_counter() - began) / updates)
    return statistics.median(seconds[1:])


def processor_seconds() -> float:
    """Return the processor time of this process, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(updates: int, elements: int) -> dict[str, float]:
    """Measure this checkout."""
    small = nn.Linear(16, 16)
    large = nn.Linear(elements, 1, bias=False)
    build = functools.partial(Large, elements)
    few = max(8, updates // 5)
    alone = trained_alone(updates)
    lenet = trained(1, 1, LeNet(), LeNetReplica, updates)
    pair = trained(2, 1, LeNet(), LeNetReplica, updates)
    idle = trained(4, 1, small, Nothing, 4 * updates)
    one = trained(1, 1, large, build, few)
    two = trained(2, 2, large, build, few)
    loading = trained(1, 1, small, Sleeping, BATCHES)
    return {
        "LeNet in one process, ms per update": 1e3 * alone,
        "LeNet 1+1, ms per update": 1e3 * lenet["seconds"],
        "LeNet 2+1, ms per update": 1e3 * pair["seconds"],
        "LeNet 1+1, driver's processor ms per update": 1e3 * lenet["driver"],
        "four idle workers, updates per second": 1 / idle["seconds"],
        "four idle workers, driver's processor ms per update": 1e3 * idle["driver"],
        "large 1+1, ms per update": 1e3 * one["seconds"],
        "large 2+2, ms per update": 1e3 * two["seconds"],
        "large, driver's processor ms per update": 1e3 * one["driver"],
        "an epoch of 1.3 s of loading and 1.3 s of computing, s": BATCHES * loading["seconds"],
        "start, s": lenet["start"],
    }


def measured(checkout: Path, updates: int, elements: int) -> dict[str, float]:
    """Measure a checkout in a process of its own."""
    done = subprocess.run(
        [
            *(sys.executable, __file__, "--alone"),
            *("--updates", str(updates), "--elements", str(elements)),
        ],
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=200, help="per epoch of LeNet")
    parser.add_argument("--elements", type=int, default=25_000_000, help="of the large model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of the project")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.alone:
        print(json.dumps(measure(options.updates, options.elements)))
        return
    checkouts = {"this checkout": Path(__file__).resolve().parents[1]}
    if options.against is not None:
        checkouts = {str(options.against): options.against.resolve()} | checkouts
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    loads = []
    for _ in range(options.rounds):
        for name, checkout in checkouts.items():
            loads.append(os.getloadavg()[0])
            rounds[name].append(measured(checkout, options.updates, options.elements))
    about = asdict(describe("cpu", 1)) | {"torch": torch.__version__, "loads before": loads}
    if options.json:
        print(json.dumps({"about": about, "rounds": rounds}))
        return
    print(about, f"n = {options.rounds} rounds\n")
    print("| | " + " | ".join(rounds) + " |")
    print("|---|" + "---:|" * len(rounds))
    for what in next(iter(rounds.values()))[0]:
        cells = []
        for lines in rounds.values():
            values = [line[what] for line in lines]
            cells.append(
                f"{statistics.median(values):,.2f} ({min(values):,.2f}-{max(values):,.2f})"
            )
        print(f"| {what} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
