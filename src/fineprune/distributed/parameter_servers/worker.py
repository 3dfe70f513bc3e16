"""A worker: a Ray actor with one replica of the model, which computes gradients of batches.

The path of a gradient: the driver calls ``Worker.step`` with the servers' parameters; its backward
pass writes into a flat tensor, which DDP averages over the group, and of which each server gets its
part: the driver hands these to ``Server.update`` without having received them.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import ray
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from fineprune.distributed.parameter_servers.batches import BatchKey
from fineprune.distributed.parameter_servers.failures import told_as_text
from fineprune.distributed.parameter_servers.flat_layout import flat_layout, not_served
from fineprune.distributed.parameter_servers.prefetch import Prefetch
from fineprune.distributed.parameter_servers.server import Actor, Started
from fineprune.errors import InputError

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


class Replica(Protocol):
    """What a worker trains. The function ``build(rank)``, given to the driver, makes it.

    No method is called in the main thread of the process. ``load`` is called in another thread than
    ``step``, while a step is computed. A replica whose ``load`` must not run at the same time, for
    example because both draw from the same random generator, has an attribute ``overlaps`` that is
    False.

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

    def step(self, batch: Any, weights: Tensor | None) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Add the gradient of the batch's mean loss to the parameters' gradients, which are zero.

        Args:
            batch: What ``load`` returned.
            weights: The number by which the loss of each sample is multiplied before the mean is
                taken, float32, shape (B,), on the CPU; None for equal weights.

        Returns:
            The loss of each sample without its weight, shape (B,), detached. Losses are sent as
            float32. Further tensors with one row per sample may follow in a dict; they are in
            ``AppliedUpdate.watched``.
        """
        ...


Build = Callable[[int], Replica]


@dataclass(frozen=True)
class Member:
    """The place of a worker in the training.

    Attributes:
        rank: The rank among all workers. The members of a group have successive ranks.
        members: The size of the group.
        servers: The number of servers.
        narrow: Whether gradients travel as bfloat16.
    """

    rank: int
    members: int
    servers: int
    narrow: bool

    @property
    def place(self) -> int:
        """The place in the group. Place 0, the leader, returns the group's gradient."""
        return self.rank % self.members


@dataclass(frozen=True)
class Saved:
    """The buffers and frozen parameters of a worker, by name, and the states of its generators.

    ``random`` is None if the worker shall begin with the states that its replica starts with.
    """

    buffers: Arrays
    random: Arrays | None


@dataclass(frozen=True)
class Step:
    """A part of a batch.

    Attributes:
        key: The epoch and the batch.
        indices: The indices of the samples, int64, shape (B,), B > 0.
        weights: The weight of each sample's loss, float32, shape (B,); None for equal weights.
        share: The weight of this member's gradient in the group's mean; 0 if the samples are not
            its own, and it only takes part.
        first: Whether the time since the last step is not part of the epoch.
        following: The batch that probably follows, and its indices; None if there is none.
    """

    key: BatchKey
    indices: Array
    weights: Array | None
    share: float
    first: bool
    following: tuple[BatchKey, Array] | None


@dataclass(frozen=True)
class Stepped:
    """What a step found out.

    Attributes:
        losses: The loss of each sample, float32, shape (B,).
        watched: What the replica returned besides, by names, one row per sample.
        seconds: The duration of each phase, in seconds.
    """

    losses: Array
    watched: Arrays
    seconds: dict[str, float]


