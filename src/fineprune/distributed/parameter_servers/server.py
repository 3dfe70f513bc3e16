"""A parameter server: its part of the parameters and of the optimizer, and its links to workers.

A server makes no decisions. All servers get the same requests in the same order, and each executes
them one after another. Therefore all servers apply the same gradients in the same order and send
the same version to a worker.
"""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fineprune.distributed.optimizer_rate import set_rate
from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.channel import Channel
from fineprune.distributed.parameter_servers.flat_layout import FlatLayout
from fineprune.distributed.parameter_servers.link import Link, LinkBroken, Transfer
from fineprune.distributed.parameter_servers.messages import (
    Admit,
    Contribution,
    Done,
    Forget,
    Message,
    Restore,
    Snapshot,
    Update,
    Written,
)
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous
from fineprune.writing import replacing

MakeOptimizer = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]


class _Reader:
    """A group's link and its two buffers, each of shape (elements of the part,).

    Attributes:
        link: The link; None until it is made.
        staged: The number of the batch whose gradient ``gradient`` holds; -1 for none.
        sending: The last transfer of parameters.
        gone: Whether the link is closed or broken, or could not be made.
        failure: Why the thread that receives gradients has ended, if that is unexpected.
    """

    def __init__(self, like: Tensor) -> None:
        self.gradient = torch.empty_like(like)
        self.answer = torch.empty_like(like)
        self.link: Link | None = None
        self.staged = -1
        self.sending: Transfer | None = None
        self.gone = False
        self.failure: Exception | None = None


