"""Starts a training with parameter servers. This module imports Ray when it is used only."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from fineprune.distributed.parameter_servers.flat_layout import flat_layout
from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError

if TYPE_CHECKING:
    from fineprune.distributed.parameter_servers.server import MakeOptimizer
    from fineprune.distributed.parameter_servers.training import Training
    from fineprune.distributed.parameter_servers.worker import Build


@contextlib.contextmanager
def parameter_servers(
    strategy: Strategy,
    model: nn.Module,
    build: "Build",
    optimizer: "MakeOptimizer",
    *,
    threads: int = 1,
    gpus: float = 0.0,
    state: dict[str, Any] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator["Training"]:
    """Start the servers and workers of a training in the Ray that ``ray_session`` joins or starts.

    All of them end with this block.

    Args:
        strategy: Which processes there are and wait for others.
        model: The model whose parameters and buffers the training starts from. It is not changed.
            The same parameters must be frozen in the replicas.
        build: Function, picklable, that makes the replica of the worker with a given rank
            (``worker.Replica``).
        optimizer: Function, picklable, that makes the optimizer of a server (``Server.begin``).
        threads: The number of torch threads in each process.
        gpus: The number of GPUs of each worker, which are the only ones that it sees.
        state: The state of an earlier training (``Training.state``), which this one continues. It
            must have the same number of servers.
        stop: Function that is called repeatedly while Ray starts. If it returns True, the wait ends
            with RayLost.

    Raises:
        InputError: The model does not fit, the state is of another layout, or there are too few
            resources.
        RunError: Ray does not start.
    """
    if os.environ.get("RAY_ADDRESS", "local") in ("", "local"):
        # Ray reads this when it is imported. Else one for this machine listens on all interfaces.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from fineprune.distributed.parameter_servers.placement import bundles_for
    from fineprune.distributed.parameter_servers.ray_session import ray_session
    from fineprune.distributed.parameter_servers.training import Training

    layout = flat_layout(model, strategy.servers)
    if state is not None and state["layout"] != repr(layout):
        raise InputError(
            "expected a state of the same model and number of servers, got a different one: resume "
            "with the same settings"
        )
    groups, servers = bundles_for(strategy, threads, gpus)
    with ray_session(int(sum(bundle["CPU"] for bundle in groups + servers)), stop):
        training = Training(strategy, model, layout, build, optimizer, state, threads, gpus)
        try:
            yield training
        finally:
            training.close()
