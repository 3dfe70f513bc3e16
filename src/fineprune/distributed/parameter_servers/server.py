"""A parameter server: its part of the parameters, its part of the optimizer, and who may read.

Nothing here decides anything. The driver numbers the turns of all servers; each takes them in that
order, so that all apply the same gradients in the same order and answer with the same version.
"""

import copy
import io
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.flat_layout import FlatLayout
from fineprune.distributed.parameter_servers.link import (
    Link,
    LinkBroken,
    Transfer,
    WireFormat,
    join_store,
)
from fineprune.errors import InputError

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


class Superseded(RuntimeError):
    """The server went back to a snapshot while this call waited for its turn."""


@dataclass(frozen=True)
class Rendezvous:
    """Where links find each other, and how they are made.

    Attributes:
        host, port: of the store.
        timeout_seconds: of each message.
        bfloat16: send float32 gradients rounded to bfloat16.
    """

    host: str
    port: int
    timeout_seconds: float = 60.0
    bfloat16: bool = False

    def link(self, layout: FlatLayout, server: int, name: str, side: int, host: str) -> Link:
        """Make one end of a link to a server: side 0 is the worker's. Both must be making it."""
        part = layout.part(server)
        wire = torch.bfloat16 if self.bfloat16 else None
        elements = part.stop - part.start
        return Link(
            join_store(self.host, self.port, timeout_seconds=self.timeout_seconds),
            name,
            side,
            WireFormat(elements, layout.dtype, wire),
            WireFormat(elements, layout.dtype),
            contents=layout.contents,
            host=host,
            timeout_seconds=self.timeout_seconds,
        )


@dataclass(frozen=True)
class Answered:
    """What a turn took, in seconds, and whom it could not answer.

    Attributes:
        version: of the parameters after it.
        queue: waiting for the turns before.
        apply: averaging the gradients, the optimizer's step and the copy for the readers.
        send: until the last reader had it.
        broken: readers whose links broke.
    """

    version: int
    queue: float
    apply: float
    send: float
    broken: list[str]


class _Reader:
    """A worker's link and its two buffers, shape (elements of the part,) each."""

    def __init__(self, link: Link, like: Tensor) -> None:
        self.link = link
        self.gradient = torch.empty_like(like)
        self.answer = torch.empty_like(like)
        self.sending: Transfer | None = None
        self.staged: BatchKey | None = None