class ParameterServer:
    """One server's part of the parameters.

    Gradients are received in one thread per group, and wait there, without an effect, for the
    update that applies them.

    Args:
        host: The address of this process for links.
        part: The part of the parameters that this server holds, shape (elements of the part,). It
            is copied.
        optimizer: Function that makes the optimizer from the part's pieces
            (``FlatLayout.pieces``), which are flat tensors. They are given as pairs of the name of
            the parameter and the piece, which torch's optimizers accept. The optimizer must be
            elementwise, as SGD, RMSProp and Adam are, because a piece does not have the shape of
            its parameter and may be only a part of it. If a parameter group has a number
            ``lr_scale``, the learning rate of the group is multiplied by it.
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
        names, sizes = map(list, zip(*layout.pieces(index), strict=True))
        pieces = torch.split(self._parameters, sizes)
        for piece, gradient in zip(pieces, torch.split(self._gradient, sizes), strict=True):
            piece.grad = gradient
        self._optimizer = optimizer(list(zip(names, pieces, strict=True)))
        self._rendezvous = rendezvous
        self._readers: dict[str, _Reader] = {}
        self._version = 0
        self._applied: set[BatchKey] = set()
        self._seconds = {"apply": 0.0, "send": 0.0}
        self._changed = threading.Condition()

    def serve(self, channel: Channel) -> None:
        """Execute the requests of the coordinator."""
        while True:
            answer = self._execute(channel.receive())
            if answer is not None:
                channel.send(answer)

    def _execute(self, request: Message) -> Message | None:
        match request:
            case Update():
                self.update(request)
            case Admit():
                self._admit(request.reader)
            case Forget():
                self._forget(request.reader)
            case Snapshot():
                self.snapshot(Path(request.path))
                seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
                return Written(request.number, seconds)
            case Restore():
                self.restore(Path(request.path))
                return Done()
            case _:
                raise TypeError(f"expected a request to a server, got {request!r}")
        return None

    def update(self, update: Update) -> None:
        """Apply staged gradients as one update, and start to send the parameters to readers."""
        began = time.perf_counter()
        if update.contributions:
            self._apply(update.contributions, update.rate)
        applied = time.perf_counter()
        for name in update.readers:
            self._answer(name)
        self._seconds["apply"] += applied - began
        self._seconds["send"] += time.perf_counter() - applied

    def snapshot(self, path: Path) -> None:
        """Write the complete state to a file, atomically and in the format of ``torch.save``.

        The state is a dict with ``parameters``, ``optimizer``, ``version`` and ``keys`` (the
        batches applied in the last epoch, shape (keys, 2)). It consists of tensors, numbers, lists
        and dicts only.
        """
        state = {
            "parameters": self._parameters,
            "optimizer": self._optimizer.state_dict(),
            "version": self._version,
            "keys": torch.tensor(sorted(self._applied), dtype=torch.int64).view(-1, 2),
        }
        with replacing(path) as file:
            torch.save(state, file)

    def restore(self, path: Path) -> None:
        """Close all links, and return to the snapshot in a file."""
        for name in list(self._readers):
            self._forget(name)
        state = torch.load(path, weights_only=True)
        self._parameters.copy_(state["parameters"])
        # Copied, because the optimizer would use and change the given tensors themselves.
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._version = state["version"]
        self._applied = {BatchKey(*key) for key in state["keys"].tolist()}

    # -- the links to groups ----------------------------------------------------------------------

    def _admit(self, name: str) -> None:
        reader = self._readers[name] = _Reader(self._parameters)
        threading.Thread(
            target=self._receive, args=(name, reader), name=f"receive {name}", daemon=True
        ).start()

    def _forget(self, name: str) -> None:
        reader = self._readers.pop(name, None)
        if reader is None:
            return
        with self._changed:
            reader.gone = True
        if reader.link is not None:
            reader.link.close()

    def _receive(self, name: str, reader: _Reader) -> None:
        """Make the link to a group, and receive its gradients, until the link breaks."""
        try:
            link = self._rendezvous.link(self._layout, self._index, name, 1, self._host)
            with self._changed:
                reader.link = link
                self._changed.notify_all()
                if reader.gone:  # meanwhile
                    link.close()
            while True:
                # The group sends the next gradient only after this one was applied or rejected.
                number = link.receive(reader.gradient, patient=True)
                with self._changed:
                    reader.staged = number
                    self._changed.notify_all()
        except LinkBroken:
            pass  # The group notices it, too, and tells the coordinator.
        except Exception as error:
            reader.failure = error
        with self._changed:
            reader.gone = True
            self._changed.notify_all()

    def _apply(self, contributions: Sequence[Contribution], rate: float) -> None:
        for place, (key, name, share) in enumerate(contributions):
            gradient = self._staged(key, name)
            if key in self._applied:
                raise RuntimeError(f"expected {key} for the first time, but it was applied before")
            if place == 0:
                torch.mul(gradient, share, out=self._gradient)
            else:
                self._gradient.add_(gradient, alpha=share)
        set_rate(self._optimizer, rate)
        self._optimizer.step()
        self._version += 1
        epoch = contributions[0].key.epoch
        if self._applied and next(iter(self._applied)).epoch != epoch:
            self._applied.clear()  # gradients of an earlier epoch can no longer arrive
        self._applied.update(key for key, _, _ in contributions)

    def _staged(self, key: BatchKey, name: str) -> Tensor:
        """Return a staged gradient.

        The group got its receipt before it told the coordinator, so the gradient is here, or the
        thread that received it is about to say so.
        """
        reader = self._readers.get(name)
        if reader is not None:
            with self._changed:
                self._changed.wait_for(lambda: reader.staged == key.number or reader.gone)
            if reader.staged == key.number:
                return reader.gradient
        failure = None if reader is None else reader.failure
        raise RuntimeError(f"expected {name!r} to have staged {key}, got none") from failure

    def _answer(self, name: str) -> None:
        """Start to send the parameters to a group. If its link breaks, the group notices it."""
        reader = self._readers.get(name)
        if reader is None:
            return
        with self._changed:
            # The other end of the link is made before the coordinator names the group here.
            self._changed.wait_for(lambda: reader.link is not None or reader.gone)
        if reader.failure is not None:
            raise reader.failure
        if reader.link is None or reader.gone:
            return
        try:
            if reader.sending is not None:
                reader.sending.wait()  # It is complete, because the group has stepped since.
            reader.answer.copy_(self._parameters)
            reader.sending = reader.link.send_later(reader.answer, self._version)
        except LinkBroken:
            pass
