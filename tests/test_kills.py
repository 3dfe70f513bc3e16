"""If processes are killed or suspended, the training continues and its results are correct.

Each check replays the reported updates in this process, with their samples, order and staleness.
This determines all losses and the parameters that the servers must hold. Therefore a test fails if
a gradient was applied twice, on one of two servers only, or without being reported, or if the
servers were rolled back to another version than the reported one.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from logged_events import on_events
from preloaded_python import preloaded_ray_workers
from processes import in_session, wait_until_ended
from torch import nn

from fineprune.distributed.parameter_servers.epoch import BatchKey

ray = pytest.importorskip("ray")

from fineprune.distributed.parameter_servers.processes import EventKind, ProcessKind  # noqa: E402
from fineprune.distributed.parameter_servers.start import parameter_servers  # noqa: E402
from fineprune.distributed.strategy import Strategy  # noqa: E402

pytestmark = pytest.mark.usefixtures("running_ray")

WORKER, SERVER = ProcessKind.WORKER, ProcessKind.SERVER
SAMPLES, BATCH, BATCHES = 120, 4, 30
# Each restart takes seconds, so the number of kills is small by default.
KILLS = int(os.environ.get("FINEPRUNE_KILLS", "1"))
MOMENTUM = 0.9
# How long a process may be silent, in seconds: longer than one takes to start on a busy machine.
SILENCE = 20
START = torch.linspace(-1, 1, 10, dtype=torch.float64)
STRATEGIES = {
    "sync": Strategy("sync", workers=3, servers=2, silence_seconds=SILENCE),
    "backup": Strategy("sync", workers=3, servers=2, backup=1, silence_seconds=SILENCE),
    "async": Strategy("async", workers=2, servers=2, silence_seconds=SILENCE),
    "mixed": Strategy("mixed", workers=4, servers=2, group=2, silence_seconds=SILENCE),
}
# The number of updates between two snapshots, below and above the number of an epoch's updates.
SNAPSHOT_EVERY = {"sync": 5, "backup": 3, "async": 50, "mixed": 5}


class Model(nn.Module):
    """Rows of ten values. All rows have the same initial values and the same gradients."""

    def __init__(self, rows):
        super().__init__()
        self.values = nn.Parameter(START.repeat(rows))

    def forward(self, indices):
        return losses_of(self.values, indices)


def coefficients(indices):
    """Return the two coefficients of each of these samples, float64."""
    generator = torch.Generator().manual_seed(5)
    both = torch.randn(2, SAMPLES, generator=generator, dtype=torch.float64)
    return both[0, indices], both[1, indices].square()


def losses_of(values, indices):
    slope, curve = coefficients(indices)
    return slope * values.sum() + curve / 2 * values.square().sum()


def gradient_of(values, indices):
    """Return the gradient of the mean loss for one row of parameters."""
    slope, curve = coefficients(indices)
    return slope.mean() + curve.mean() * values


def rate(applied):
    return 0.05 / (1 + applied / BATCHES)


def batches_of(epoch):
    generator = torch.Generator().manual_seed(epoch)
    return list(torch.randperm(SAMPLES, generator=generator).split(BATCH))[:BATCHES]


class Orders:
    """A folder with orders to processes to kill themselves, and the numbers of their steps."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def give(self, order):
        (self.folder / order).touch()

    def has(self, order):
        return (self.folder / order).exists()

    def obey(self, order):
        """Kill this process if this was ordered. Only one process obeys each order."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / order).unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def count_step(self):
        with (self.folder / f"steps-{os.getpid()}").open("a") as file:
            file.write(".")

    def steps(self, pid):
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"steps-{pid}").stat().st_size
        return 0


class Watch:
    """Collects from the events which processes are alive, and in which epochs others died."""

    def __init__(self):
        self.living = {}  # the process ID, by kind and index
        self.epoch = 0  # that of the last lease
        self.deaths = []  # the epoch and the event of each
        self.react = lambda event: None  # is called with each event

    def __call__(self, event):
        self.note(event)
        self.react(event)

    def once(self, kind, batch, react):
        """Call ``react`` at the first event of this kind and batch."""

        def reacting(event):
            if event.kind is kind and event.batch == batch:
                self.react = lambda event: None
                react()

        self.react = reacting

    def deaths_in(self, epoch):
        """Return how many workers and servers died in an epoch, or between it and the next one."""
        kinds = [event.process for number, event in self.deaths if number == epoch]
        return kinds.count(WORKER), kinds.count(SERVER)

    def send(self, number, kind, index):
        """Send a signal to a process that was alive at the last event."""
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(self.living[kind, index], number)

    def note(self, event):
        match event.kind:
            case EventKind.STARTED | EventKind.RESTARTED:
                self.living[event.process, event.index] = event.pid
            case EventKind.DIED | EventKind.STOPPED:
                self.living.pop((event.process, event.index), None)
                if event.kind is EventKind.DIED:
                    self.deaths.append((self.epoch, event))
            case EventKind.LEASED:
                self.epoch = event.batch.epoch


class Replica:
    def __init__(self, rows, orders, rank):
        self.model = Model(rows)
        self.orders = orders

    def load(self, key, indices):
        return key, indices

    def step(self, batch, weights):
        key, indices = batch
        self.orders.count_step()
        time.sleep(0.02)  # makes it likely that a process is in a step when it is killed
        losses = self.model(indices)
        losses.mean().backward()
        self.orders.obey(f"step-{key.epoch}-{key.batch}")
        return losses.detach()


class Optimizer(torch.optim.SGD):
    def __init__(self, orders, parameters):
        super().__init__(parameters, lr=1.0, momentum=MOMENTUM)
        self.orders = orders

    def step(self, closure=None):
        self.orders.count_step()
        super().step(closure)
        self.orders.obey("update")

    def state_dict(self):
        self.orders.obey("snapshot")
        return super().state_dict()


def factories(rows, orders):
    """Return the functions that make a replica and an optimizer."""
    return functools.partial(Replica, rows, orders), functools.partial(Optimizer, orders)


@contextlib.contextmanager
def training(strategy, folder, rows=1, snapshot_every=5):
    """Yield a training whose workers have joined, its ``Orders`` and its ``Watch``."""
    strategy = dataclasses.replace(strategy, snapshot_every=snapshot_every)
    orders = Orders(folder / "orders")
    watch = Watch()
    with (
        on_events(watch, logging.DEBUG),
        parameter_servers(strategy, Model(rows), *factories(rows, orders)) as server,
    ):
        server.wait_for_workers()
        yield server, orders, watch


class Shared:
    """A training that several tests continue, because starting its processes takes seconds."""

    def __init__(self, mode, server, orders, watch):
        self.strategy, self.server = STRATEGIES[mode], server
        self.orders, self.watch = orders, watch
        self.results = []

    def run(self, rate=rate):
        """Train the next epoch, and return its result."""
        epoch = len(self.results)
        self.results.append(self.server.run_epoch(epoch, batches_of(epoch), rate))
        return self.results[-1]

    def check(self):
        """Check all epochs that were trained so far."""
        check(self.strategy, self.server, self.watch, self.results)
        if self.strategy.strategy == "sync" and not self.strategy.backup:
            check_as_without_kills(self.strategy, self.server, len(self.results))


@pytest.fixture(scope="module")
def shared(request, running_ray, tmp_path_factory):
    mode = request.param
    folder = tmp_path_factory.mktemp("shared")
    with training(STRATEGIES[mode], folder, snapshot_every=SNAPSHOT_EVERY[mode]) as parts:
        yield Shared(mode, *parts)


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def check(strategy, server, watch, results, rows=1, *, lost_node=False):
    """Check that each batch is applied once, and that the servers' state fits the updates.

    Updates are undone if a server died, or if their gradients were lost with a node.
    """
    history = [START]
    momentum = torch.zeros_like(START)
    for epoch, result in enumerate(results):
        applied = [key for update in result.updates for key in update.keys]
        assert sorted(applied) == [BatchKey(epoch, batch) for batch in range(BATCHES)]
        if not watch.deaths_in(epoch)[1] and not lost_node:
            assert result.undone == 0
        given, done = batches_of(epoch), 0
        for update in sorted(result.updates, key=lambda update: update.version):
            assert update.version == len(history)
            assert update.indices.equal(torch.cat([given[key.batch] for key in update.keys]))
            read = history[update.version - 1 - update.staleness]
            expected = rows * losses_of(read, update.indices)
            torch.testing.assert_close(update.losses, expected.float())
            momentum = MOMENTUM * momentum + gradient_of(read, update.indices)
            history.append(history[-1] - rate(done) * momentum)
            done += len(update.keys)
    states = [
        torch.load(io.BytesIO(state.numpy()), weights_only=True)
        for state in server.state()["servers"]
    ]
    assert [state["version"] for state in states] == [len(history) - 1] * strategy.servers
    held = torch.cat([state["parameters"] for state in states]).view(rows, -1)
    torch.testing.assert_close(held, history[-1].expand_as(held), rtol=1e-9, atol=1e-9)


def check_as_without_kills(strategy, server, epochs, rows=1):
    """Check that synchronous servers have the parameters of a single process's training."""
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM)
    for epoch in range(epochs):
        for first in range(0, BATCHES, strategy.quorum):
            indices = torch.cat(batches_of(epoch)[first : first + strategy.quorum])
            optimizer.zero_grad()
            losses_of(model.values, indices).mean().backward()
            optimizer.param_groups[0]["lr"] = rate(first)
            optimizer.step()
    served = Model(rows)
    server.load_into(served)
    torch.testing.assert_close(
        served.values, model.values.repeat(rows), rtol=1e-9, atol=1e-9, check_stride=False
    )


