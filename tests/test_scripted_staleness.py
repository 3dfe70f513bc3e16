"""Real workers that follow a script have the staleness that the simulation of it predicts."""

import itertools
import random
import time

import pytest
import torch
from torch import nn

pytest.importorskip("ray")

from fineprune.distributed.parameter_servers.start import parameter_servers
from fineprune.distributed.parameter_servers.update_rule import UpdateRule
from fineprune.distributed.simulated_workers import simulated_updates
from fineprune.distributed.strategy import Strategy

pytestmark = pytest.mark.usefixtures("running_ray")

BATCHES = 10
# The simulation has no end. Until so many updates, it begins no more batches than the training has.
UPDATES = BATCHES - 2
# The seconds that each worker's steps take. They were found by search, so that the order of the
# updates stays the same if each step takes up to NOISE seconds longer, and so that under each
# strategy the updates come from different workers and differ in staleness.
DELAYS = (
    (0.65, 0.65, 0.90, 0.90, 0.75, 0.90, 0.90, 0.75, 0.90, 0.75),
    (0.20, 0.55, 0.20, 0.65, 0.20, 0.20, 0.55, 0.55, 0.20, 0.65),
    (0.45, 1.05, 0.45, 0.45, 0.70, 1.05, 1.05, 0.70, 1.05, 0.45),
)
NOISE = 0.1
STRATEGIES = {
    "async": Strategy("async", workers=3, servers=2),
    "async, bound 2": Strategy("async", workers=3, servers=2, staleness_bound=2),
}


def delay(worker, step):
    return DELAYS[worker][step]


def simulated(strategy, delay):
    """Return the version, the staleness and the worker of each update."""
    rule = UpdateRule(bound=strategy.staleness_bound)
    updates = itertools.islice(simulated_updates(rule, strategy.workers, delay), UPDATES)
    return [(update.version, update.staleness, update.worker) for update in updates]


class Replica:
    """Its losses are its rank, so that an update shows which workers made it."""

    def __init__(self, rank):
        self.model: nn.Module = nn.Linear(2, 1)
        self.rank = rank
        self.steps = 0
        self.model(torch.ones(2)).backward()  # the first call takes longer than later ones

    def load(self, key, indices):
        return indices

    def step(self, batch, weights):
        time.sleep(delay(self.rank, self.steps))
        self.steps += 1
        self.model(torch.ones(2)).backward()
        return torch.full(batch.shape, float(self.rank))


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def trained(strategy):
    """Return the version, the staleness and the worker of each update."""
    with parameter_servers(strategy, nn.Linear(2, 1), Replica, make_optimizer) as server:
        server.wait_for_workers()
        batches = list(torch.arange(BATCHES).split(1))
        result = server.run_epoch(0, batches, lambda applied: 0.1)
    updates = sorted(result.updates, key=lambda update: update.version)
    return [(one.version, one.staleness, one.losses.int().item()) for one in updates[:UPDATES]]


@pytest.mark.parametrize("name", ["async, bound 2", pytest.param("async", marks=pytest.mark.long)])
def test_updates_are_those_of_the_simulation(name):
    strategy = STRATEGIES[name]
    expected = simulated(strategy, delay)
    for seed in range(50):
        noise = random.Random(seed)
        noisy = simulated(strategy, lambda *step, n=noise: delay(*step) + n.uniform(0, NOISE))
        assert noisy == expected
    # On a busy machine, a step may take longer than its delay and the noise. Such a training says
    # nothing, so it is repeated.
    attempts = (trained(strategy) for _ in range(3))
    assert expected in attempts
