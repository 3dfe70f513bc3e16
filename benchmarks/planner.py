"""How well the planner predicts: against the second paper's table, and against trainings here.

    python benchmarks/planner.py --paper
    python benchmarks/planner.py --runs results.json    # continues where it was stopped
    sudo python benchmarks/planner.py --runs results.json --gigabits 1

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

With ``--gigabits``, each worker has a node of its own, and so has each dedicated server: nodes of a
Ray cluster in network namespaces, whose links carry so many Gbit/s in each direction. The
parameters are larger, 4 MB. This needs Linux and root.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shaped_nodes import on_node, ray_nodes, shaped_network
from torch import nn

from fineprune.experiments.cluster_costs import ClusterShape, Costs
from fineprune.experiments.cluster_formula import predicted_speed
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
        result = predicted_speed(costs, network, configuration(text))
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
ELEMENTS, SHAPED_ELEMENTS = 250_000, 1_000_000
EPOCH_STEPS = 40  # Each worker repeats so many durations, twice in the epoch that is measured.
ALONE = "async 1+1"
RUNS = (
    *("async 2+1", "async 3+1", "async 4+1", "async 2+2", "async 3+2", "async 4+2"),
    *("sync 2+1", "sync 3+1", "sync 4+1", "sync 3+2", "sync 4+2", "sync 4+1 backup=1"),
    *("mixed 4+1 group=2", "mixed 4+2 group=2"),
)
DEDICATED = ("async 3+1 dedicated", "async 2+2 dedicated", "sync 2+2 dedicated")
NODES, LATENCY = 4, 1e-4


def durations(node: int) -> Any:
    """Return the durations of the steps on a node, in seconds, shape (EPOCH_STEPS,)."""
    drawn = np.exp(SPREAD * np.random.default_rng([7, node]).standard_normal(EPOCH_STEPS))
    return STEP * drawn / drawn.mean()


class Sleeping:
    """A replica whose steps sleep, equally long in all members of a group."""

    def __init__(self, elements: int, group: int, rank: int) -> None:
        self.elements = elements
        self.model: nn.Module = nn.Linear(elements, 1, bias=False)
        self.seconds = durations(rank // group)
        self.steps = 0

    def load(self, key: Any, indices: torch.Tensor) -> torch.Tensor:
        return indices

    def step(self, batch: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        time.sleep(self.seconds[self.steps % len(self.seconds)])
        self.steps += 1
        self.model(torch.zeros(1, self.elements)).sum().backward()
        return torch.zeros(len(batch))


class SleepingOptimizer(torch.optim.SGD):
    """A server's optimizer that takes as long as its part of the parameters is large."""

    def __init__(self, elements: int, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.elements = elements

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pieces = [piece for group in self.param_groups for piece in group["params"]]
        time.sleep(APPLY * sum(piece.numel() for piece in pieces) / self.elements)


def trained(chosen: Configuration, elements: int) -> float:
    """Train a configuration; return the batches of single workers that were applied per second."""
    from fineprune.distributed.parameter_servers.start import parameter_servers

    strategy = chosen.distributed
    model = nn.Linear(elements, 1, bias=False)
    replica = functools.partial(Sleeping, elements, strategy.group)
    optimizer = functools.partial(SleepingOptimizer, elements)
    with parameter_servers(strategy, model, replica, optimizer) as made:
        made.wait_for_workers()
        for epoch, steps in enumerate((4, 2 * EPOCH_STEPS)):  # The first epoch warms up.
            count = steps * strategy.groups
            batches = list(torch.arange(count * strategy.group).split(strategy.group))
            began = time.perf_counter()
            result = made.run_epoch(epoch, batches, lambda applied: 0.0)
            seconds = time.perf_counter() - began - result.snapshot_seconds
    return count * strategy.group / seconds


def trained_on_nodes(texts: Sequence[str], workers: int) -> Iterator[tuple[str, float]]:
    """Train configurations on nodes with so many workers each; yield them with their results."""
    with ray_nodes([0, *[workers] * NODES]) as address:
        for text in texts:
            own = [sys.executable, __file__, "--train", text, "--elements", str(SHAPED_ELEMENTS)]
            environment = {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
            done = subprocess.run(on_node(0, own), env=environment, stdout=subprocess.PIPE)
            if done.returncode:
                sys.exit(f"{text}: the training failed")
            yield text, float(done.stdout.split()[-1])


def group_of(text: str) -> int:
    return configuration(text).distributed.group


def train_missing(results: dict[str, float], gigabits: float) -> Iterator[tuple[str, float]]:
    """Train what has no result yet; yield each configuration with its steps per second."""
    if not gigabits:
        for text in (ALONE, *RUNS):
            if text not in results:
                yield text, trained(configuration(text), ELEMENTS)
        return
    missing = [text for text in (ALONE, *RUNS, *DEDICATED) if text not in results]
    if not missing:
        return
    with shaped_network(1 + NODES, gigabits):
        for group in sorted({group_of(text) for text in missing}):
            texts = [text for text in missing if group_of(text) == group]
            yield from trained_on_nodes(texts, group)


def runs(file: Path, gigabits: float) -> list[float]:
    """Train what is missing in the file; print and return the errors in percent."""
    saved = json.loads(file.read_text()) if file.exists() else {}
    results = saved.setdefault(f"{gigabits:g}", {})
    for text, measured in train_missing(results, gigabits):
        results[text] = measured
        file.write_text(json.dumps(saved, indent=1))
        print(f"{text}: {measured:.2f} steps/s", flush=True)
    steps = tuple(float(second) for node in range(NODES) for second in durations(node))
    megabytes = 4e-6 * (SHAPED_ELEMENTS if gigabits else ELEMENTS)
    alone = 1 / results[ALONE] - STEP
    costs = Costs(steps, 1, megabytes, overhead=max(0.0, alone - APPLY), apply=APPLY)
    print(f"\ncalibrated: overhead {1e3 * costs.overhead:.1f} ms\n")
    print("| configuration | steps/s | predicted | error, % |")
    print("|---|---:|---:|---:|")
    errors = []
    for text in (*RUNS, *(DEDICATED if gigabits else ())):
        shape = ClusterShape(
            gigabits=gigabits, latency=LATENCY if gigabits else 0, accelerators=group_of(text)
        )
        result = predicted_speed(costs, shape, configuration(text))
        errors.append(100 * (result.throughput / results[text] - 1))
        print(f"| {text} | {results[text]:.2f} | {result.throughput:.2f} | {errors[-1]:+.1f} |")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paper", action="store_true", help="predict the paper's table")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="train, and predict that")
    parser.add_argument(
        "--gigabits", type=float, default=0.0, help="of the links; the default is one machine"
    )
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--elements", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.train is not None:
        print(trained(configuration(options.train), options.elements))
    elif options.runs is not None:
        errors = [abs(error) for error in runs(options.runs, options.gigabits)]
        print(f"\nmedian error: {statistics.median(errors):.2f} %")
        print(f"largest error: {max(errors):.2f} %")
    elif options.paper:
        print(f"\nlargest error: {paper():.2f} %")
    else:
        parser.error("give --paper or --runs")


if __name__ == "__main__":
    main()
