"""What an update with parameter servers costs, and whether loading overlaps computing.

    python benchmarks/updates.py
    python benchmarks/updates.py --against ../before    # and another checkout, in turns
    python benchmarks/updates.py --round-trips          # one message by Ray and by a channel

There are three measurements, each of a training with asynchronous workers and one server:

- **Overhead**: one worker trains LeNet on batches of 128 samples in memory. The time of an update
  is divided into data, compute, the bytes (a push and a pull of the same size over a bare link
  between two processes) and the rest, which is the overhead.
- **Rate**: eight workers compute nothing. The number of updates per second is what the coordinator
  sustains on this machine, whose cores it shares with the workers and the server. Its own
  processor time per update is given, too.
- **Loading**: loading a batch takes 160 ms and a step takes 160 ms, eight times per epoch. Both
  sleep, so one core is enough.

With ``--against``, the checkouts take turns within each round, so that other load on the machine
affects both. Medians over the rounds are compared. The machine should be idle.
"""

import argparse
import contextlib
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fineprune.distributed.parameter_servers.coordinator import Coordinator
from fineprune.distributed.parameter_servers.link import Link, WireFormat, join_store, open_store
from fineprune.distributed.strategy import Strategy
from fineprune.networks.lenet import LeNet
from fineprune.training.hardware import describe

modules: Any = {}
for module, name in (("placement", "Places"), ("processes", "cluster")):
    package = "fineprune.distributed.parameter_servers"
    try:
        modules[name] = getattr(importlib.import_module(f"{package}.{module}"), name)
    except ModuleNotFoundError:  # in a checkout for --against, in which one module holds both
        modules[name] = getattr(importlib.import_module(f"{package}.ray_cluster"), name)

SAMPLES = 128
WORKERS = 8
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