class ParameterServer:
    """One server's part of the parameters. Its methods may be called from several threads.

    Args:
        layout: of the model's parameters.
        index: of this server.
        parameters: its part, shape (elements of the part,); copied.
        optimizer: builds the optimizer from the part's pieces (`FlatLayout.pieces`), flat tensors.
            It must treat each element by itself, as SGD, RMSProp and Adam do: pieces do not have
            the parameters' shapes, and a piece may be half of one.
        rendezvous: how links are made.
        host: this machine's address for links.
    """

    def __init__(
        self,
        layout: FlatLayout,
        index: int,
        parameters: Tensor,
        optimizer: MakeOptimizer,
        rendezvous: Rendezvous,
        host: str = "127.0.0.1",
    ) -> None:
        self._layout = layout
        self._index = index
        self._parameters = parameters.detach().clone()
        self._gradient = torch.zeros_like(self._parameters)
        sizes = layout.pieces(index)
        pieces = torch.split(self._parameters, sizes)
        for piece, gradient in zip(pieces, torch.split(self._gradient, sizes), strict=True):
            piece.grad = gradient
        self._optimizer = optimizer(list(pieces))
        self._rendezvous = rendezvous
        self._host = host
        self._readers: dict[str, _Reader] = {}
        self._version = 0
        self._turn = 0
        self._applied: set[BatchKey] = set()
        self._changed = threading.Condition()

    def ping(self) -> int:
        """Return the version; says that this server lives."""
        return self._version

    def connect(self, reader: str) -> None:
        """Make the link to a worker, known by this name: one name for each link ever made.

        Raises:
            LinkBroken: the worker did not come.
        """
        name = f"{reader}-server{self._index}"
        link = self._rendezvous.link(self._layout, self._index, name, 1, self._host)
        with self._changed:
            self._readers[reader] = _Reader(link, self._parameters)

    def forget(self, turn: int, reader: str) -> None:
        """Wait until this turn was taken, close the link to a worker, and drop what it staged."""
        with self._changed:
            # A turn that was announced may take the gradient of a worker that died since.
            self._changed.wait_for(lambda: self._turn >= turn)
            gone = self._readers.pop(reader, None)
        if gone is not None:
            gone.link.close()

    def stage(self, reader: str, key: BatchKey) -> None:
        """Receive a worker's gradient of a batch. It has no effect before its turn to be applied.

        Raises:
            LinkBroken: the worker died, or sent nothing in time.
            InputError: the gradient is of another batch.
        """
        one = self._readers.get(reader)
        if one is None:
            raise LinkBroken(f"server {self._index} knows no worker {reader!r}")
        one.staged = None
        number = one.link.receive(one.gradient)
        if number != key.batch:
            raise InputError(f"expected the gradient of batch {key.batch}, got {number}")
        one.staged = key

    def update(
        self,
        turn: int,
        gradients: Sequence[tuple[BatchKey, str, float]],
        readers: Sequence[str],
        rate: float,
    ) -> Answered:
        """Wait for this turn, apply staged gradients as one update, and answer readers.

        Args:
            turn: its number; the turn before must have been taken.
            gradients: key, reader that staged it, and share in the mean, in the order of keys.
                None at all is no update: the parameters and their version stay.
            readers: who gets the parameters as this turn leaves them.
            rate: learning rate of the update.

        Raises:
            Superseded: this server went back to a snapshot meanwhile.
            InputError: a gradient was not staged, or was applied before.
        """
        came = time.perf_counter()
        with self._changed:
            self._wait_for(turn)
            began = time.perf_counter()
            if gradients:
                self._apply(gradients, rate)
            version = self._version
            answering = [(name, self._readers.get(name)) for name in readers]
            for _, reader in answering:
                if reader is not None:
                    reader.answer.copy_(self._parameters)
            self._turn = turn
            self._changed.notify_all()
        applied = time.perf_counter()
        broken = _send(answering, version)
        sent = time.perf_counter()
        return Answered(version, began - came, applied - began, sent - applied, broken)

    def parameters(self, turn: int) -> Tensor:
        """Wait for this turn, and return a copy of the part, shape (elements of the part,)."""
        with self._changed:
            self._wait_for(turn)
            copied = self._parameters.clone()
            self._turn = turn
            self._changed.notify_all()
        return copied

    def state(self, turn: int) -> bytes:
        """Wait for this turn, and return everything a server resumes from, as `torch.save` has it.

        It holds `parameters`, `optimizer`, `version` and `keys`, the batches applied in the last
        epoch, shape (keys, 2); tensors, numbers, lists and dicts only.
        """
        with self._changed:
            self._wait_for(turn)
            held = io.BytesIO()
            torch.save(
                {
                    "parameters": self._parameters,
                    "optimizer": self._optimizer.state_dict(),
                    "version": self._version,
                    "keys": torch.tensor(sorted(self._applied), dtype=torch.int64).view(-1, 2),
                },
                held,
            )
            self._turn = turn
            self._changed.notify_all()
        return held.getvalue()

    def snapshot(self, turn: int, path: Path) -> None:
        """Write `state(turn)` to a file, all of it or nothing."""
        content = self.state(turn)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def restore(self, turn: int, source: Path | bytes) -> int:
        """Go back to a snapshot or state, as after this turn; forget all workers.

        Calls that wait for an earlier turn end with `Superseded`.

        Returns:
            The version.
        """
        file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
        state = torch.load(file, weights_only=True)
        with self._changed:
            self._parameters.copy_(state["parameters"])
            # The optimizer would go on with the very tensors that it is given.
            self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            self._version = state["version"]
            self._applied = {BatchKey(*key) for key in state["keys"].tolist()}
            self._turn = turn
            gone = list(self._readers.values())
            self._readers.clear()
            self._changed.notify_all()
        for reader in gone:
            reader.link.close()
        return self._version

    def _wait_for(self, turn: int) -> None:
        self._changed.wait_for(lambda: self._turn >= turn - 1)
        if self._turn != turn - 1:
            raise Superseded(f"server {self._index} has taken turn {self._turn} before {turn}")

    def _apply(self, gradients: Sequence[tuple[BatchKey, str, float]], rate: float) -> None:
        for place, (key, name, share) in enumerate(gradients):
            reader = self._readers.get(name)
            if reader is None or reader.staged != key:
                raise InputError(f"expected {name!r} to have staged {key}, got no such gradient")
            if key in self._applied:
                raise InputError(f"expected {key} for the first time, but it was applied before")
            if place == 0:
                torch.mul(reader.gradient, share, out=self._gradient)
            else:
                self._gradient.add_(reader.gradient, alpha=share)
        _set_rate(self._optimizer, rate)
        self._optimizer.step()
        self._version += 1
        epoch = gradients[0][0].epoch
        if self._applied and next(iter(self._applied)).epoch != epoch:
            self._applied.clear()  # epochs drain, so that none of an earlier one can come back
        for key, name, _ in gradients:
            self._applied.add(key)
            self._readers[name].staged = None


def _send(answering: Sequence[tuple[str, _Reader | None]], version: int) -> list[str]:
    """Send each reader its answer, all at once; return those whose links broke."""
    under_way = []
    broken = []
    for name, reader in answering:
        try:
            if reader is None:
                raise LinkBroken(f"no worker {name!r}")
            if reader.sending is not None:
                # It has arrived; the turn that sent it may still be waiting for a slower reader.
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


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
