"""A worker: one replica of the model, which computes the gradients of the batches leased to it.

The path of a gradient is as follows. ``Worker.compute`` runs ``Replica.step``, whose backward pass
writes into a flat tensor, which DDP averages over the group. ``Worker.push`` sends this tensor over
the links, ``ParameterServer.stage`` receives it, and ``ParameterServer.update`` applies it.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.flat_layout import flat_layout, not_served
from fineprune.distributed.parameter_servers.link import Link, LinkBroken, join_store
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous
from fineprune.errors import first_line


class Replica(Protocol):
    """What a worker trains. The function ``build(rank)``, given to the coordinator, makes it.

    All methods are called in one thread, which is not the main thread of the process.

    Attributes:
        model: The network without a wrapper. All parameters are on one device and have one type.
            Frozen ones (``requires_grad=False``) are received once, at the start. The values of the
            others are moved into a flat tensor, so nothing that was made from the model
            before (such as a compiled model) may depend on where they were stored. In a group,
            ``model`` is replaced by the model wrapped in DDP, and ``step`` must call ``self.model``
            exactly once.
    """

    model: nn.Module

    def load(self, key: BatchKey, indices: Tensor) -> Any:
        """Return a batch, on the device.

        Args:
            key: The epoch and the batch. Augmentation should depend on it only, so that a batch is
                the same if it is leased again.
            indices: The indices of its samples, int64, shape (B,), on the CPU.
        """
        ...

    def step(self, batch: Any, weights: Tensor | None) -> Tensor:
        """Add the gradient of the batch's mean loss to the parameters' gradients, which are zero.

        Args:
            batch: What ``load`` returned.
            weights: The number by which the loss of each sample is multiplied before the mean is
                taken, float32, shape (B,), on the CPU; None for equal weights.

        Returns:
            The loss of each sample without its weight, shape (B,), detached. Losses are sent as
            float32.
        """
        ...


Build = Callable[[int], Replica]
Buffers = Mapping[str, np.ndarray[Any, Any]]


@dataclass
class Computed:
    """The result of a member's part of a batch.

    Attributes:
        losses: The loss of each sample of the part, float32, shape (B,).
        seconds: The duration of each phase, in seconds.
    """

    losses: np.ndarray[Any, np.dtype[np.float32]]
    seconds: dict[str, float] = field(default_factory=dict)


class Worker:
    """One member of a group of replicas. A single worker is a group of one.

    DDP averages gradients over the group during the backward pass, with NCCL if the model is on
    GPUs, otherwise with Gloo. Only member 0, the leader, has links to the servers. Each member has
    its own normalisation statistics.

    Args:
        host: The address of this process for links.
        build: Function that makes the replica.
        rank: The rank of this replica among all workers, which is passed to ``build``.
        member: The place of this replica in its group, from 0.
        members: The size of the group.
        servers: The number of servers.
        rendezvous: The settings of all links.
    """

    def __init__(
        self,
        host: str,
        build: Build,
        rank: int,
        member: int,
        members: int,
        servers: int,
        rendezvous: Rendezvous,
    ) -> None:
        self._host = host
        self._replica = build(rank)
        self._model = self._replica.model
        self._member = member
        self._members = members
        self._rendezvous = rendezvous
        self._layout = flat_layout(self._model, servers)
        self._values, self._gradients = self._layout.bind(self._model)
        self._on_cpu = self._values.device.type == "cpu"
        # Links carry tensors on the CPU. If the model is on the CPU, no copies are needed.
        self._down = self._values if self._on_cpu else self._values.cpu().pin_memory()
        self._up = self._gradients if self._on_cpu else self._gradients.cpu().pin_memory()
        self._links: list[Link] = []
        self._left: float | None = None  # the time at which the last call ended
        self._store: TCPStore | None = None
        self._share = 1.0
        self._reduced = 0.0  # the time at which the last all-reduce started

    def connect(self, name: str) -> None:
        """Join the process group of the members, and make the leader's links.

        All members must call this at the same time.

        Args:
            name: The name of this generation of the group.

        Raises:
            LinkBroken: A member or a server did not connect in time.
        """
        if self._members > 1:
            self._join_group(name)
        if self._member == 0:
            for server in range(self._layout.servers):
                link = f"{name}-server{server}"
                self._links.append(self._rendezvous.link(self._layout, server, link, 0, self._host))

    def disconnect(self) -> None:
        """Close all links and leave the process group, if there are any."""
        for link in self._links:
            link.close()
        self._links.clear()
        if dist.is_initialized():
            self._replica.model = self._model
            dist.destroy_process_group()
        self._left = None

    def rest(self) -> None:
        """Exclude the time until the next call from the phase ``wait``."""
        self._left = None

    def compute(
        self,
        key: BatchKey,
        indices: np.ndarray[Any, Any],
        weights: np.ndarray[Any, Any] | None,
        share: float,
        reads: bool,
    ) -> Computed:
        """Compute the gradient of a part of a batch, and average it over the group.

        Args:
            key: The batch.
            indices: The indices of this member's samples, int64, shape (B,).
            weights: The weights of their losses, float32, shape (B,); None for equal weights.
            share: The weight of this member's mean in the mean of the group. If it is 0, the
                member steps only because the others wait for it, and its gradient has no effect.
            reads: Whether to receive the parameters first. The servers have then been told to send
                them.

        Raises:
            LinkBroken: A server or another member died.
            RuntimeError: The servers sent different versions.
        """
        clock = _Clock(self._left)
        if reads:
            self._pull()
            clock.lap("pull")
        self._gradients.zero_()
        batch = self._replica.load(key, torch.tensor(indices))
        clock.lap("data")
        self._share = share
        losses = self._step(batch, None if weights is None else torch.tensor(weights))
        if self._members > 1 and self._on_cpu:
            # The part of the all-reduce that does not overlap with the backward pass. It is not
            # measured on GPUs, whose operations are asynchronous.
            clock.lap("compute", self._reduced)
            clock.lap("group reduce")
        if not self._on_cpu and self._member == 0:
            self._up.copy_(self._gradients)
        clock.lap("compute")
        self._left = clock.now
        return Computed(losses if share else losses[:0], clock.seconds)

    def push(self, key: BatchKey) -> dict[str, float]:
        """Send the gradient to all servers, and return the duration of each phase, in seconds.

        Raises:
            LinkBroken: A server died.
        """
        clock = _Clock(self._left)
        under_way = [
            link.send_later(self._up[self._layout.part(server)], key.batch)
            for server, link in enumerate(self._links)
        ]
        for transfer in under_way:
            transfer.wait()
        clock.lap("push")
        self._left = clock.now
        return clock.seconds

    def buffers(self) -> Buffers:
        """Return the model's buffers, including the normalisation statistics."""
        named = self._model.named_buffers()
        return {name: buffer.detach().cpu().numpy() for name, buffer in named}

    def load_buffers(self, buffers: Buffers) -> None:
        """Copy buffers, as ``buffers`` returns them, and frozen parameters into the model."""
        for name, tensor in not_served(self._model).items():
            tensor.copy_(torch.from_numpy(np.array(buffers[name])))

    def _pull(self) -> None:
        versions = set()
        if self._member == 0:
            under_way = [
                link.receive_later(self._down[self._layout.part(server)])
                for server, link in enumerate(self._links)
            ]
            versions = {transfer.wait() for transfer in under_way}
            if not self._on_cpu:
                self._values.copy_(self._down)
        if self._members > 1:
            _together(lambda: dist.broadcast(self._values, 0))
        if len(versions) > 1:
            raise RuntimeError(f"servers answered with the versions {sorted(versions)}")

    def _join_group(self, name: str) -> None:
        if self._host.startswith("127."):
            # Otherwise, Gloo would listen on the address that the host name resolves to.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        seconds = self._rendezvous.timeout_seconds
        self._store = store = join_store(
            self._rendezvous.host, self._rendezvous.port, timeout_seconds=seconds
        )
        _together(
            lambda: dist.init_process_group(
                "gloo" if self._on_cpu else "nccl",
                store=PrefixStore(f"{name}-group", store),
                rank=self._member,
                world_size=self._members,
            )
        )
        # The servers send the parameters, and each member has its own buffers.
        replicated = DistributedDataParallel(self._model, broadcast_buffers=False, init_sync=False)
        replicated.register_comm_hook(None, self._reduce)
        self._replica.model = replicated

    def _reduce(self, _: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a part of the gradient over the group, weighted by each member's share."""
        self._reduced = time.perf_counter()
        gradient = bucket.buffer()
        if self._share:
            gradient.mul_(self._share)
        else:
            gradient.zero_()
        work = dist.all_reduce(gradient, async_op=True)
        assert work is not None
        summed: torch.futures.Future[Tensor] = work.get_future().then(lambda f: f.value()[0])
        return summed

    def _step(self, batch: Any, weights: Tensor | None) -> np.ndarray[Any, np.dtype[np.float32]]:
        try:
            losses = self._replica.step(batch, weights)
        except RuntimeError as error:
            if self._members > 1 and _of_the_group(error):
                raise _broken(error) from None
            raise
        return losses.detach().float().cpu().numpy()


def _together(collective: Callable[[], Any]) -> None:
    try:
        collective()
    except RuntimeError as error:
        raise _broken(error) from None


def _of_the_group(error: RuntimeError) -> bool:
    """Return whether DDP's communication failed, as opposed to the step itself."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _broken(error: RuntimeError) -> LinkBroken:
    return LinkBroken(f"a member of the group died: {first_line(error)}")


class _Clock:
    """The duration of each phase; the time since the end of the last call is phase ``wait``."""

    def __init__(self, left: float | None) -> None:
        self.now = time.perf_counter()
        self.seconds: dict[str, float] = {}
        if left is not None:
            self.seconds["wait"] = self.now - left

    def lap(self, name: str, now: float | None = None) -> None:
        now = time.perf_counter() if now is None else now
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.now
        self.now = now
