"""A parameter server: a Ray actor with its part of the parameters and of the optimizer.

A server makes no decisions. Ray executes its calls in the order in which the driver submits them.
So that is the order of the updates on all servers, and none of them has to ask the others.
"""

import copy
import io
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fineprune.distributed.optimizer_rate import set_rate
from fineprune.distributed.parameter_servers.epoch import Array
from fineprune.distributed.parameter_servers.failures import Behind, told_as_text
from fineprune.distributed.parameter_servers.flat_layout import FlatLayout

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


class Actor:
    """What workers and servers have in common, with so many torch threads."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        # Arrays from Ray's object store are not writable, and nothing here writes to them.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        # A request to stop often reaches all processes of a training. The driver then still needs
        # this one for a checkpoint. A handler, since programs inherit what is ignored.
        signal.signal(signal.SIGTERM, lambda number, frame: None)

    def where(self) -> tuple[int, str]:
        """Return the ID of this process and the name of its node."""
        return os.getpid(), socket.gethostname()


class Server(Actor):
    """One server's part of the parameters. ``begin`` is called first."""

    @told_as_text
    def begin(
        self, layout: FlatLayout, index: int, optimizer: MakeOptimizer, state: Array
    ) -> tuple[tuple[int, str], Array]:
        """Take over a state, also in place of the present one.

        Args:
            layout: The layout of the parameters.
            index: The index of this server in it.
            optimizer: Function that makes the optimizer, given flat pieces of parameters. It must
                be elementwise, as SGD, RMSProp and Adam are.
            state: What ``snapshot`` or ``state_of`` returned.

        Returns:
            Where this process runs, and the parameters, shape (elements of the part,).
        """
        saved = loaded(state)
        self._parameters: Tensor = saved["parameters"]
        self._gradient = torch.zeros_like(self._parameters)
        sizes = [size for _, size in layout.pieces(index)]
        pieces = torch.split(self._parameters, sizes)
        for piece, gradient in zip(pieces, torch.split(self._gradient, sizes), strict=True):
            piece.grad = gradient
        self._optimizer = optimizer(pieces)
        if saved["optimizer"] is not None:
            # Copied, because the optimizer would use and change the given tensors themselves.
            self._optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        self._version: int = saved["version"]
        return self.where(), self._parameters.numpy()

    @told_as_text
    def update(
        self, version: int, rate: float, shares: Sequence[float], *gradients: Array
    ) -> tuple[dict[str, float], Array]:
        """Apply the weighted sum of gradients with a learning rate, which makes a version.

        Return the seconds of each phase, and the parameters, of the gradients' shape.

        Raises:
            Behind: An update before this one failed.
        """
        if version != self._version + 1:
            raise Behind(f"expected update {self._version + 1} to follow, got {version}")
        began = time.perf_counter()
        weighted_sum(shares, gradients, out=self._gradient)
        set_rate(self._optimizer, rate)
        self._optimizer.step()
        self._version = version
        return {"apply": time.perf_counter() - began}, self._parameters.numpy()

    @told_as_text
    def snapshot(self) -> Array:
        """Return the complete state."""
        return state_of(self._parameters, self._optimizer.state_dict(), self._version)


def weighted_sum(shares: Sequence[float], gradients: Sequence[Array], out: Tensor) -> None:
    """Write the sum of gradients, each times its share, into ``out``, which has their shape.

    int16 stands for bfloat16, which NumPy does not have.
    """
    for place, (share, gradient) in enumerate(zip(shares, gradients, strict=True)):
        arrived = torch.from_numpy(gradient)
        if arrived.dtype == torch.int16:
            arrived = arrived.view(torch.bfloat16).to(out.dtype)
        if place == 0:
            torch.mul(arrived, share, out=out)
        else:
            out.add_(arrived, alpha=share)


def state_of(parameters: Tensor, optimizer: dict[str, Any] | None, version: int) -> Array:
    """Return a server's state as bytes, uint8: tensors cross Ray slowly, and arrays quickly.

    The state of the optimizer is None if it has made no step.
    """
    file = io.BytesIO()
    torch.save({"parameters": parameters, "optimizer": optimizer, "version": version}, file)
    return np.frombuffer(file.getbuffer(), np.uint8)


def loaded(state: Array) -> dict[str, Any]:
    """Return the arguments of ``state_of``, by their names."""
    result: dict[str, Any] = torch.load(io.BytesIO(state.data), weights_only=True)
    return result
