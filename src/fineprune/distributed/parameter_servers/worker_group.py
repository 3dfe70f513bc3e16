"""A group of workers as the coordinator sees it: its processes, its phase and its pending calls.

A group is one unit: its members step together, and if one of them dies, all are started again.
A worker alone is a group of one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.events import Event, EventKind, ProcessKind, Report
from fineprune.distributed.parameter_servers.link import LinkBroken
from fineprune.distributed.parameter_servers.ray_cluster import (
    Call,
    Cluster,
    Died,
    Location,
    Process,
)
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous
from fineprune.distributed.parameter_servers.server_group import ServerGroup
from fineprune.distributed.parameter_servers.worker import Build, Computed, Worker
from fineprune.distributed.strategy import Strategy

Buffers = Mapping[str, np.ndarray[Any, Any]]


class GroupPhase(Enum):
    """What a group is at. A step takes it from ``IDLE`` through all that follow, and back."""

    STARTING = "starting"  # its processes start, or close the links of the last generation
    CONNECTING = "connecting"  # its links are being made
    IDLE = "idle"
    LEASED = "leased"  # it has a batch, and is about to compute
    COMPUTING = "computing"
    PUSHING = "pushing"
    STAGED = "staged"  # its gradient lies on all servers


class GroupCall(Enum):
    """The calls that a group waits for: to its members, and to the servers on its behalf."""

    START = "start"
    LOAD_BUFFERS = "load buffers"
    DISCONNECT = "disconnect"
    CONNECT = "connect"
    COMPUTE = "compute"
    PUSH = "push"
    SERVER_CONNECT = "server connect"
    SERVER_STAGE = "server stage"


@dataclass(frozen=True)
class PendingCall:
    """A call that has not ended; ``index`` is the member's place, or the server's index."""

    kind: GroupCall
    index: int


class GroupBroken(Exception):
    """A call of a group failed, since a process died.

    Attributes:
        member: The place of the member whose call it was.
        reason: What was noticed.
    """

    def __init__(self, member: int, reason: str) -> None:
        super().__init__(reason)
        self.member = member
        self.reason = reason


class WorkerGroup:
    """A group of workers. Each step is started by a method, and ends when nothing is pending.

    Args:
        index: The index of this group.
        cluster: Starts its processes.
        strategy: The size of the group and the number of servers.
        build: Makes a replica.
        rendezvous: How links are made.
        report: Called with each event.

    Attributes:
        phase: What the group is at.
        pending: The calls that it waits for.
        generation: The number of times that its links were made anew. Each has new links, under a
            new name.
        lease: The batch that it has, if any. It may lose it while it computes, when an update is
            made without it.
        version: The version of the parameters that it has read; -1 for none.
        losses: The losses of its last step, float32, shape (B,).
        fruitless_deaths: How often it died since it last computed a gradient.
    """

    def __init__(
        self,
        index: int,
        cluster: Cluster,
        strategy: Strategy,
        build: Build,
        rendezvous: Rendezvous,
        report: Report,
    ) -> None:
        self.index = index
        self.phase = GroupPhase.STARTING
        self.pending: dict[Call[Any], PendingCall] = {}
        self.generation = 0
        self.lease: BatchKey | None = None
        self.version = -1
        self.fruitless_deaths = 0
        self._cluster = cluster
        self._strategy = strategy
        self._build = build
        self._rendezvous = rendezvous
        self._report = report
        self._members: list[Process[Worker]] = []
        self._locations: dict[int, Location] = {}
        self._losses: dict[int, np.ndarray[Any, np.dtype[np.float32]]] = {}
        self._starts = 0

    @property
    def name(self) -> str:
        """The name by which servers know this generation of the group."""
        return f"group{self.index}-generation{self.generation}"

    @property
    def size(self) -> int:
        """The number of its members."""
        return self._strategy.group

    @property
    def losses(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The losses of the last step, float32, shape (B,), in the order of its indices."""
        return np.concatenate([self._losses[member] for member in sorted(self._losses)])

    # -- its life -------------------------------------------------------------------------------

    def start(self, buffers: Buffers) -> None:
        """Start the processes; they join as soon as they are there.

        Args:
            buffers: The model's buffers that they begin with.
        """
        self._starts += 1
        self._locations = {}
        self._members = [
            self._cluster.start_worker(
                self.index,
                Worker,
                self._build,
                self.index * self.size + member,
                member,
                self.size,
                self._strategy.servers,
                self._rendezvous,
            )
            for member in range(self.size)
        ]
        self.reconnect()
        for place, member in enumerate(self._members):
            self._await(member.made, GroupCall.START, place)
            if buffers:
                self._await(
                    member.call(Worker.load_buffers, buffers), GroupCall.LOAD_BUFFERS, place
                )

    def reconnect(self) -> None:
        """Begin a new generation: close the links, once each member has left what it is at."""
        self.generation += 1
        self.phase, self.lease, self.version = GroupPhase.STARTING, None, -1
        self.pending.clear()
        for place, member in enumerate(self._members):
            self._await(member.call(Worker.disconnect), GroupCall.DISCONNECT, place)

    def connect(self, servers: ServerGroup) -> None:
        """Make the links to the servers, and the process group of the members."""
        self.phase = GroupPhase.CONNECTING
        for place, member in enumerate(self._members):
            self._await(member.call(Worker.connect, self.name), GroupCall.CONNECT, place)
        for server, call in enumerate(servers.connect(self.name)):
            self._await(call, GroupCall.SERVER_CONNECT, server)

    def end(self, reason: str, *, died: int | None = None) -> None:
        """End all processes at once; their pending calls are dropped.

        Args:
            reason: Why, for the events.
            died: The place of the member that died, which the reason is about; the others are
                reported as stopped.
        """
        for place in range(self.size):
            if place == died:
                self._report(self._event(EventKind.DIED, place, reason))
            elif died is None:
                self._report(self._event(EventKind.STOPPED, place, reason))
            else:
                self._report(self._event(EventKind.STOPPED, place, "a member of its group died"))
        self.kill()

    def kill(self) -> None:
        """End all processes at once, without a word."""
        for member in self._members:
            member.kill()
        self.pending.clear()

    # -- a step ---------------------------------------------------------------------------------

    def compute(self, indices: np.ndarray[Any, Any], version: int, *, reads: bool) -> None:
        """Compute the gradient of the leased batch.

        Args:
            indices: The indices of its samples, int64, shape (B,).
            version: The version of the parameters at which it is computed.
            reads: Whether the group receives these parameters first.
        """
        assert self.lease is not None
        self.phase = GroupPhase.COMPUTING
        self.version = version
        self._losses = {}
        self._report(self._event(EventKind.LEASED, 0, batch=self.lease))
        parts = np.array_split(indices, self.size)
        for place, (member, part) in enumerate(zip(self._members, parts, strict=True)):
            share = len(part) / len(indices)
            # A member for which nothing is left has to step with the others all the same.
            sent = part if len(part) else indices[:1]
            call = member.call(Worker.compute, self.lease, sent, share, reads)
            self._await(call, GroupCall.COMPUTE, place)

    def push(self, servers: ServerGroup) -> None:
        """Send the gradient to all servers."""
        assert self.lease is not None
        self.phase = GroupPhase.PUSHING
        self._await(self._members[0].call(Worker.push, self.lease), GroupCall.PUSH, 0)
        for server, call in enumerate(servers.stage(self.name, self.lease)):
            self._await(call, GroupCall.SERVER_STAGE, server)

    def release(self) -> None:
        """Take the lease away: the batch was applied, or an update was made without it."""
        self.lease = None
        if self.phase is GroupPhase.STAGED:
            self.phase = GroupPhase.IDLE

    # -- calls ----------------------------------------------------------------------------------

    def finish(self, call: Call[Any]) -> dict[str, float]:
        """Take the result of a pending call that has ended.

        Returns:
            How long the phases of the step took, in seconds.

        Raises:
            GroupBroken: A member died, or a process that it worked with did.
        """
        pending = self.pending.pop(call)
        try:
            result = self._cluster.result(call)
        except (Died, LinkBroken) as error:
            # A server's call fails on behalf of the leader, which has the links.
            of_member = pending.kind not in (GroupCall.SERVER_CONNECT, GroupCall.SERVER_STAGE)
            raise GroupBroken(pending.index if of_member else 0, str(error)) from None
        match pending.kind, result:
            case GroupCall.START, Location():
                self._locations[pending.index] = result
                kind = EventKind.STARTED if self._starts == 1 else EventKind.RESTARTED
                self._report(self._event(kind, pending.index))
            case GroupCall.COMPUTE, Computed():
                self._losses[pending.index] = result.losses
                return result.seconds
            case GroupCall.PUSH, dict():
                return result
            case GroupCall.SERVER_STAGE, _ if self.lease is not None:
                server = ProcessKind.SERVER
                self._report(Event(EventKind.STAGED, server, pending.index, batch=self.lease))
        return {}

    def rest(self) -> None:
        """Do not count the time until the next call as waiting."""
        for member in self._members:
            member.call(Worker.rest)

    def buffers(self) -> Buffers:
        """Return the buffers of the leader, when nothing is pending.

        Raises:
            Died: The leader died.
        """
        return self._cluster.result(self._members[0].call(Worker.buffers))

    def _event(
        self, kind: EventKind, place: int, reason: str = "", batch: BatchKey | None = None
    ) -> Event:
        rank = self.index * self.size + place
        where = self._locations.get(place)
        pid, node = (where.pid, where.node) if where else (None, "")
        return Event(kind, ProcessKind.WORKER, rank, pid, node, reason, batch=batch)

    def _await(self, call: Call[Any], kind: GroupCall, index: int) -> None:
        self.pending[call] = PendingCall(kind, index)
