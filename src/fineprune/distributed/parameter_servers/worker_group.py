"""A group of workers as the coordinator sees it: its processes, its phase and its pending calls.

A group is one unit: its members step together, and if one of them dies, all are restarted. A single
worker is a group of one.
"""

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.events import Event, EventKind, ProcessKind, Report
from fineprune.distributed.parameter_servers.link import LinkBroken
from fineprune.distributed.parameter_servers.ray_cluster import (
    LOST_NODE,
    Call,
    Cluster,
    Died,
    Location,
    Process,
    Silent,
)
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous
from fineprune.distributed.parameter_servers.server_group import PROBE_SECONDS, ServerGroup
from fineprune.distributed.parameter_servers.worker import Buffers, Build, Computed, Worker
from fineprune.distributed.strategy import Strategy

# The number of recent steps whose median duration is a group's usual step.
_RECENT_STEPS = 20
# Seconds that members may take to leave their process group after a server died. A member that
# waits for another one in a collective usually wakes up when that one leaves, but not always.
_LEAVE_SECONDS = 10.0


class GroupPhase(Enum):
    """The state of a group. A step goes from ``IDLE`` through all later phases and back."""

    STARTING = "starting"  # its processes start, or close the links of the previous generation
    CONNECTING = "connecting"  # its links are being made
    IDLE = "idle"
    LEASED = "leased"  # it has a batch and will compute next
    COMPUTING = "computing"
    PUSHING = "pushing"
    STAGED = "staged"  # all servers have its gradient


class GroupCall(Enum):
    """The kinds of calls that a group waits for: to its members, or to servers on its behalf."""

    PLACE = "place"
    START = "start"
    LOAD_BUFFERS = "load buffers"
    DISCONNECT = "disconnect"
    CONNECT = "connect"
    COMPUTE = "compute"
    PUSH = "push"
    SERVER_CONNECT = "server connect"
    SERVER_STAGE = "server stage"


_OF_START = (GroupCall.PLACE, GroupCall.START, GroupCall.LOAD_BUFFERS)
_OF_SERVERS = (GroupCall.SERVER_CONNECT, GroupCall.SERVER_STAGE)


@dataclass(frozen=True)
class PendingCall:
    """A call that has not ended. ``index`` is the member's place or the server's index."""

    kind: GroupCall
    index: int


