"""Workers simulated in one process: the effect of stale gradients without a cluster.

Each simulated worker, or group of workers, computes its gradient at the weights that it has read.
The order of the updates follows from the durations of the steps and from the rule of real servers:
N equally fast workers take turns, so N - 1 updates of other workers come between a worker's read
and its own update, and the gradients of a slow one are staler. Everything is deterministic, and
nothing waits: durations are only compared.

The gradient of a group, or of synchronous workers, is the mean over several batches at the same
weights, which the training loop accumulates. Which batches synchronous backup workers delay is not
simulated: their number determines how many batches an update averages.

As with real servers, an epoch ends only when all of its gradients are applied. Therefore all
workers read the same weights at the start of each epoch, and the first gradients of an epoch have
the staleness 0, 1, 2 and so on up to N - 1, if the workers are equally fast.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fineprune.distributed.parameter_servers.update_rule import (
    Update,
    UpdateRule,
    simulated_updates,
)


class SimulatedWorkers:
    """The weights that each of N workers has read, and the weights on the server.

    During an epoch, the model holds the weights of the worker whose turn it is.

    Args:
        model: The model that the workers train. Each worker has its own copy of the parameters; all
            workers share the buffers (normalisation statistics).
        workers: The number N of workers or groups, at least 1.
        seconds: The usual duration of a step of each worker, in any unit; empty if they are equal.
        spread: The standard deviation of the logarithm of the durations.
        bound: The largest staleness; None for no bound.
        seed: The seed from which the durations are drawn.
    """

    def __init__(
        self,
        model: nn.Module,
        workers: int,
        seconds: Sequence[float] = (),
        spread: float = 0.0,
        bound: int | None = None,
        seed: int = 0,
    ) -> None:
        self._model = [p.data for p in model.parameters()]
        self._server = [torch.empty_like(p) for p in self._model]
        self._read = [[torch.empty_like(p) for p in self._model] for _ in range(workers)]
        self._seconds = list(seconds) or [1.0] * workers
        self._spread = spread
        self._rule = UpdateRule(bound=bound)
        self._seed = seed
        self._next: Update
        self.begin_epoch()

    @property
    def staleness(self) -> int:
        """The number of updates since the worker whose turn it is read its weights."""
        return self._next.staleness

    @property
    def turn(self) -> int:
        """The worker whose gradient makes the next update."""
        return self._next.workers[0]

    def begin_epoch(self, epoch: int = 0) -> None:
        """Let all workers read the model's weights and begin a step."""
        for copy in (self._server, *self._read):
            torch._foreach_copy_(copy, self._model)
        self._go_to(epoch, 0)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the gradient on the server, let its worker read, and turn to the next worker."""
        torch._foreach_copy_(self._model, self._server)
        optimizer.step()
        torch._foreach_copy_(self._server, self._model)
        for reader in self._next.readers:
            torch._foreach_copy_(self._read[reader], self._model)
        self._next = next(self._updates)
        torch._foreach_copy_(self._model, self._read[self.turn])

    def end_epoch(self) -> None:
        """Put the server's weights into the model."""
        torch._foreach_copy_(self._model, self._server)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the middle of an epoch; it holds tensors and whole numbers."""
        return {
            "server": self._server,
            "read": self._read,
            "epoch": self._epoch,
            "updates": self._next.version - 1,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of the same number of workers, and set the model's weights accordingly."""
        for own, saved in zip(
            (self._server, *self._read), (state["server"], *state["read"]), strict=True
        ):
            torch._foreach_copy_(own, saved)
        self._go_to(state["epoch"], state["updates"])
        torch._foreach_copy_(self._model, self._read[self.turn])

    def _go_to(self, epoch: int, done: int) -> None:
        """Set the next update, after so many of an epoch."""
        self._epoch = epoch
        workers = len(self._read)
        self._updates = simulated_updates(self._rule, workers, self._duration)
        self._next = next(itertools.islice(self._updates, done, None))

    def _duration(self, worker: int, step: int) -> float:
        if not self._spread:
            return self._seconds[worker]
        place = [self._seed, self._epoch, worker, step]
        drawn = np.random.default_rng(place).standard_normal()
        return self._seconds[worker] * math.exp(self._spread * drawn)
