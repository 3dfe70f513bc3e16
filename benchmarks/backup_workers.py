"""How much a backup worker helps if one worker is slow from time to time.

    python benchmarks/backup_workers.py

Four synchronous workers, of which one is a backup, are compared with three workers and no backup.
Both trainings run side by side and take turns: each trains one epoch undisturbed, then one in which
the first worker takes 250 ms longer in 10 % of its steps, once in every ten, at a random place. The
model is tiny and each step is padded by a sleep, so two cores are enough: only the waiting is
measured. Throughput counts applied samples only, and medians are compared.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack

import ray
import torch
from torch import nn

from fineprune.distributed.parameter_servers.batches import BatchKey
from fineprune.distributed.parameter_servers.ray_session import ray_session
from fineprune.distributed.parameter_servers.start import parameter_servers
from fineprune.distributed.parameter_servers.training import Training
from fineprune.distributed.strategy import Strategy
from fineprune.training.hardware import describe

BATCH = 32
STEP, HELD_UP, ONE_IN = 0.1, 0.25, 10
WORKERS = 3
STRATEGIES = {
    "1 backup": Strategy("sync", workers=WORKERS + 1, backup=1),
    "no backup": Strategy("sync", workers=WORKERS),
}


class Replica:
    def __init__(self, rank: int) -> None:
        self.model: nn.Module = nn.Linear(16, 4)
        self.rank = rank
        self.steps = 0

    def load(self, key: BatchKey, indices: torch.Tensor) -> tuple[int, torch.Tensor]:
        return key.epoch, torch.ones(len(indices), 16)

    def step(self, batch: tuple[int, torch.Tensor], weights: torch.Tensor | None) -> torch.Tensor:
        epoch, inputs = batch
        began = time.perf_counter()
        losses: torch.Tensor = self.model(inputs).square().mean(1)
        losses.mean().backward()
        late = HELD_UP if disturbed(epoch) and self.held_up() else 0.0
        time.sleep(max(0.0, STEP + late - (time.perf_counter() - began)))
        return losses.detach()

    def held_up(self) -> bool:
        """Count a step of the first worker, and return whether to make it slow."""
        ten, place = divmod(self.steps, ONE_IN)
        self.steps += self.rank == 0
        return self.rank == 0 and place == random.Random(ten).randrange(ONE_IN)


def disturbed(epoch: int) -> bool:
    return epoch % 2 == 1


def make_optimizer(parameters: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def measure(updates: int, rounds: int) -> list[dict[str, float]]:
    """Return a line per round: applied samples per second by strategy and kind of epoch."""
    batches = list(torch.arange(updates * WORKERS * BATCH).split(BATCH))
    lines = []
    with ExitStack() as stack:
        servers = {name: start(stack, strategy) for name, strategy in STRATEGIES.items()}
        for turn in range(rounds + 1):
            line = {}
            for epoch in (2 * turn, 2 * turn + 1):
                kind = "held up" if disturbed(epoch) else "undisturbed"
                for name, server in servers.items():
                    line[f"{name}, {kind}"] = clock(server, epoch, batches)
            # The first round warms up processes and links.
            if turn:
                lines.append(line)
    return lines


def start(stack: ExitStack, strategy: Strategy) -> Training:
    model = nn.Linear(16, 4)
    made = parameter_servers(strategy, model, Replica, make_optimizer)
    training = stack.enter_context(made)
    training.wait_for_workers()
    return training


def clock(server: Training, epoch: int, batches: Sequence[torch.Tensor]) -> float:
    """Train an epoch, and return its applied samples per second."""
    started = time.perf_counter()
    result = server.run_epoch(epoch, batches, lambda applied: 0.1)
    seconds = time.perf_counter() - started - result.snapshot_seconds
    return sum(len(update.indices) for update in result.updates) / seconds


def summary(lines: list[dict[str, float]]) -> dict[str, float]:
    """Return medians of samples per second, and of each round's ratio to undisturbed workers."""
    result = {key: statistics.median(line[key] for line in lines) for key in lines[0]}
    for name in STRATEGIES:
        ratios = [line[f"{name}, held up"] / line[f"{name}, undisturbed"] for line in lines]
        result[f"{name}, kept"] = statistics.median(ratios)
        result[f"{name}, kept at least"] = min(ratios)
        result[f"{name}, kept at most"] = max(ratios)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=50, help="of an epoch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ray_session(sum(strategy.workers for strategy in STRATEGIES.values())):
        lines = measure(options.updates, options.rounds)
    result = summary(lines)
    about = {**vars(describe("cpu", 1)), "torch": torch.__version__, "ray": ray.__version__}
    if options.json:
        print(json.dumps({"about": about, "rounds": lines, "summary": result}))
        return
    print(about, f"n = {options.rounds} rounds of {options.updates} updates\n")
    print("| | workers | undisturbed, samples/s | held up, samples/s | held up / undisturbed |")
    print("|---|---|---|---|---|")
    for name, strategy in STRATEGIES.items():
        speeds = [f"{result[f'{name}, {kind}']:,.0f}" for kind in ("undisturbed", "held up")]
        least, most = (result[f"{name}, kept at {end}"] for end in ("least", "most"))
        kept = f"{result[f'{name}, kept']:.2f} ({least:.2f} to {most:.2f})"
        print("| " + " | ".join([name, str(strategy.workers), *speeds, kept]) + " |")


if __name__ == "__main__":
    main()