class Worker(Actor):
    """One member of a group of replicas. A single worker is a group of one.

    DDP averages gradients over the group during the backward pass, with NCCL if the model is on
    GPUs, otherwise with Gloo. Each member has its own normalisation statistics.
    """

    @told_as_text
    def open(self) -> tuple[str, int]:
        """Open the store in which the members of this leader's group find each other."""
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family)
        port = listening.getsockname()[1]
        # The store owns the socket from now on, and listens on this address only.
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return host, port

    @told_as_text
    def begin(
        self, build: Build, member: Member, saved: Saved, store: tuple[str, int] | None
    ) -> Started:
        """Build the replica, and join the other members at the leader's store."""
        self._member = member
        self._replica = build(member.rank)
        model = self._replica.model
        self._model = model
        layout = flat_layout(model, member.servers)
        self._values, self._gradients = layout.bind(model)
        self._parts = [layout.part(server) for server in range(member.servers)]
        self._device = self._values.device
        self._on_cpu = self._device.type == "cpu"
        # Ray carries arrays on the CPU. If the model is on the CPU, no copies are needed.
        self._down = self._values if self._on_cpu else self._values.cpu().pin_memory()
        self._up = self._gradients if self._on_cpu else self._gradients.cpu().pin_memory()
        overlaps = getattr(self._replica, "overlaps", True)
        self._batches = Prefetch(self._replica.load, overlaps=overlaps)
        self._left: float | None = None  # the time at which the last step ended
        self._share = 1.0
        self._reduced = 0.0  # the time at which the last all-reduce started
        for name, tensor in not_served(model).items():
            tensor.copy_(torch.tensor(saved.buffers[name]))
        if saved.random is not None:
            torch.set_rng_state(torch.tensor(saved.random["cpu"]))
            if "cuda" in saved.random:
                torch.cuda.set_rng_state(torch.tensor(saved.random["cuda"]), self._device)
        if store is not None:
            self._join(*store)
        return self.started()

    @told_as_text
    def step(self, step: Step, *parameters: Array) -> Any:
        """Compute the gradient of a part of a batch, averaged over the group.

        Args:
            step: The batch.
            parameters: The parameters that each server holds.

        Returns:
            ``Stepped``, followed by the leader by the part of each server of the gradient, which is
            int16 in place of bfloat16.
        """
        clock = _Clock(None if step.first else self._left)
        wanted = {step.key: step.indices}
        if step.following is not None:
            wanted[step.following[0]] = step.following[1]
        self._batches.begin(wanted)
        down = self._down.numpy()
        for part, values in zip(self._parts, parameters, strict=True):
            np.copyto(down[part], values)
        if not self._on_cpu:
            self._values.copy_(self._down)
        clock.lap("pull")
        self._gradients.zero_()
        batch = self._batches.take(step.key, step.indices)
        clock.lap("data")
        self._share = step.share
        output = self._replica.step(
            batch, None if step.weights is None else torch.tensor(step.weights)
        )
        losses, watched = output if isinstance(output, tuple) else (output, {})
        stepped = Stepped(
            losses.detach().float().cpu().numpy(),
            {name: rows.cpu().numpy() for name, rows in watched.items()},
            clock.seconds,
        )
        if self._member.members > 1 and self._on_cpu:
            # The part of the all-reduce that does not overlap with the backward pass. It is not
            # measured on GPUs, whose operations are asynchronous.
            clock.lap("compute", self._reduced)
            clock.lap("group reduce")
        if not self._on_cpu:
            self._up.copy_(self._gradients)
        clock.lap("compute")
        if not step.share:
            none = {name: rows[:0] for name, rows in stepped.watched.items()}
            stepped = Stepped(stepped.losses[:0], none, clock.seconds)
        self._left = clock.now
        if self._member.place:
            return stepped
        up = self._up
        if self._member.narrow:
            up = up.to(torch.bfloat16).view(torch.int16)
        return stepped, *(up[part].numpy() for part in self._parts)

    @told_as_text
    def save(self) -> Saved:
        """Return the buffers, and the states of the generators from which a step draws."""
        buffers = {name: held.detach().cpu().numpy() for name, held in self._model.named_buffers()}
        random = {"cpu": torch.get_rng_state().numpy()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device).numpy()
        return Saved(buffers, random)

    def _join(self, host: str, port: int) -> None:
        _choose_interface(loopback=host.startswith("127."))
        if self._member.place:
            self._store = TCPStore(host, port)
        dist.init_process_group(
            "gloo" if self._on_cpu else "nccl",
            store=PrefixStore("group", self._store),
            rank=self._member.place,
            world_size=self._member.members,
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


def _choose_interface(*, loopback: bool) -> None:
    """Check the interface that the user chose for groups; choose loopback on one machine."""
    known = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given = os.environ.get(variable)
        if given is None and loopback:
            # Otherwise, Gloo would listen on the address that the host name resolves to.
            os.environ[variable] = "lo" if "lo" in known else "lo0"
        elif variable.startswith("GLOO") and given is not None and given not in known:
            raise InputError(
                f"expected {variable} to name a network interface, one of {', '.join(known)}, got "
                f"{given!r}"
            )


class _Clock:
    """The duration of each phase; the time since the end of the last step is phase ``wait``."""

    def __init__(self, left: float | None) -> None:
        self.now = time.perf_counter()
        self.seconds: dict[str, float] = {}
        if left is not None:
            self.seconds["wait"] = self.now - left

    def lap(self, name: str, now: float | None = None) -> None:
        now = time.perf_counter() if now is None else now
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.now
        self.now = now