class Sleeping(Nothing):
    """A replica that sleeps while it loads and while it computes."""

    def load(self, key: Any, indices: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        return indices

    def step(self, batch: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        time.sleep(SLEEP)
        return torch.zeros(len(batch))


def make_optimizer(parameters: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(
    workers: int, model: nn.Module, build: Callable[[int], Any], updates: int
) -> list[dict[str, float]]:
    """Train epochs of so many updates; return the times per update of each, in seconds."""
    strategy = Strategy("async", workers=workers)
    batches = list(torch.arange(updates * SAMPLES).split(SAMPLES))
    places = modules["Places"](strategy.groups, servers=strategy.servers)
    lines = []
    with (
        tempfile.TemporaryDirectory() as folder,
        modules["cluster"](places) as processes,
    ):
        made = Coordinator(processes, strategy, model, build, make_optimizer, Path(folder) / "s")
        made.wait_for_workers()
        for epoch in range(EPOCHS + 1):
            began, own = time.perf_counter(), processor_seconds()
            result = made.run_epoch(epoch, batches, lambda applied: 0.001)
            seconds = {"total": time.perf_counter() - began, "own": processor_seconds() - own}
            seconds |= {phase: result.seconds[phase] for phase in ("data", "compute")}
            lines.append({name: value / updates for name, value in seconds.items()})
        made.close()
    return lines[1:]  # the first epoch warms up


def processor_seconds() -> float:
    """Return the processor time of this process, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def seconds_of_bytes(elements: int, repeats: int = 200) -> float:
    """Return the time of a push and a pull of so many elements over a bare link, in seconds."""
    store = open_store()
    code = (
        f"import sys; sys.argv[1:] = ['--answer', '{store.port}', '{elements}', '{repeats}']; "
        f"exec(compile(open({__file__!r}).read(), {__file__!r}, 'exec'))"
    )
    with subprocess.Popen([sys.executable, "-c", code]):
        link = make_link(store, 0, elements)
        tensor = torch.zeros(elements)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            link.send(tensor)
            link.receive(tensor)
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def answer(port: int, elements: int, repeats: int) -> None:
    """Be the other end of ``seconds_of_bytes``."""
    link = make_link(join_store("127.0.0.1", port), 1, elements)
    tensor = torch.zeros(elements)
    for _ in range(repeats):
        link.receive(tensor)
        link.send(tensor)


def make_link(store: Any, side: int, elements: int) -> Link:
    return Link(store, "bare", side, WireFormat(elements), WireFormat(elements))


def measure(updates: int) -> dict[str, float]:
    """Measure this checkout. The times are in milliseconds, and the rate in updates per second."""

    def median(lines: Sequence[dict[str, float]], name: str) -> float:
        return statistics.median(line[name] for line in lines)

    model = LeNet()
    bytes_ms = 1e3 * seconds_of_bytes(sum(p.numel() for p in model.parameters()))
    lenet = trained(1, model, LeNetReplica, updates)
    nothing = trained(WORKERS, nn.Linear(16, 16), Nothing, 4 * updates)
    sleeping = trained(1, nn.Linear(16, 16), Sleeping, BATCHES)
    result = {name: 1e3 * median(lenet, name) for name in ("total", "data", "compute")}
    result["bytes"] = bytes_ms
    result["overhead"] = statistics.median(
        1e3 * (line["total"] - line["data"] - line["compute"]) - bytes_ms for line in lenet
    )
    result["updates per second"] = 1 / median(nothing, "total")
    result["coordinator"] = 1e3 * median(nothing, "own")
    result["loading and computing"] = 1e3 * BATCHES * median(sleeping, "total")
    return result


class Echo:
    """A process that returns what it is sent, by Ray and by a channel."""

    def echo(self, value: int) -> int:
        return value

    def join(self, address: tuple[str, int], key: bytes) -> None:
        from fineprune.distributed.parameter_servers.channel import ChannelClosed, join_channel

        channel = join_channel(address, key)

        def answer() -> None:
            with contextlib.suppress(ChannelClosed):
                while True:
                    channel.send(channel.receive())

        threading.Thread(target=answer, daemon=True).start()


def round_trips(repeats: int = 300) -> dict[str, float]:
    """Return the median time of a round trip in each way, in milliseconds."""
    # Imported here, because a checkout for --against may have no such modules.
    import ray
    from ray.dag import InputNode

    from fineprune.distributed.parameter_servers.channel import Listener
    from fineprune.distributed.parameter_servers.messages import Ready
    from fineprune.distributed.parameter_servers.ray_session import ray_session

    def median(act: Callable[[], object]) -> float:
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            act()
            times.append(time.perf_counter() - began)
        return 1e3 * statistics.median(times[repeats // 10 :])

    def through_channel() -> None:
        channel.send(Ready())
        channel.receive()

    with ray_session(1):
        actor: Any = ray.remote(Echo)
        called, compiled = actor.remote(), actor.remote()
        listener = Listener("127.0.0.1")
        ray.get(called.join.remote(listener.address, listener.key))
        channel = listener.accepted()
        found = {
            "channel": median(through_channel),
            "Ray's call": median(lambda: ray.get(called.echo.remote(1))),
        }
        with InputNode() as value:
            graph = compiled.echo.bind(value).experimental_compile()
        found["Ray's compiled graph"] = median(lambda: ray.get(graph.execute(1)))
        graph.teardown()
        listener.close()
    return found


def measured(checkout: Path, updates: int) -> dict[str, float]:
    """Measure a checkout in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--alone", "--updates", str(updates)],
        env={**os.environ, "PYTHONPATH": str(checkout / "src"), "RAY_worker_niceness": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=200, help="per epoch of LeNet")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of the project")
    parser.add_argument("--round-trips", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--answer", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.answer:
        answer(*options.answer)
        return
    if options.round_trips:
        for what, milliseconds in round_trips().items():
            print(f"{what}: {milliseconds:.2f} ms")
        return
    if options.alone:
        print(json.dumps(measure(options.updates)))
        return
    checkouts = {"this checkout": Path(__file__).resolve().parents[1]}
    if options.against is not None:
        checkouts = {str(options.against): options.against.resolve()} | checkouts
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.rounds):
        for name, checkout in checkouts.items():
            rounds[name].append(measured(checkout, options.updates))
    about = asdict(describe("cpu", 1)) | {"torch": torch.__version__}
    if options.json:
        print(json.dumps({"about": about, "rounds": rounds}))
        return
    print(about, f"n = {options.rounds} rounds\n")
    print("| | " + " | ".join(rounds) + " |")
    print("|---|" + "---|" * len(rounds))
    for what in next(iter(rounds.values()))[0]:
        unit = "" if what == "updates per second" else ", ms"
        cells = []
        for lines in rounds.values():
            values = [line[what] for line in lines]
            cells.append(
                f"{statistics.median(values):,.2f} ({min(values):,.2f}-{max(values):,.2f})"
            )
        print(f"| {what}{unit} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
