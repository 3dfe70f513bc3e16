"""A replica of the model that computes gradients of the batches it is leased."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore
from torch.nn.parallel import DistributedDataParallel

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.flat_layout import flat_layout
from fineprune.distributed.parameter_servers.link import LinkBroken, join_store
from fineprune.distributed.parameter_servers.server import Rendezvous


class Replica(Protocol):
    """What a worker trains: made by the `build(rank)` that training hands in.

    Attributes:
        model: the bare network, its parameters on one device and of one type. They become views
            into a flat tensor, so compile the model or build optimizers on it only if they follow.
            In a group it is replaced by the DDP of itself: `step` calls it as `self.model`, once.
    """

    model: nn.Module

    def load(self, key: BatchKey, indices: Tensor) -> Any:
        """Return a batch, on the device.

        Args:
            key: epoch and batch; augmentation should be drawn from it, so that a batch that is
                leased again is the same.
            indices: of its samples, int64, shape (B,), on the CPU.
        """
        ...

    def step(self, batch: Any) -> Tensor:
        """Add the gradient of the batch's mean loss to the parameters' gradients, zero before.

        Returns:
            The loss of each sample, shape (B,), without a graph. They travel as float32.
        """
        ...


Build = Callable[[int], Replica]


@dataclass
class Computed:
    """The losses of one member's part of a batch, float32, shape (B,)."""

    losses: np.ndarray[Any, np.dtype[np.float32]]
    seconds: dict[str, float] = field(default_factory=dict)


class Worker:
    """One member of a group of replicas; a worker alone is a group of one.

    Gradients are averaged over the group by DDP, during the backward pass: with NCCL where the
    model is on GPUs, else with Gloo. Only member 0, the leader, has links to the servers.
    Normalisation statistics are each member's own.

    Args:
        build: makes what is trained.
        rank: of this replica among all, for `build`.
        member, members: place in the group and the group's size.
        servers: how many.
        rendezvous: how links are made.
        host: this machine's address for links.
    """

    def __init__(
        self,
        build: Build,
        rank: int,
        member: int,
        members: int,
        servers: int,
        rendezvous: Rendezvous,
        host: str = "127.0.0.1",
    ) -> None:
        self._replica = build(rank)
        self._model = self._replica.model
        self._member = member
        self._members = members
        self._rendezvous = rendezvous
        self._host = host
        self._layout = flat_layout(self._model, servers)
        self._values, self._gradients = self._layout.bind(self._model)
        self._on_cpu = self._values.device.type == "cpu"
        # Links carry tensors of the CPU; there the model's own are used.
        self._down = self._values if self._on_cpu else self._values.cpu().pin_memory()
        self._up = self._gradients if self._on_cpu else self._gradients.cpu().pin_memory()
        self._links: list[Any] = []
        self._left: float | None = None
        self._store: Any = None
        self._share = 1.0
        self._reduced = 0.0  # when the last part of the gradient was given to the group

    def connect(self, name: str) -> None:
        """Make the group's process group, and the leader's links. All members must be at it.

        Raises:
            LinkBroken: somebody did not come.
        """
        if self._members > 1:
            self._join_group(name)
        if self._member == 0:
            for server in range(self._layout.servers):
                link = f"{name}-server{server}"
                self._links.append(self._rendezvous.link(self._layout, server, link, 0, self._host))

    def disconnect(self) -> None:
        """Close all links and leave the group; does nothing where there are none."""
        for link in self._links:
            link.close()
        self._links.clear()
        if dist.is_initialized():
            self._replica.model = self._model
            dist.destroy_process_group()
        self._left = None

    def rest(self) -> None:
        """Let the time until the next call count as no waiting."""
        self._left = None

    def compute(
        self, key: BatchKey, indices: np.ndarray[Any, Any], share: float, reads: bool
    ) -> Computed:
        """Compute the gradient of a part of a batch, and average it over the group.

        Args:
            key: of the batch.
            indices: of this member's samples, int64, shape (B,).
            share: of this member's mean in the group's. With 0 it steps for the others' sake, who
                wait for its part in their means: nothing of it counts.
            reads: receive the parameters first, which the servers have been told to send.

        Raises:
            LinkBroken: a server or another member died.
            RuntimeError: servers answered with different versions.
        """
        clock = _Clock(self._left)
        if reads:
            self._pull()
            clock.lap("pull")
        self._gradients.zero_()
        batch = self._replica.load(key, torch.tensor(indices))
        clock.lap("data")
        self._share = share
        losses = self._step(batch)
        if self._members > 1 and self._on_cpu:
            # What the backward pass did not hide. A GPU's steps and reduces end unobserved.
            clock.lap("compute", self._reduced)
            clock.lap("group reduce")
        if not self._on_cpu and self._member == 0:
            self._up.copy_(self._gradients)
        clock.lap("compute")
        self._left = clock.now
        return Computed(losses if share else losses[:0], clock.seconds)

    def push(self, key: BatchKey) -> dict[str, float]:
        """Send the gradient to all servers; returns seconds.

        Raises:
            LinkBroken: a server died.
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

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the model's buffers, normalisation statistics among them."""
        named = self._model.named_buffers()
        return {name: buffer.detach().cpu().numpy() for name, buffer in named}

    def load_buffers(self, buffers: dict[str, np.ndarray[Any, Any]]) -> None:
        """Copy buffers, as `buffers` has them, into the model."""
        for name, buffer in self._model.named_buffers():
            buffer.copy_(torch.from_numpy(np.array(buffers[name])))

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
            # Gloo would listen on the address of the host's name.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        seconds = self._rendezvous.timeout_seconds
        self._store = join_store(
            self._rendezvous.host, self._rendezvous.port, timeout_seconds=seconds
        )
        _together(
            lambda: dist.init_process_group(
                "gloo" if self._on_cpu else "nccl",
                store=PrefixStore(f"{name}-group", self._store),
                rank=self._member,
                world_size=self._members,
            )
        )
        # The parameters come from the servers, and the buffers are each member's own.
        replicated = DistributedDataParallel(self._model, broadcast_buffers=False, init_sync=False)
        replicated.register_comm_hook(None, self._reduce)
        self._replica.model = replicated

    def _reduce(self, _: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a part of the gradient over the group, each member's in its share."""
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

    def _step(self, batch: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        try:
            losses = self._replica.step(batch)
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
    """Say whether DDP's communication failed, and not the step itself."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _broken(error: RuntimeError) -> LinkBroken:
    return LinkBroken(f"a member of the group died: {str(error).splitlines()[0]}")


class _Clock:
    """Sums of seconds by name; the time since the last call was left is `wait`."""

    def __init__(self, left: float | None) -> None:
        self.now = time.perf_counter()
        self.seconds: dict[str, float] = {}
        if left is not None:
            self.seconds["wait"] = self.now - left

    def lap(self, name: str, now: float | None = None) -> None:
        now = time.perf_counter() if now is None else now
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.now
        self.now = now