class GroupBroken(Exception):
    """A group cannot continue, because a process died, hangs, or cannot be reached.

    Attributes:
        reason: What was observed.
        dead: The places of the members that died or hang, each with the reason. It is empty if the
            members only have to be restarted.
        certain: Whether a member is known to be dead. Otherwise, a server may be the cause.
    """

    def __init__(self, reason: str, dead: Mapping[int, str], *, certain: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.dead = dead
        self.certain = certain


class WorkerGroup:
    """A group of workers. A method starts each phase, which ends when no call is pending.

    Args:
        index: The index of this group.
        cluster: The cluster, which starts the processes.
        strategy: The strategy, which holds the size of the group, the number of servers, and how
            long a worker may be silent.
        build: Function that makes a replica.
        rendezvous: The settings of all links.
        report: Function that is called with each event.

    Attributes:
        phase: The current phase.
        pending: The calls that the group waits for.
        generation: How many times the links were made. The links of each generation have a new
            name.
        lease: The batch that the group has, if any. The group loses it during the computation if an
            update is made without its gradient.
        version: The version of the parameters that the group has read; -1 for none.
        fruitless_deaths: The number of deaths since the group last computed a gradient.
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
        self._silence = 0.0
        self._step_began = 0.0
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)

    @property
    def name(self) -> str:
        """The name of this generation of the group, as the servers know it."""
        return f"group{self.index}-generation{self.generation}"

    @property
    def size(self) -> int:
        """The number of members."""
        return self._strategy.group

    @property
    def starts(self) -> bool:
        """Whether the processes are starting and have not loaded the buffers yet."""
        return any(one.kind in _OF_START for one in self.pending.values())

    @property
    def joining(self) -> bool:
        """Whether the group does not yet take part in the training."""
        return self.phase in (GroupPhase.STARTING, GroupPhase.CONNECTING)

    @property
    def losses(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The losses of the last step, float32, shape (B,), in the order of the batch's indices."""
        return np.concatenate([self._losses[member] for member in sorted(self._losses)])

    @property
    def unplaced(self) -> list[str]:
        """The names of the workers whose processes do not run yet."""
        return [
            f"worker {self._rank(one.index)}"
            for one in self.pending.values()
            if one.kind is GroupCall.PLACE
        ]

    # -- life cycle -----------------------------------------------------------------------------

    def start(self, buffers: Buffers) -> None:
        """Start the processes, which join the training as soon as they have started.

        Args:
            buffers: The initial buffers of the model.
        """
        self._starts += 1
        self._locations = {}
        self._steps.clear()
        self._members = [
            self._cluster.start_worker(
                self.index,
                Worker,
                self._build,
                self._rank(member),
                member,
                self.size,
                self._strategy.servers,
                self._rendezvous,
            )
            for member in range(self.size)
        ]
        self._begin_generation()
        for place, member in enumerate(self._members):
            self._await(member.placed, GroupCall.PLACE, place)
            self._await(member.made, GroupCall.START, place)
            if buffers:
                call = member.call(Worker.load_buffers, buffers)
                self._await(call, GroupCall.LOAD_BUFFERS, place)

    def reconnect(self) -> None:
        """Make new links, after each member has closed its old ones."""
        self._begin_generation()
        for place, member in enumerate(self._members):
            self._await(member.call(Worker.disconnect), GroupCall.DISCONNECT, place)

    def connect(self, servers: ServerGroup) -> None:
        """Make the links to the servers, and the process group of the members."""
        self._begin(GroupPhase.CONNECTING)
        for place, member in enumerate(self._members):
            self._await(member.call(Worker.connect, self.name), GroupCall.CONNECT, place)
        for server, call in enumerate(servers.connect(self.name)):
            self._await(call, GroupCall.SERVER_CONNECT, server)

    def probe(self) -> tuple[dict[int, str], list[int]]:
        """Return the members that have died, each with the reason, and those that do not answer.

        This takes at most ``PROBE_SECONDS``. Members that are still starting are left out.
        """
        pings = {place: self._members[place].ping() for place in self._locations}
        deadline = time.monotonic() + PROBE_SECONDS
        dead, silent = {}, []
        for place, ping in pings.items():
            try:
                self._cluster.result(ping, max(0.0, deadline - time.monotonic()))
            except Died as error:
                dead[place] = str(error)
            except Silent:
                silent.append(place)
        return dead, silent

    def end(self, dead: Mapping[int, str], reason: str) -> None:
        """Kill all processes, report this, and drop their pending calls.

        Args:
            dead: The places of the members that died, each with the reason.
            reason: Why the other members are stopped.
        """
        for place in range(self.size):
            # Until a lost node is noticed, processes may be placed on it, which then never run.
            never_ran = place not in self._locations and dead.get(place) == LOST_NODE
            kind = EventKind.DIED if place in dead and not never_ran else EventKind.STOPPED
            self._report(self._event(kind, place, dead.get(place, reason)))
        self.kill()

    def kill(self) -> None:
        """Kill all processes without a report."""
        for member in self._members:
            member.kill()
        self.pending.clear()

    # -- the phases of a step -------------------------------------------------------------------

    def compute(
        self,
        indices: np.ndarray[Any, Any],
        weights: np.ndarray[Any, Any] | None,
        version: int,
        *,
        reads: bool,
    ) -> None:
        """Start to compute the gradient of the leased batch.

        Args:
            indices: The indices of its samples, int64, shape (B,).
            weights: The weights of their losses, float32, shape (B,); None for equal weights.
            version: The version of the parameters with which it is computed.
            reads: Whether the group receives these parameters first.
        """
        assert self.lease is not None
        self._begin(GroupPhase.COMPUTING)
        self._step_began = time.monotonic()
        self.version = version
        self._losses = {}
        self._report(self._event(EventKind.LEASED, 0, batch=self.lease))
        parts = np.array_split(np.arange(len(indices)), self.size)
        for place, (member, part) in enumerate(zip(self._members, parts, strict=True)):
            share = len(part) / len(indices)
            # Even a member without samples has to step, because the others wait for it.
            sent = part if len(part) else [0]
            of_part = None if weights is None else weights[sent]
            call = member.call(Worker.compute, self.lease, indices[sent], of_part, share, reads)
            self._await(call, GroupCall.COMPUTE, place)

    def push(self, servers: ServerGroup) -> None:
        """Start to send the gradient to all servers."""
        assert self.lease is not None
        self._begin(GroupPhase.PUSHING)
        self._await(self._members[0].call(Worker.push, self.lease), GroupCall.PUSH, 0)
        for server, call in enumerate(servers.stage(self.name, self.lease)):
            self._await(call, GroupCall.SERVER_STAGE, server)

    def note_step(self) -> None:
        """Note that all servers have the gradient, which ends the group's step."""
        self.phase = GroupPhase.STAGED
        self._steps.append(time.monotonic() - self._step_began)

    def release(self) -> None:
        """End the lease: the batch was applied, or an update was made without it."""
        self.lease = None
        if self.phase is GroupPhase.STAGED:
            self.phase = GroupPhase.IDLE

    # -- calls ----------------------------------------------------------------------------------

    def finish(self, call: Call[Any]) -> dict[str, float]:
        """Process the result of a pending call that has ended.

        Returns:
            The duration of each phase of the step, in seconds.

        Raises:
            GroupBroken: A member died, or a process that it communicates with died.
        """
        pending = self.pending.pop(call)
        self._silence = 0.0
        try:
            result = self._cluster.result(call)
        except (Died, LinkBroken) as error:
            # If a server's call fails, the cause may be the leader, which has the links.
            member = 0 if pending.kind in _OF_SERVERS else pending.index
            # The other end of a link may notice a death before Ray does.
            dead = {} if isinstance(error, Died) else self.probe()[0]
            certain = isinstance(error, Died) or bool(dead)
            raise GroupBroken(str(error), dead or {member: str(error)}, certain=certain) from None
        match pending.kind, result:
            case GroupCall.PLACE, Location():
                self._locations[pending.index] = result
            case GroupCall.START, _:
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
        """Exclude the time until the next call from the phase ``wait``."""
        for member in self._members:
            member.call(Worker.rest)

    def buffers(self) -> Buffers:
        """Return the buffers of the leader.

        Raises:
            Died: The leader died.
            Silent: The leader does not answer.
        """
        call = self._members[0].call(Worker.buffers)
        return self._cluster.result(call, self._patience())

    def add_silence(self, seconds: float) -> None:
        """Add to the time for which the group has been silent.

        Raises:
            GroupBroken: The group has been silent for too long.
        """
        waiting = [one for one in self.pending.values() if one.kind not in _OF_SERVERS]
        if not waiting or any(one.kind is GroupCall.PLACE for one in waiting):
            return
        self._silence += seconds
        if self._silence <= self._patience():
            return
        if self._leaves():
            dead, _ = self.probe()
            raise GroupBroken("it did not leave its process group", dead, certain=True)
        usual = "before its first step"
        if self._steps:
            usual = f"its usual step takes {statistics.median(self._steps):.2g} s"
        reason = (
            f"killed because it was silent for {self._silence:.0f} s while {self.phase.value} "
            f"({usual})"
        )
        dead, silent = self.probe()
        hanging = dict.fromkeys(silent or [waiting[0].index], reason)
        raise GroupBroken(reason, dead or hanging, certain=True)

    def _patience(self) -> float:
        """Return how many seconds the group may be silent."""
        usual = statistics.median(self._steps) if self._steps else 0.0
        if self._leaves():
            return max(_LEAVE_SECONDS, 2 * usual)
        if not self._steps:
            return self._strategy.startup_seconds
        return max(self._strategy.silence_seconds, self._strategy.silence_factor * usual)

    def _leaves(self) -> bool:
        """Return whether members are leaving a process group, in which they may hang."""
        return self.size > 1 and any(
            one.kind is GroupCall.DISCONNECT for one in self.pending.values()
        )

    def _begin_generation(self) -> None:
        self.generation += 1
        self._begin(GroupPhase.STARTING)
        self.lease, self.version = None, -1
        self.pending = {call: one for call, one in self.pending.items() if one.kind in _OF_START}

    def _begin(self, phase: GroupPhase) -> None:
        self.phase = phase
        self._silence = 0.0

    def _rank(self, place: int) -> int:
        return self.index * self.size + place

    def _event(
        self, kind: EventKind, place: int, reason: str = "", batch: BatchKey | None = None
    ) -> Event:
        where = self._locations.get(place)
        pid, node = (where.pid, where.node) if where else (None, "")
        return Event(kind, ProcessKind.WORKER, self._rank(place), pid, node, reason, batch=batch)

    def _await(self, call: Call[Any], kind: GroupCall, index: int) -> None:
        self.pending[call] = PendingCall(kind, index)
