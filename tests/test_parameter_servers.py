"""Training with parameter servers in several processes equals training in one process."""

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

from fineprune.distributed.parameter_servers.processes import Event, EventKind
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
    """A small network."""

    def __init__(self, rank):
        self.model = make_model()
        self.data = make_data()

    def load(self, key, indices):
        return key, self.data[0][indices], self.data[1][indices]

    def step(self, batch, weights):
        _, x, y = batch
        losses = nn.functional.cross_entropy(self.model(x), y, reduction="none")
        losses.mean().backward()
        return losses.detach()


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=1e-3, fused=True)


def rate(applied):
    return 0.1 / (1 + applied)


def batches_of(epoch, size=BATCH, samples=SAMPLES):
    generator = torch.Generator().manual_seed(epoch)
    return list(torch.randperm(samples, generator=generator).split(size))


def trained_alone(epochs, size, rates):
    """Train in this process; return the flat parameters and the losses of each batch."""
    model = make_model()
    optimizer = make_optimizer(list(model.named_parameters()))
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


def made(strategy, build=Replica, optimizer=make_optimizer, **options):
    """Return a training on servers, as a context."""
    return parameter_servers(strategy, make_model(), build, optimizer, **options)


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
    assert all(result.report()["staleness"] == [SAMPLES // BATCH] for result in results)


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
    assert all(result.report()["seconds"]["group reduce"] > 0 for result in results)


def killed_at_birth(parameters):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_server_that_cannot_start_ends_the_training():
    with pytest.raises(
        RunError, match=r"rolled back 5 times .* beyond version 0; the last time: server 0 died"
    ):
        trained(Strategy("sync", workers=1), optimizer=killed_at_birth)


class Loads(Replica):
    """Its steps wait until another batch is being loaded, as long as there are further batches."""

    def __init__(self, rank):
        super().__init__(rank)
        self.loaded = []
        self.loading = threading.Condition()

    def load(self, key, indices):
        with self.loading:
            self.loaded.append(key)
            self.loading.notify_all()
        return super().load(key, indices)

    def step(self, batch, weights):
        further = batch[0].batch + 1 < SAMPLES // BATCH
        with self.loading:
            if not self.loading.wait_for(lambda: self.loaded[-1] != batch[0] or not further, 30):
                raise RuntimeError("no batch is loaded during this step")
        return super().step(batch, weights)


def test_the_next_batch_is_loaded_during_a_step():
    alone, _ = trained_alone(2, BATCH, rate)
    served, _ = trained(Strategy("async", workers=1), build=Loads)
    assert torch.equal(served, alone)


class Failing(Replica):
    def step(self, batch, weights):
        raise RuntimeError("shapes do not match\nthe first is (3, 4)")


@pytest.mark.parametrize("members", [1, 2])
def test_an_error_of_the_step_reaches_the_caller(members):
    strategy = Strategy("mixed", workers=members, group=members)
    with pytest.raises(RuntimeError, match="shapes do not match") as raised:
        trained(strategy, build=Failing)
    place = r"\(in a worker or server: .*test_parameter_servers\.py, line \d+\)"
    assert re.fullmatch(f"RuntimeError: shapes do not match {place}", str(raised.value))
    assert "in step" in raised.value.__notes__[0]  # the worker's stack trace


def test_with_a_backup_worker_every_batch_is_applied_once():
    _, results = trained(Strategy("sync", workers=3, backup=1))
    check_each_once(results)
    for result in results:
        assert [len(update.keys) for update in result.updates] == [2] * (SAMPLES // BATCH // 2)
