"""Training with parameter servers in several processes equals training in one process."""

import ctypes
import itertools
import os
import re
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from logged_events import on_events
from torch import nn

from fineprune.distributed.parameter_servers.epoch import BatchKey

pytest.importorskip("ray")

from fineprune.distributed.parameter_servers.processes import Event, EventKind, ProcessKind
from fineprune.distributed.parameter_servers.start import parameter_servers
from fineprune.distributed.strategy import Strategy
from fineprune.errors import RunError

pytestmark = pytest.mark.usefixtures("running_ray")

SAMPLES, BATCH = 64, 4


def make_model():
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(values / 2)
    return model


def make_data():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (SAMPLES,), generator=generator)


class Replica:
    """A small network. It can kill its own process once, in the step of a given batch."""

    def __init__(self, kill_at=None, marker=None):
        self.model = make_model()
        self.data = make_data()
        self.kill_at = kill_at
        self.marker = marker

    def load(self, key, indices):
        return key, self.data[0][indices], self.data[1][indices]

    def step(self, batch, weights):
        key, x, y = batch
        if key == self.kill_at and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        losses = nn.functional.cross_entropy(self.model(x), y, reduction="none")
        losses.mean().backward()
        return losses.detach()


class MakeReplica:
    def __init__(self, kill_at=None, marker=None):
        self.settings = (kill_at, marker)

    def __call__(self, rank):
        return Replica(*self.settings)


class KillsItself(torch.optim.SGD):
    """SGD that kills its server once, in a given step."""

    def __init__(self, params, marker, step):
        super().__init__(params, lr=1.0, momentum=0.9)
        self.marker, self.countdown = marker, step

    def step(self, closure=None):
        self.countdown -= 1
        if not self.countdown and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


class MakeOptimizer:
    def __init__(self, marker=None, step=0):
        self.settings = (marker, step)

    def __call__(self, parameters):
        marker, step = self.settings
        if marker is not None and len(parameters) == 1:  # the first of two servers
            return KillsItself(parameters, marker, step)
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=1e-3, fused=True)


def rate(applied):
    return 0.1 / (1 + applied)


def batches_of(epoch, size=BATCH, samples=SAMPLES):
    generator = torch.Generator().manual_seed(epoch)
    return list(torch.randperm(samples, generator=generator).split(size))


def trained_alone(epochs, size, rates):
    """Train in this process; return the flat parameters and the losses of each batch."""
    model = make_model()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-3, fused=True
    )
    x, y = make_data()
    recorded = []
    for epoch in range(epochs):
        for number, batch in enumerate(batches_of(epoch, size)):
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(x[batch]), y[batch], reduction="none")
            losses.mean().backward()
            optimizer.param_groups[0]["lr"] = rates(number)
            optimizer.step()
            recorded.append((batch, losses.detach().float()))
    return flat(model), recorded


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def made(strategy, build=None, optimizer=None, **options):
    """Return a training on servers, as a context."""
    return parameter_servers(
        strategy, make_model(), build or MakeReplica(), optimizer or MakeOptimizer(), **options
    )


def trained(strategy, epochs=2, size=BATCH, **options):
    """Train with servers; return the flat parameters and the results of the epochs."""
    with made(strategy, **options) as training:
        results = [training.run_epoch(e, batches_of(e, size), rate) for e in range(epochs)]
        model = make_model()
        training.load_into(model)
    return flat(model), results


class StopAfter:
    """Requests a stop as soon as a given number of batches of an epoch are applied."""

    def __init__(self, batches):
        self.batches = batches
        self.applied = 0

    def rate(self, applied):
        self.applied = applied
        return rate(applied)

    def __call__(self):
        return self.applied >= self.batches


def stopped(training, stop):
    """Train one epoch and a part of the next one. Return the result of this part."""
    nothing = training.run_epoch(0, batches_of(0), rate, stop=lambda: True)
    assert (nothing.updates, nothing.applied, nothing.finished) == ([], 0, False)
    training.run_epoch(0, batches_of(0), rate)
    return training.run_epoch(1, batches_of(1), stop.rate, stop=stop)


