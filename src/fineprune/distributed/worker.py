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
from torch._C._distributed_c10d import PrefixStore

from fineprune.distributed.layout import layout_of
from fineprune.distributed.ledger import Key
from fineprune.distributed.links import LinkBroken, join_store
from fineprune.distributed.server import Meeting


class Trainee(Protocol):
    """What a worker trains: made by the `build(rank)` that training hands in.

    Attributes:
        model: the bare network, its parameters on one device and of one type. They become views
            into a flat tensor, so compile the model or build optimizers on it only if they follow.
    """

    model: nn.Module

    def load(self, key: Key, indices: Tensor) -> Any:
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


Build = Callable[[int], Trainee]


@dataclass
class Computed:
    """The losses of one member's part of a batch, float32, shape (B,)."""

    losses: np.ndarray[Any, np.dtype[np.float32]]
    seconds: dict[str, float] = field(default_factory=dict)


class Replica:
    """One member of a group of replicas; a worker alone is a group of one.

    The group's gradient is averaged by one all-reduce of the flat gradient after the backward
    pass: the same mean as DDP's, without its overlap with the backward pass. Only member 0, the
    leader, has links to the servers. Normalisation statistics are each member's own.

    Args:
        build: makes what is trained.
        rank: of this replica among all, for `build`.
        member, members: place in the group and the group's size.
        servers: how many.
        meeting: how links are made.
        host: this machine's address for links.
    """

    def __init__(
        self,
        build: Build,
        rank: int,
        member: int,
        members: int,
        servers: int,
        meeting: Meeting,
        host: str = "127.0.0.1",
    ) -> None:
        self._trainee = build(rank)
        self._member = member
        self._members = members
        self._meeting = meeting
        self._host = host
        self._layout = layout_of(self._trainee.model, servers)
        self._values, self._gradients = self._layout.bind(self._trainee.model)
        self._on_cpu = self._values.device.type == "cpu"
        # Links carry tensors of the CPU; there the model's own are used.
        self._down = self._values if self._on_cpu else self._values.cpu().pin_memory()
        self._up = self._gradients if self._on_cpu else self._gradients.cpu().pin_memory()
        self._links: list[Any] = []
        self._left: float | None = None
        self._store: Any = None

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
                self._links.append(self._meeting.link(self._layout, server, link, 0, self._host))

    def disconnect(self) -> None:
        """Close all links and leave the group; does nothing where there are none."""
        for link in self._links:
            link.close()
        self._links.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._left = None

    def rest(self) -> None:
        """Let the time until the next call count as no waiting."""
        self._left = None

    def compute(
        self, key: Key, indices: np.ndarray[Any, Any], share: float, reads: bool
    ) -> Computed:
        """Compute the gradient of a part of a batch, and average it over the group.

        Args:
            key: of the batch.
            indices: of this member's samples, int64, shape (B,); none are no gradient.
            share: of this member's mean in the group's.
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
        losses = np.zeros(0, dtype=np.float32)
        if len(indices):
            batch = self._trainee.load(key, torch.tensor(indices))
            clock.lap("data")
            losses = self._trainee.step(batch).detach().float().cpu().numpy()
            clock.lap("compute")
        if self._members > 1:
            self._gradients.mul_(share)
            self._up.copy_(self._gradients)
            self._together(lambda: dist.all_reduce(self._up))
            clock.lap("group reduce")
        elif not self._on_cpu:
            self._up.copy_(self._gradients)
        self._left = clock.now
        return Computed(losses, clock.seconds)

    def push(self, key: Key) -> dict[str, float]:
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
        named = self._trainee.model.named_buffers()
        return {name: buffer.detach().cpu().numpy() for name, buffer in named}

    def load_buffers(self, buffers: dict[str, np.ndarray[Any, Any]]) -> None:
        """Copy buffers, as `buffers` has them, into the model."""
        for name, buffer in self._trainee.model.named_buffers():
            buffer.copy_(torch.from_numpy(np.array(buffers[name])))

    def _pull(self) -> None:
        versions = set()
        if self._member == 0:
            under_way = [
                link.receive_later(self._down[self._layout.part(server)])
                for server, link in enumerate(self._links)
            ]
            versions = {transfer.wait() for transfer in under_way}
        if self._members > 1:
            self._together(lambda: dist.broadcast(self._down, 0))
        if not self._on_cpu:
            self._values.copy_(self._down)
        if len(versions) > 1:
            raise RuntimeError(f"servers answered with the versions {sorted(versions)}")

    def _join_group(self, name: str) -> None:
        if self._host.startswith("127."):
            # Gloo would listen on the address of the host's name.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        seconds = self._meeting.timeout_seconds
        self._store = join_store(self._meeting.host, self._meeting.port, timeout_seconds=seconds)
        self._together(
            lambda: dist.init_process_group(
                "gloo",
                store=PrefixStore(f"{name}-group", self._store),
                rank=self._member,
                world_size=self._members,
            )
        )

    def _together(self, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise LinkBroken(f"a member of the group died: {str(error).splitlines()[0]}") from None


class _Clock:
    """Sums of seconds by name; the time since the last call was left is `wait`."""

    def __init__(self, left: float | None) -> None:
        self.now = time.perf_counter()
        self.seconds: dict[str, float] = {}
        if left is not None:
            self.seconds["wait"] = self.now - left

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.now
        self.now = now