class Killer:
    """A thread that kills workers and servers at random.

    If a group or server dies several times without any progress, the training ends, as intended.
    Therefore, of two successive kills of the same group or server, at least one happens after the
    process has begun its second step, when the gradient of its first step has arrived.
    """

    def __init__(self, watch, strategy, orders, kills, seed):
        self.watch, self.strategy, self.orders = watch, strategy, orders
        self.random = random.Random(seed)
        self.left = kills
        self.killed: dict[ProcessKind, set[int]] = {WORKER: set(), SERVER: set()}
        self.early = set()
        self.thread = threading.Thread(target=self.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.left = 0
        self.thread.join()

    def run(self):
        while self.left > 0:
            time.sleep(self.random.uniform(0, 0.6))
            # All workers wait while a server restarts, so more deaths of servers take minutes.
            servers_too = len(self.killed[SERVER]) < 4 and self.random.random() < 0.2
            kind = SERVER if servers_too else WORKER
            places = self.strategy.servers if servers_too else self.strategy.workers
            place = self.random.randrange(places)
            pid = self.watch.living.get((kind, place))
            if pid is None:
                continue
            if pid not in self.killed[kind] and self.may_die(kind, place, pid):
                # It takes long to replace a process that hangs, so this is done in long tests only.
                hangs = KILLS > 5 and self.random.random() < 0.1
                os.kill(pid, signal.SIGSTOP if hangs else signal.SIGKILL)
                self.killed[kind].add(pid)
                self.left -= 1

    def may_die(self, kind, place, pid):
        one = (kind, place // self.strategy.group if kind is WORKER else place)
        if self.orders.steps(pid) > 1:
            self.early.discard(one)
        elif one in self.early:
            return False
        else:
            self.early.add(one)
        return True


def kill_between_updates(watch, orders, kind):
    """While only the first of two servers has made an update, kill a worker or the second one."""
    first, second = watch.living[SERVER, 0], watch.living[SERVER, 1]
    while orders.steps(first) < 3:
        time.sleep(0.01)
    os.kill(second, signal.SIGSTOP)
    while orders.steps(first) <= orders.steps(second):
        time.sleep(0.01)
    kill(second if kind is SERVER else watch.living[WORKER, 0])
    os.kill(second, signal.SIGCONT)


def once_in_the_last_update(strategy, give):
    """Return ``rate`` with a side effect: it calls ``give`` just before the last update."""
    left = [give]

    def giving(applied):
        if left and applied + strategy.quorum >= BATCHES:
            left.pop()()
        return rate(applied)

    return giving


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_outlives_a_killed_driver(tmp_path, short_folder):
    with subprocess.Popen(
        [sys.executable, __file__, tmp_path, short_folder],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as driver:
        actors = {int(pid) for pid in driver.stdout.readline().split()}
        there = in_session(driver.pid)
        kill(driver.pid)
    try:
        assert len(actors) == 4
        assert actors | {driver.pid} < there  # and Ray's own
        assert not wait_until_ended(driver.pid)
    finally:
        for pid in in_session(driver.pid):
            kill(pid)


@pytest.mark.parametrize(
    "shared",
    [
        "sync",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("backup", "async", "mixed")),
    ],
    indirect=True,
)
def test_kills_at_random(shared, request):
    results, seed = shared.results, request.node.callspec.params["shared"]
    first = len(results)
    with Killer(shared.watch, shared.strategy, shared.orders, KILLS, seed) as killer:
        while killer.left or len(results) < first + 3:
            shared.run()
    shared.run()  # The last death is noticed in one more epoch, in which every process has work.
    shared.check()
    killed = {kind: len(pids) for kind, pids in killer.killed.items()}
    assert sum(killed.values()) == KILLS
    died = [shared.watch.deaths_in(epoch) for epoch in range(first, len(results))]
    assert sum(servers for _, servers in died) == killed[SERVER]
    deaths = sum(workers for workers, _ in died)
    # One that is killed while its group is being ended for another's death is not counted.
    if shared.strategy.group > 1:
        assert 0 < deaths <= killed[WORKER]
    else:
        assert deaths == killed[WORKER]


@pytest.mark.parametrize("shared", ["sync"], indirect=True)
def test_kills_between_two_updates_and_at_the_end_of_an_epoch(shared):
    check_kills_at_chosen_moments(
        shared.strategy, (shared.server, shared.orders, shared.watch), shared.results
    )


@pytest.mark.long
def test_kills_while_a_large_gradient_is_transferred(tmp_path, monkeypatch):
    """With 8 MB for each server, gradients travel through the object store."""
    monkeypatch.setattr(sys.modules[__name__], "BATCHES", 15)  # They are large.
    strategy, rows = STRATEGIES["async"], 200_000
    with training(strategy, tmp_path, rows, SNAPSHOT_EVERY["async"]) as parts:
        check_kills_at_chosen_moments(strategy, parts, [], rows)


def check_kills_at_chosen_moments(strategy, parts, results, rows=1):
    server, orders, watch = parts
    first = len(results)

    def run(rate=rate):
        epoch = len(results)
        results.append(server.run_epoch(epoch, batches_of(epoch), rate))

    for kind in (WORKER, SERVER):
        thread = threading.Thread(target=kill_between_updates, args=(watch, orders, kind))
        thread.start()
        run()
        thread.join()
    orders.give(f"step-{len(results)}-{BATCHES - 1}")
    run()
    run(once_in_the_last_update(strategy, lambda: orders.give("update")))
    run(once_in_the_last_update(strategy, lambda: orders.give("snapshot")))
    deaths = [watch.deaths_in(epoch) for epoch in range(first, len(results))]
    assert deaths == [(1, 0), (0, 1), (1, 0), (0, 1), (0, 1)]
    assert all(result.undone for result in results[first + 3 :])
    for kind in (WORKER, SERVER):
        kill(watch.living[kind, 0])
    check(strategy, server, watch, results, rows)
    run()
    # The worker's death is noticed between the two epochs, the server's in the second one.
    assert watch.deaths_in(first + 4) == (1, 1)
    assert watch.deaths_in(first + 5) == (0, 1)
    check(strategy, server, watch, results, rows)
    if strategy.strategy == "sync":
        check_as_without_kills(strategy, server, len(results), rows)


@pytest.mark.long
def test_a_worker_may_die_with_a_server(tmp_path):
    strategy = Strategy("mixed", workers=2, servers=2, group=2)
    with training(strategy, tmp_path) as (server, _, watch):

        def kill_both():
            watch.send(signal.SIGKILL, SERVER, 0)
            watch.send(signal.SIGKILL, WORKER, 1)

        watch.once(EventKind.LEASED, BatchKey(0, 10), kill_both)
        result = server.run_epoch(0, batches_of(0), rate)
        # If the server's death is noticed first, the group is started again because of it.
        assert watch.deaths_in(0) in ((0, 1), (1, 1))
        check(strategy, server, watch, [result])

        def kill_both_again_and_again(event):
            if event.kind is EventKind.LEASED and event.index == 0:
                kill_both()

        watch.react = kill_both_again_and_again
        with pytest.raises(RuntimeError, match=r"died 3 times without a batch|rolled back 5 times"):
            server.run_epoch(1, batches_of(1), rate)


@pytest.mark.long
def test_a_process_that_hangs_is_replaced(tmp_path):
    strategy = STRATEGIES["async"]
    with training(strategy, tmp_path) as (server, _, watch):
        results = []
        for epoch, kind in enumerate((WORKER, SERVER)):
            hang = functools.partial(watch.send, signal.SIGSTOP, kind, 0)
            watch.once(EventKind.LEASED, BatchKey(epoch, 10), hang)
            results.append(server.run_epoch(epoch, batches_of(epoch), rate))
        assert [watch.deaths_in(epoch) for epoch in range(2)] == [(1, 0), (0, 1)]
        reason = f"killed because it did not answer for {SILENCE} s"
        assert all(reason in str(event) for _, event in watch.deaths)
        check(strategy, server, watch, results)


@pytest.mark.long
def test_a_worker_that_hangs_while_servers_recover_is_counted(tmp_path):
    """It hangs when one server is back, and then the other one dies, which restarts the worker."""
    strategy = Strategy("sync", workers=2, servers=2, silence_seconds=SILENCE)
    with training(strategy, tmp_path) as (server, _, watch):

        def hang(event):
            if event.kind is EventKind.RESTARTED and event.process is SERVER:
                watch.react = lambda event: None
                watch.send(signal.SIGSTOP, WORKER, 0)
                # Until then, the worker has not answered for so long that it counts as silent.
                threading.Timer(4, watch.send, [signal.SIGKILL, SERVER, 1]).start()

        def kill_the_first():
            watch.send(signal.SIGKILL, SERVER, 0)
            watch.react = hang

        watch.once(EventKind.LEASED, BatchKey(0, 10), kill_the_first)
        result = server.run_epoch(0, batches_of(0), rate)
        assert watch.deaths_in(0) == (1, 2)
        check(strategy, server, watch, [result])


@pytest.mark.parametrize("shared", ["async"], indirect=True)
def test_a_worker_that_hangs_holds_nobody_up(shared):
    """Both workers read the same version; the second reads again before the first has received."""
    first = shared.watch.living[WORKER, 0]

    def rate_and_wake(applied):
        if applied == BATCHES // 2:
            os.kill(first, signal.SIGCONT)
        return rate(applied)

    os.kill(first, signal.SIGSTOP)
    result = shared.run(rate_and_wake)
    assert shared.watch.deaths_in(len(shared.results) - 1) == (0, 0)
    assert len(result.report()["staleness"]) - 1 > BATCHES // 2
    shared.check()


def train_for_ever(folder):
    """Train without end. Print the process IDs after all processes have started."""
    with training(STRATEGIES["async"], folder) as (server, _, watch):
        server.run_epoch(0, batches_of(0), rate)
        print(*watch.living.values(), flush=True)
        for epoch in itertools.count(1):
            server.run_epoch(epoch, batches_of(epoch), rate)


if __name__ == "__main__":
    with preloaded_ray_workers(sys.argv[2]):
        train_for_ever(Path(sys.argv[1]))