@pytest.mark.parametrize(
    "strategy",
    [Strategy("sync", workers=3, backup=1), Strategy("async", workers=3)],
    ids=["sync, 1 backup", "async"],
)
def test_a_stopped_epoch_is_its_first_batches_and_goes_on_there(strategy):
    with made(strategy) as training:
        part = stopped(training, StopAfter(6))
        assert 6 <= part.applied < SAMPLES // BATCH
        assert not part.finished
        keys = [key for update in part.updates for key in update.keys]
        assert sorted(keys) == [BatchKey(1, batch) for batch in range(part.applied)]
        rest = training.run_epoch(1, batches_of(1), rate, applied=part.applied)
    assert rest.finished
    assert rest.applied == SAMPLES // BATCH
    both = SimpleNamespace(updates=[*part.updates, *rest.updates])
    check_each_once([both], first=1)
    assert {len(update.keys) for update in both.updates} == {strategy.quorum}


@pytest.mark.long
def test_a_stopped_synchronous_epoch_ends_in_another_training_bit_for_bit():
    strategy = Strategy("sync", workers=2, servers=2)
    with made(strategy) as training:
        part = stopped(training, StopAfter(6))
        state = training.state()
    with made(strategy, state=state) as training:
        rest = training.run_epoch(1, batches_of(1), rate, applied=part.applied)
        resumed = make_model()
        training.load_into(resumed)
    assert (part.finished, rest.finished) == (False, True)
    undisturbed, results = trained(strategy)
    assert torch.equal(flat(resumed), undisturbed)
    losses = [update.losses for update in [*part.updates, *rest.updates]]
    for served, expected in zip(losses, results[1].updates, strict=True):
        assert torch.equal(served, expected.losses)


def deaths_of(events):
    """Return the role of each process that died."""
    return [event.process for event in events if event.kind is EventKind.DIED]


