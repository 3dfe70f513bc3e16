"""How well the planner predicts: against the second paper's table, and against trainings here.

    python benchmarks/planner.py --paper
    python benchmarks/planner.py --runs results.json    # continues where it was stopped

``--paper`` calibrates the planner on three rows of [D] Tables 1 and 2 (one node, two workers with
one server, four workers with one server) and predicts the others. The paper gives no spread of its
steps, so they are taken to be equal. Then two numbers are unknown: what an exchange adds to a step,
which follows from the row with two workers, and how long a server is busy with a gradient, which
follows from the row with four workers. The last line is the largest error, in percent.

``--runs`` trains fourteen configurations of real workers and servers on this machine. Steps sleep
for times drawn from a log-normal distribution, and servers sleep in their optimizer, so that a few
cores suffice. The planner knows these times; everything else about an exchange comes from one
worker with one server. The links are those of the loopback interface, whose bandwidth is not the
limit. Each result is added to the file; configurations that are in it are not trained again.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fineprune.experiments.cluster_costs import ClusterShape, Costs
from fineprune.experiments.cluster_simulation import simulate
from fineprune.experiments.configurations import Configuration, configuration

# Configuration, nodes and images per second of [D] Tables 1 and 2. A worker is a node of 4 GPUs.
BATCH = 128
CALIBRATION = {"one": 124.18, "async 2+1": 195.60, "async 4+1": 292.22}
PAPER = (
    ("one", 1, 124.18),
    ("async 2+1", 2, 195.60),
    ("async 4+1", 4, 292.22),
    ("async 4+3", 4, 374.73),
    ("async 4+3", 4, 383.09),
    ("async 4+3 dedicated", 7, 396.62),
    ("async 8+7", 8, 809.10),
)


def paper_costs() -> Costs:
    """Return the costs that the three rows of the calibration determine."""
    step = BATCH / CALIBRATION["one"]
    two = 2 * BATCH / CALIBRATION["async 2+1"]  # how long a step of each worker takes
    busy = BATCH / CALIBRATION["async 4+1"]  # how long a server takes for each gradient
    # With two workers, the server is idle at times; with four, it never is.
    if not (2 * busy < two < 4 * busy):
        sys.exit("the rows of the calibration do not determine the costs")
    return Costs((step,), BATCH, 0.0, overhead=two - step, serve=busy, overlaps=True)


def paper() -> float:
    """Print the prediction for each row; return the largest error of those not calibrated on."""
    costs, network = paper_costs(), ClusterShape(gigabits=0, latency=0)
    print(
        f"calibrated: step {costs.step:.4f} s, exchange {costs.overhead:.4f} s, server "
        f"{costs.serve:.4f} s per gradient\n"
    )
    print("| configuration | paper, images/s | predicted | error, % | efficiency | limit |")
    print("|---|---:|---:|---:|---:|---|")
    largest = 0.0
    for text, nodes, measured in PAPER:
        result = simulate(costs, network, configuration(text))
        error = 100 * (result.throughput / measured - 1)
        efficiency = result.throughput / CALIBRATION["one"] / nodes
        known = text in CALIBRATION
        print(
            f"| {text}{' (calibration)' if known else ''} | {measured:.2f} | "
            f"{result.throughput:.2f} | {error:+.2f} | {efficiency:.2f} | {result.limit} |"
        )
        if not known:
            largest = max(largest, abs(error))
    return largest


# The steps of the trainings here: their mean in seconds, and the standard deviation of their
# logarithms; and the seconds of a server with all parameters per update.
STEP, SPREAD, APPLY = 0.08, 0.2, 0.02
ELEMENTS = 250_000
EPOCH_STEPS = 40  # Each worker repeats so many durations, twice in the epoch that is measured.
ALONE = "async 1+1"
RUNS = (
    *("async 2+1", "async 3+1", "async 4+1", "async 2+2", "async 3+2", "async 4+2"),
    *("sync 2+1", "sync 3+1", "sync 4+1", "sync 3+2", "sync 4+2", "sync 4+1 backup=1"),
    *("mixed 4+1 group=2", "mixed 4+2 group=2"),
)


def durations(rank: int) -> Any:
    """Return the durations of a worker's steps, in seconds, shape (EPOCH_STEPS,)."""
    drawn = np.exp(SPREAD * np.random.default_rng([7, rank]).standard_normal(EPOCH_STEPS))
    return STEP * drawn / drawn.mean()


