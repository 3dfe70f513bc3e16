"""A parameter server: its part of the parameters and of the optimizer, and its links to workers.

A server makes no decisions. The coordinator numbers the requests to all servers in one sequence,
and each server executes them in this order. Therefore all servers apply the same gradients in the
same order and send the same version to a worker.
"""

import contextlib
import copy
import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fineprune.distributed.optimizer_rate import set_rate
from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.flat_layout import FlatLayout
from fineprune.distributed.parameter_servers.link import Link, LinkBroken, Transfer
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous

MakeOptimizer = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]


class Superseded(RuntimeError):
    """The server was rolled back while this request waited for its place in the sequence."""


class Contribution(NamedTuple):
    """What one staged gradient contributes to an update.

    Attributes:
        key: The gradient's batch.
        reader: The worker that staged the gradient.
        share: The weight of the gradient in the mean.
    """

    key: BatchKey
    reader: str
    share: float


@dataclass(frozen=True)
class Answered:
    """The result of an update: the durations of its phases, and the workers that got no answer.

    Attributes:
        version: The version of the parameters after the update.
        queue: The time spent waiting for earlier requests, in seconds.
        apply: The time for the mean of the gradients, the step of the optimizer and the copies for
            the readers, in seconds.
        send: The time until the last reader had its copy, in seconds.
        broken: The readers whose links broke.
    """

    version: int
    queue: float
    apply: float
    send: float
    broken: list[str]


class _Reader:
    """A worker's link and its two buffers, each of shape (elements of the part,)."""

    def __init__(self, link: Link, like: Tensor) -> None:
        self.link = link
        self.gradient = torch.empty_like(like)
        self.answer = torch.empty_like(like)
        self.sending: Transfer | None = None
        self.staged: BatchKey | None = None


