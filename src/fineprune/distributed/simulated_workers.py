"""Asynchronous workers simulated in one process: the effect of stale gradients without a cluster.

N simulated workers take turns, as N equally fast workers would. Each computes its gradient at the
weights that it read after its own last update, so N - 1 updates of other workers come between its
read and its push. The update rule is that of the parameter server. Everything is deterministic;
speed is not simulated.

As with real servers, an epoch ends only when all of its gradients are applied. Therefore all
workers read the same weights at the start of each epoch, and the first gradients of an epoch have
the staleness 0, 1, 2 and so on up to N - 1.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fineprune.errors import InputError


class SimulatedWorkers:
    """The weights that each of N workers has read, and the weights on the server.

    During an epoch, the model holds the weights of the worker whose turn it is.

    Args:
        model: The model that the workers train. Each worker has its own copy of the parameters; all
            workers share the buffers (normalisation statistics).
        workers: The number N of workers, at least 1.

    Raises:
        InputError: There is no worker.
    """

    def __init__(self, model: nn.Module, workers: int) -> None:
        if workers < 1:
            raise InputError(f"expected at least one simulated worker, got {workers}")
        self._model = [p.data for p in model.parameters()]
        self._server = [torch.empty_like(p) for p in self._model]
        self._read = [[torch.empty_like(p) for p in self._model] for _ in range(workers)]
        self._read_at = [0] * workers
        self._updates = 0

    @property
    def staleness(self) -> int:
        """The number of updates since the worker whose turn it is read its weights."""
        return self._updates - self._read_at[self._turn]

    @property
    def _turn(self) -> int:
        return self._updates % len(self._read)

    def begin_epoch(self) -> None:
        """Let all workers read the model's weights; the first worker is next."""
        for copy in (self._server, *self._read):
            torch._foreach_copy_(copy, self._model)
        self._read_at = [0] * len(self._read)
        self._updates = 0

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the gradient on the server, let its worker read, and turn to the next worker."""
        torch._foreach_copy_(self._model, self._server)
        optimizer.step()
        torch._foreach_copy_(self._server, self._model)
        torch._foreach_copy_(self._read[self._turn], self._model)
        turn = self._turn
        self._updates += 1
        self._read_at[turn] = self._updates
        torch._foreach_copy_(self._model, self._read[self._turn])

    def end_epoch(self) -> None:
        """Put the server's weights into the model."""
        torch._foreach_copy_(self._model, self._server)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the middle of an epoch; it holds tensors and whole numbers."""
        return {
            "server": self._server,
            "read": self._read,
            "read_at": self._read_at,
            "updates": self._updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of the same number of workers, and set the model's weights accordingly."""
        _copy(self._server, state["server"])
        for own, saved in zip(self._read, state["read"], strict=True):
            _copy(own, saved)
        self._read_at = list(state["read_at"])
        self._updates = state["updates"]
        torch._foreach_copy_(self._model, self._read[self._turn])


def _copy(own: Iterable[Tensor], saved: Iterable[Tensor]) -> None:
    for one, other in zip(own, saved, strict=True):
        one.copy_(other)
