"""A worker: one replica of the model, which computes the gradients of the batches leased to it.

The path of a gradient is as follows. ``Worker.step`` runs ``Replica.step``, whose backward pass
writes into a flat tensor, which DDP averages over the group, and sends this tensor over the links.
``ParameterServer`` receives it in a thread per group, and ``ParameterServer.update`` applies it.
"""

import os
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.channel import Channel
from fineprune.distributed.parameter_servers.flat_layout import flat_layout, not_served
from fineprune.distributed.parameter_servers.link import Link, LinkBroken, join_store
from fineprune.distributed.parameter_servers.messages import (
    Array,
    Arrays,
    Broken,
    Connect,
    Done,
    Message,
    Save,
    Saved,
    Step,
    Stepped,
)
from fineprune.distributed.parameter_servers.prefetch import Prefetch
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous
from fineprune.errors import first_line


class Replica(Protocol):
    """What a worker trains. The function ``build(rank)``, given to the coordinator, makes it.

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
            ``Update.watched``.
        """
        ...


Build = Callable[[int], Replica]


class Worker:
    """One member of a group of replicas. A single worker is a group of one.

    DDP averages gradients over the group during the backward pass, with NCCL if the model is on
    GPUs, otherwise with Gloo. Only member 0, the leader, has links to the servers. Each member has
    its own normalisation statistics.

    Args:
        host: The address of this process for links.
        rank: The rank of this replica among all workers, which is passed to ``build``. The members
            of a group have successive ranks.
        members: The size of the group.
    """

    def __init__(
        self,
        host: str,
        build: Build,
        rank: int,
        members: int,
        servers: int,
        rendezvous: Rendezvous,
    ) -> None:
        self._host = host
        self._replica = build(rank)
        self._model = self._replica.model
        self._member = rank % members
        self._members = members
        self._rendezvous = rendezvous
        self._layout = flat_layout(self._model, servers)
        self._values, self._gradients = self._layout.bind(self._model)
        self._device = self._values.device
        self._on_cpu = self._device.type == "cpu"
        # Links carry tensors on the CPU. If the model is on the CPU, no copies are needed.
        self._down = self._values if self._on_cpu else self._values.cpu().pin_memory()
        self._up = self._gradients if self._on_cpu else self._gradients.cpu().pin_memory()
        overlaps = getattr(self._replica, "overlaps", True)
        self._batches = Prefetch(self._replica.load, overlaps=overlaps)
        self._links: list[Link] = []
        self._left: float | None = None  # the time at which the last step ended
        self._store: TCPStore | None = None
        self._share = 1.0
        self._reduced = 0.0  # the time at which the last all-reduce started

    def serve(self, channel: Channel) -> None:
        """Execute the requests of the coordinator."""
        while True:
            request = channel.receive()
            answer: Message
            try:
                match request:
                    case Connect():
                        self._connect(request)
                        answer = Done()
                    case Step():
                        answer = self.step(request)
                    case Save():
                        named = self._model.named_buffers()
                        buffers = {name: held.detach().cpu().numpy() for name, held in named}
                        answer = Saved(buffers, _random_state(self._device))
                    case _:
                        raise TypeError(f"expected a request to a worker, got {request!r}")
            except LinkBroken as error:
                # Members that wait in a collective usually wake up when this one leaves.
                self._disconnect()
                answer = Broken(str(error))
            channel.send(answer)

    def step(self, step: Step) -> Stepped:
        """Compute the gradient of a part of a batch, average it over the group, and push it."""
        clock = _Clock(None if step.first else self._left)
        wanted = {step.key: step.indices}
        if step.next_key is not None and step.next_indices is not None:
            wanted[step.next_key] = step.next_indices
        self._batches.begin(wanted)
        if step.reads:
            self._pull()
            clock.lap("pull")
        self._gradients.zero_()
        batch = self._batches.take(step.key, step.indices)
        clock.lap("data")
        self._share = step.share
        weights = None if step.weights is None else torch.tensor(step.weights)
        losses, watched = self._compute(batch, weights)
        if self._members > 1 and self._on_cpu:
            # The part of the all-reduce that does not overlap with the backward pass. It is not
            # measured on GPUs, whose operations are asynchronous.
            clock.lap("compute", self._reduced)
            clock.lap("group reduce")
        if not self._on_cpu and self._member == 0:
            self._up.copy_(self._gradients)
        clock.lap("compute")
        if self._member == 0:
            self._push(step.key)
            clock.lap("push")
        self._left = clock.now
        if not step.share:
            losses, watched = losses[:0], {name: rows[:0] for name, rows in watched.items()}
        return Stepped(losses, clock.seconds, watched)

    def _connect(self, request: Connect) -> None:
        """Join the process group of the members, and make the leader's links.

        All members do this at the same time.
        """
        self._disconnect()
        if request.buffers is not None:
            for name, tensor in not_served(self._model).items():
                tensor.copy_(torch.from_numpy(request.buffers[name]))
        if request.random is not None:
            _set_random_state(self._device, request.random)
        if self._members > 1:
            self._join_group(request.name)
        if self._member == 0:
            for server in range(self._layout.servers):
                link = self._rendezvous.link(self._layout, server, request.name, 0, self._host)
                self._links.append(link)

    def _disconnect(self) -> None:
        """Close all links and leave the process group, if there are any."""
        for link in self._links:
            link.close()
        self._links.clear()
        if dist.is_initialized():
            self._replica.model = self._model
            dist.destroy_process_group()
        self._left = None

    def _push(self, key: BatchKey) -> None:
        """Send the gradient to all servers, and return when all have confirmed it."""
        under_way = [
            link.send_later(self._up[self._layout.part(server)], key.number)
            for server, link in enumerate(self._links)
        ]
        for transfer in under_way:
            transfer.wait()

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
            _use_loopback()
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

    def _compute(self, batch: Any, weights: Tensor | None) -> tuple[Array, Arrays]:
        """Return the losses of a batch, and what the replica returns besides."""
        try:
            output = self._replica.step(batch, weights)
        except RuntimeError as error:
            if self._members > 1 and _of_the_group(error):
                raise _broken(error) from None
            raise
        losses, watched = output if isinstance(output, tuple) else (output, {})
        return (
            losses.detach().float().cpu().numpy(),
            {name: rows.cpu().numpy() for name, rows in watched.items()},
        )


def _use_loopback() -> None:
    # Otherwise, Gloo would listen on the address that the host name resolves to.
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):  # on Linux and on macOS
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


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


def _random_state(device: torch.device) -> Arrays:
    """Return the states of the generators from which a step draws, for example for dropout."""
    state = {"cpu": torch.get_rng_state().numpy()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy()
    return state


def _set_random_state(device: torch.device, state: Arrays) -> None:
    torch.set_rng_state(torch.from_numpy(state["cpu"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(torch.from_numpy(state["cuda"]), device)


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