class ParameterServer:
    """One server's part of the parameters. The methods may be called from several threads.

    Args:
        host: The address of this process for links.
        layout: The layout of the model's parameters.
        index: The index of this server.
        part: The part of the parameters that this server holds, shape (elements of the part,). It
            is copied.
        optimizer: Function that makes the optimizer from the part's pieces
            (``FlatLayout.pieces``), which are flat tensors. They are given as pairs of the name of
            the parameter and the piece, which torch's optimizers accept. The optimizer must be
            elementwise, as SGD, RMSProp and Adam are, because a piece does not have the shape of
            its parameter and may be only a part of it. If a parameter group has a number
            ``lr_scale``, the learning rate of the group is multiplied by it.
        rendezvous: The settings of all links.
    """

    def __init__(
        self,
        host: str,
        layout: FlatLayout,
        index: int,
        part: np.ndarray[Any, Any],
        optimizer: MakeOptimizer,
        rendezvous: Rendezvous,
    ) -> None:
        self._host = host
        self._layout = layout
        self._index = index
        self._parameters = torch.from_numpy(np.array(part))
        self._gradient = torch.zeros_like(self._parameters)
        sizes = layout.pieces(index)
        pieces = torch.split(self._parameters, sizes)
        for piece, gradient in zip(pieces, torch.split(self._gradient, sizes), strict=True):
            piece.grad = gradient
        self._optimizer = optimizer(list(zip(layout.owners(index), pieces, strict=True)))
        self._rendezvous = rendezvous
        self._readers: dict[str, _Reader] = {}
        self._version = 0
        self._sequence = 0
        self._applied: set[BatchKey] = set()
        self._changed = threading.Condition()

    def ping(self) -> int:
        """Return the version. The answer shows that this server is alive."""
        return self._version

    def connect(self, reader: str) -> None:
        """Make the link to a worker.

        Args:
            reader: The name of the worker. Each new link has a new name.

        Raises:
            LinkBroken: The worker did not connect in time.
        """
        name = f"{reader}-server{self._index}"
        link = self._rendezvous.link(self._layout, self._index, name, 1, self._host)
        with self._changed:
            self._readers[reader] = _Reader(link, self._parameters)

    def forget(self, sequence: int, reader: str) -> None:
        """After a request has been executed, close the link to a worker and drop its gradient.

        Args:
            sequence: The number of the last request that may use the worker's gradient.
            reader: The name of the worker.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._sequence >= sequence)
            gone = self._readers.pop(reader, None)
        if gone is not None:
            gone.link.close()

    def stage(self, reader: str, key: BatchKey) -> None:
        """Receive a worker's gradient of a batch. It has no effect until an update applies it.

        Raises:
            LinkBroken: The worker died, or sent nothing in time.
            RuntimeError: The worker sent the gradient of another batch.
        """
        one = self._readers.get(reader)
        if one is None:
            raise LinkBroken(f"server {self._index} knows no worker {reader!r}")
        one.staged = None
        batch = one.link.receive(one.gradient)
        if batch != key.batch:
            raise RuntimeError(f"expected the gradient of batch {key.batch}, got {batch}")
        one.staged = key

    def update(
        self,
        sequence: int,
        contributions: Sequence[Contribution],
        readers: Sequence[str],
        rate: float,
    ) -> Answered:
        """Apply staged gradients as one update, and send the parameters to readers.

        Args:
            sequence: The number of this request.
            contributions: The gradients to apply, in the order of their keys. If there are none,
                the parameters and their version stay the same.
            readers: The workers that receive the parameters after the update.
            rate: The learning rate of the update.

        Raises:
            Superseded: This server was rolled back in the meantime.
            RuntimeError: A gradient was not staged, or was applied before.
        """
        came = time.perf_counter()
        with self._in_sequence(sequence):
            began = time.perf_counter()
            if contributions:
                self._apply(contributions, rate)
            version = self._version
            answering = [(name, self._readers.get(name)) for name in readers]
            for _, reader in answering:
                if reader is not None:
                    reader.answer.copy_(self._parameters)
        applied = time.perf_counter()
        broken = _send(answering, version)
        sent = time.perf_counter()
        return Answered(version, began - came, applied - began, sent - applied, broken)

    def parameters(self, sequence: int) -> Tensor:
        """Return a copy of the part, shape (elements of the part,)."""
        with self._in_sequence(sequence):
            return self._parameters.clone()

    def state(self, sequence: int) -> bytes:
        """Return the complete state of this server, in the format of ``torch.save``.

        The state is a dict with ``parameters``, ``optimizer``, ``version`` and ``keys`` (the
        batches applied in the last epoch, shape (keys, 2)). It consists of tensors, numbers, lists
        and dicts only.
        """
        held = io.BytesIO()
        with self._in_sequence(sequence):
            torch.save(
                {
                    "parameters": self._parameters,
                    "optimizer": self._optimizer.state_dict(),
                    "version": self._version,
                    "keys": torch.tensor(sorted(self._applied), dtype=torch.int64).view(-1, 2),
                },
                held,
            )
        return held.getvalue()

    def snapshot(self, sequence: int, path: Path) -> None:
        """Write ``state(sequence)`` to a file atomically."""
        content = self.state(sequence)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def restore(self, sequence: int, source: Path | bytes) -> int:
        """Restore a snapshot or a state.

        All links are closed, and requests that wait for an earlier request end with ``Superseded``.

        Args:
            sequence: The number of the last request that counts as executed afterwards.
            source: The file of a snapshot, or the result of ``state``.

        Returns:
            The version of the restored parameters.
        """
        file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
        state = torch.load(file, weights_only=True)
        with self._changed:
            self._parameters.copy_(state["parameters"])
            # Copied, because the optimizer would use and change the given tensors themselves.
            self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            self._version = state["version"]
            self._applied = {BatchKey(*key) for key in state["keys"].tolist()}
            self._sequence = sequence
            gone = list(self._readers.values())
            self._readers.clear()
            self._changed.notify_all()
        for reader in gone:
            reader.link.close()
        return self._version

    @contextlib.contextmanager
    def _in_sequence(self, sequence: int) -> Iterator[None]:
        """Wait until the previous request has been executed, and hold the lock during this one."""
        with self._changed:
            self._changed.wait_for(lambda: self._sequence >= sequence - 1)
            if self._sequence != sequence - 1:
                raise Superseded(
                    f"server {self._index} has executed request {self._sequence} before {sequence}"
                )
            yield
            self._sequence = sequence
            self._changed.notify_all()

    def _apply(self, contributions: Sequence[Contribution], rate: float) -> None:
        for place, (key, name, share) in enumerate(contributions):
            reader = self._readers.get(name)
            if reader is None or reader.staged != key:
                raise RuntimeError(f"expected {name!r} to have staged {key}, got no such gradient")
            if key in self._applied:
                raise RuntimeError(f"expected {key} for the first time, but it was applied before")
            if place == 0:
                torch.mul(reader.gradient, share, out=self._gradient)
            else:
                self._gradient.add_(reader.gradient, alpha=share)
        set_rate(self._optimizer, rate)
        self._optimizer.step()
        self._version += 1
        epoch = contributions[0].key.epoch
        if self._applied and next(iter(self._applied)).epoch != epoch:
            self._applied.clear()  # gradients of an earlier epoch can no longer arrive
        for key, name, _ in contributions:
            self._applied.add(key)
            self._readers[name].staged = None


def _send(answering: Sequence[tuple[str, _Reader | None]], version: int) -> list[str]:
    """Send the parameters to all readers at the same time; return those whose links broke."""
    under_way = []
    broken = []
    for name, reader in answering:
        try:
            if reader is None:
                raise LinkBroken(f"no worker {name!r}")
            if reader.sending is not None:
                # This transfer is complete, but the request that sent it may still wait for a
                # slower reader.
                reader.sending.wait()
            reader.sending = reader.link.send_later(reader.answer, version)
            under_way.append((name, reader.sending))
        except LinkBroken:
            broken.append(name)
    for name, transfer in under_way:
        try:
            transfer.wait()
        except LinkBroken:
            broken.append(name)
    return broken