class Sleeping:
    """A replica whose steps sleep."""

    def __init__(self, rank: int) -> None:
        self.model: nn.Module = nn.Linear(ELEMENTS, 1, bias=False)
        self.seconds = durations(rank)
        self.steps = 0

    def load(self, key: Any, indices: torch.Tensor) -> torch.Tensor:
        return indices

    def step(self, batch: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        time.sleep(self.seconds[self.steps % len(self.seconds)])
        self.steps += 1
        self.model(torch.zeros(1, ELEMENTS)).sum().backward()
        return torch.zeros(len(batch))


class SleepingOptimizer(torch.optim.SGD):
    """A server's optimizer that takes as long as its part of the parameters is large."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pieces = [piece for group in self.param_groups for piece in group["params"]]
        time.sleep(APPLY * sum(piece.numel() for piece in pieces) / ELEMENTS)


def make_optimizer(parameters: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    return SleepingOptimizer(parameters, lr=0.0)


def trained(chosen: Configuration) -> float:
    """Train a configuration; return the batches of single workers that were applied per second."""
    from fineprune.distributed.parameter_servers.coordinator import Coordinator
    from fineprune.distributed.parameter_servers.placement import Places
    from fineprune.distributed.parameter_servers.processes import cluster
    from fineprune.distributed.strategy import Strategy

    strategy = Strategy(**chosen.settings)
    places = Places(strategy.groups, strategy.group, strategy.servers)
    model = nn.Linear(ELEMENTS, 1, bias=False)
    with tempfile.TemporaryDirectory() as folder, cluster(places) as processes:
        made = Coordinator(
            processes, strategy, model, Sleeping, make_optimizer, Path(folder) / "servers"
        )
        made.wait_for_workers()
        for epoch, steps in enumerate((4, 2 * EPOCH_STEPS)):  # The first epoch warms up.
            count = steps * strategy.groups
            batches = list(torch.arange(count * strategy.group).split(strategy.group))
            began = time.perf_counter()
            made.run_epoch(epoch, batches, lambda applied: 0.0)
            seconds = time.perf_counter() - began
        made.close()
    return count * strategy.group / seconds


def runs(file: Path) -> list[float]:
    """Train what is missing in the file; print and return the errors in percent."""
    results = json.loads(file.read_text()) if file.exists() else {}
    for text in (ALONE, *RUNS):
        if text not in results:
            results[text] = trained(configuration(text))
            file.write_text(json.dumps(results, indent=1))
            print(f"{text}: {results[text]:.2f} steps/s", flush=True)
    steps = tuple(float(second) for rank in range(4) for second in durations(rank))
    alone = 1 / results[ALONE] - STEP
    costs = Costs(steps, 1, 4e-6 * ELEMENTS, overhead=max(0.0, alone - APPLY), apply=APPLY)
    print(f"\ncalibrated: overhead {1e3 * costs.overhead:.1f} ms\n")
    print("| configuration | steps/s | predicted | error, % | limit |")
    print("|---|---:|---:|---:|---|")
    errors = []
    for text in RUNS:
        result = simulate(costs, ClusterShape(gigabits=0, latency=0), configuration(text))
        errors.append(100 * (result.throughput / results[text] - 1))
        print(
            f"| {text} | {results[text]:.2f} | {result.throughput:.2f} | {errors[-1]:+.1f} | "
            f"{result.limit} |"
        )
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paper", action="store_true", help="predict the paper's table")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="train, and predict that")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.runs is not None:
        errors = [abs(error) for error in runs(options.runs)]
        print(f"\nmedian error: {statistics.median(errors):.2f} %")
        print(f"largest error: {max(errors):.2f} %")
    elif options.paper:
        print(f"\nlargest error: {paper():.2f} %")
    else:
        parser.error("give --paper or --runs")


if __name__ == "__main__":
    main()