def check_each_once(results, batches=SAMPLES // BATCH, first=0):
    """Check that each batch is in exactly one update, and the updates' indices."""
    for epoch, result in enumerate(results, first):
        applied = [key for update in result.updates for key in update.keys]
        expected = [BatchKey(epoch, batch) for batch in range(batches)]
        assert sorted(applied) == expected
        for update in result.updates:
            given = batches_of(epoch)
            assert update.indices.equal(torch.cat([given[key.batch] for key in update.keys]))
            assert update.losses.dtype == torch.float32
            assert update.losses.shape == update.indices.shape


def test_one_asynchronous_worker_is_plain_training_bit_for_bit():
    alone, recorded = trained_alone(2, BATCH, rate)
    served, results = trained(Strategy("async", workers=1))
    assert torch.equal(served, alone)
    updates = list(itertools.chain(*(result.updates for result in results)))
    assert len(updates) == len(recorded)
    for update, (indices, losses) in zip(updates, recorded, strict=True):
        assert torch.equal(update.indices, indices)
        assert torch.equal(update.losses, losses)
    assert all(result.staleness == [0] * (SAMPLES // BATCH) for result in results)


@pytest.mark.parametrize("servers", [1, 2])
def test_synchronous_workers_are_one_process_with_a_larger_batch(servers):
    alone, recorded = trained_alone(2, 2 * BATCH, lambda number: rate(2 * number))
    events: list[Event] = []
    with on_events(events.append):
        served, results = trained(Strategy("sync", workers=2, servers=servers))
    torch.testing.assert_close(served, alone, rtol=1e-12, atol=1e-12)
    check_each_once(results)
    updates = list(itertools.chain(*(result.updates for result in results)))
    for update, (indices, losses) in zip(updates, recorded, strict=True):
        assert torch.equal(update.indices, indices)
        torch.testing.assert_close(update.losses, losses)
    # Each process is reported with its process ID.
    pids = [event.pid for event in events if event.kind is EventKind.STARTED]
    assert len(pids) == len(set(pids) - {None}) == 2 + servers


def test_a_group_of_two_is_one_process_with_a_larger_batch():
    size = 7  # The members get 4 and 3 samples, and finally 1 and 0.
    alone, recorded = trained_alone(2, size, rate)
    served, results = trained(Strategy("mixed", workers=2, group=2), size=size)
    torch.testing.assert_close(served, alone, rtol=1e-12, atol=1e-12)
    updates = list(itertools.chain(*(result.updates for result in results)))
    for update, (indices, losses) in zip(updates, recorded, strict=True):
        assert torch.equal(update.indices, indices)
        torch.testing.assert_close(update.losses, losses)
    assert all(result.seconds["group reduce"] > 0 for result in results)


class KilledAtBirth:
    def __call__(self, parameters):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_server_that_cannot_start_ends_the_training():
    with pytest.raises(
        RunError, match=r"rolled back 5 times .* beyond version 0; the last time: server 0 died"
    ):
        trained(Strategy("sync", workers=1), optimizer=KilledAtBirth())


class Loads(Replica):
    """Its steps wait until another batch is being loaded, as long as there are further batches."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches
        self.loaded = []
        self.loading = threading.Condition()

    def load(self, key, indices):
        with self.loading:
            self.loaded.append(key)
            self.loading.notify_all()
        return super().load(key, indices)

    def step(self, batch, weights):
        further = batch[0].batch + 1 < self.batches
        with self.loading:
            if not self.loading.wait_for(lambda: self.loaded[-1] != batch[0] or not further, 30):
                raise RuntimeError("no batch is loaded during this step")
        return super().step(batch, weights)


class MakeLoads:
    def __call__(self, rank):
        return Loads(SAMPLES // BATCH)


def test_the_next_batch_is_loaded_during_a_step():
    alone, _ = trained_alone(2, BATCH, rate)
    served, _ = trained(Strategy("async", workers=1), build=MakeLoads())
    assert torch.equal(served, alone)


class SlowToStart(MakeOptimizer):
    """It does not let other threads run, as the import of a large library may."""

    def __call__(self, parameters):
        ctypes.PyDLL(None).sleep(8)
        return super().__call__(parameters)


@pytest.mark.long
def test_a_server_that_takes_long_to_start_is_not_killed_as_silent():
    events: list[Event] = []
    with on_events(events.append):
        _, results = trained(
            Strategy("async", workers=1, silence_seconds=20), optimizer=SlowToStart()
        )
    check_each_once(results)
    assert deaths_of(events) == []


class Failing(Replica):
    def step(self, batch, weights):
        raise RuntimeError("shapes do not match\nthe first is (3, 4)")


@pytest.mark.parametrize("members", [1, 2])
def test_an_error_of_the_step_reaches_the_caller(members):
    strategy = Strategy("mixed", workers=members, group=members)
    with pytest.raises(RuntimeError, match="shapes do not match") as raised:
        trained(strategy, build=lambda rank: Failing())
    place = r"\(in a worker or server: .*test_parameter_servers\.py, line \d+\)"
    assert re.fullmatch(f"RuntimeError: shapes do not match {place}", str(raised.value))
    assert "in step" in raised.value.__notes__[0]  # the worker's stack trace


def test_with_a_backup_worker_every_batch_is_applied_once():
    _, results = trained(Strategy("sync", workers=3, backup=1))
    check_each_once(results)
    for result in results:
        assert [len(update.keys) for update in result.updates] == [2] * (SAMPLES // BATCH // 2)


def test_a_killed_synchronous_worker_changes_nothing(tmp_path):
    alone, _ = trained_alone(2, 2 * BATCH, lambda number: rate(2 * number))
    build = MakeReplica(BatchKey(0, 5), tmp_path / "killed")
    events: list[Event] = []
    with on_events(events.append):
        served, results = trained(Strategy("sync", workers=2, servers=2), build=build)
    check_each_once(results)
    assert (tmp_path / "killed").exists()
    assert deaths_of(events) == [ProcessKind.WORKER]
    torch.testing.assert_close(served, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_after_a_killed_server_every_batch_is_applied_once(tmp_path, mode):
    optimizer = MakeOptimizer(tmp_path / "killed", 7)
    strategy = Strategy(mode, workers=2, servers=2, snapshot_every=4)
    events: list[Event] = []
    with on_events(events.append):
        _, results = trained(strategy, optimizer=optimizer)
    check_each_once(results)
    assert (tmp_path / "killed").exists()
    assert deaths_of(events) == [ProcessKind.SERVER]
    assert results[0].undone > 0
