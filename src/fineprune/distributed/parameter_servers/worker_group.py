"""A group of workers as the coordinator sees it: its processes, its phase and its lease.

A group is one unit: its members step together, and if one of them dies, all are restarted. A single
worker is a group of one.
"""

import time
from collections.abc import Mapping
from enum import Enum

import numpy as np

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.epoch_state import number_of_samples
from fineprune.distributed.parameter_servers.events import EventKind, ProcessKind, report
from fineprune.distributed.parameter_servers.messages import (
    Array,
    Arrays,
    Broken,
    Connect,
    Done,
    Hello,
    Message,
    Ready,
    Save,
    Saved,
    Step,
    Stepped,
)
from fineprune.distributed.parameter_servers.patience import Patience
from fineprune.distributed.parameter_servers.processes import LOST_NODE, Cluster, Process
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous
from fineprune.distributed.parameter_servers.worker import Build, Worker
from fineprune.distributed.strategy import Strategy

# Seconds that members may take at least to notice that a server died, and to leave their process
# group. Ray takes five seconds to kill a server that was suspended, whose links are open until
# then. A member that waits for another one in a collective usually wakes up when that one leaves,
# but not always.
_LEAVE_SECONDS = 10.0


class GroupPhase(Enum):
    """The state of a group. A step goes from ``IDLE`` through ``STEPPING`` and ``STAGED`` back."""

    STARTING = "starting"  # its processes start, or end the step of the previous generation
    CONNECTING = "connecting"  # its links are being made
    IDLE = "idle"
    STEPPING = "stepping"
    STAGED = "staged"  # all servers have its gradient
    BROKEN = "broken"  # it lost a link, and the reason is not known yet


class WorkerGroup:
    """A group of workers.

    Attributes:
        processes: The processes, by their places in the group.
        phase: The current phase.
        generation: How many times the links were made. The links of each generation have a new
            name.
        lease: The batch that the group has, if any. The group loses it during the step if an update
            is made without its gradient.
        version: The version of the parameters that the group has read; -1 for none.
        deaths: The number of members that died since ``Coordinator.take_deaths`` was last called.
        fruitless_deaths: The number of deaths since the group last computed a gradient.
        patience: The silence of the group and its limit.
        broken: In the phase ``BROKEN``, the place of the member that lost a link, and the reason.
        broken_at: When it did so.
        saving: Whether the answers to ``save`` are being awaited.
        saved: These answers, by the places of the members; empty if a member has died meanwhile.
    """

    def __init__(
        self,
        index: int,
        cluster: Cluster,
        strategy: Strategy,
        build: Build,
        rendezvous: Rendezvous,
    ) -> None:
        self.index = index
        self.processes: list[Process] = []
        self.phase = GroupPhase.STARTING
        self.generation = 0
        self.lease: BatchKey | None = None
        self.version = -1
        self.deaths = 0
        self.fruitless_deaths = 0
        self.patience = Patience(strategy)
        self.broken = (0, "")
        self.broken_at = 0.0
        self.saving = False
        self.saved: dict[int, Saved] = {}
        self._cluster = cluster
        self._strategy = strategy
        self._build = build
        self._rendezvous = rendezvous
        self._owing: list[int] = []  # the numbers of answers that the members owe
        self._to_load: tuple[Arrays, list[Arrays | None]] | None = None
        self._stepped: dict[int, Stepped] = {}
        self._starts = 0
        self._first = True
        self._step_began = 0.0

    @property
    def name(self) -> str:
        """The name of this generation of the group, as the servers know it."""
        return f"group{self.index}-generation{self.generation}"

    @property
    def size(self) -> int:
        """The number of members."""
        return self._strategy.group

    @property
    def built(self) -> bool:
        """Whether all processes have built their replicas and loaded the buffers."""
        return self._to_load is None

    @property
    def joining(self) -> bool:
        """Whether the group does not yet take part in the training."""
        return self.phase in (GroupPhase.STARTING, GroupPhase.CONNECTING)

    @property
    def connectable(self) -> bool:
        """Whether its links can be made as soon as all servers are ready."""
        return self.phase is GroupPhase.STARTING and not self.owing

    @property
    def owing(self) -> list[int]:
        """The places of the members that owe an answer."""
        return [place for place, answers in enumerate(self._owing) if answers]

    @property
    def leaves(self) -> bool:
        """Whether members leave their process group, in which they may hang."""
        return self.size > 1 and self.built and self.phase is GroupPhase.STARTING

    @property
    def losses(self) -> Array:
        """The losses of the last step, float32, shape (B,), in the order of the batch's indices."""
        return np.concatenate([self._stepped[member].losses for member in sorted(self._stepped)])

    @property
    def watched(self) -> Arrays:
        """What the replicas returned besides the losses of the last step, in the same order."""
        parts = [self._stepped[member].watched for member in sorted(self._stepped)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    # -- life cycle -----------------------------------------------------------------------------

    def start(self, buffers: Arrays, random: list[Arrays | None] | None = None) -> None:
        """Start the processes, which join the training as soon as they have started.

        ``random`` holds the state of the random generators of each member; None stands for those
        that its replica starts with.
        """
        self._starts += 1
        self.processes = [
            self._cluster.start(
                ProcessKind.WORKER,
                rank,
                Worker,
                self._build,
                rank,
                self.size,
                self._strategy.servers,
                self._rendezvous,
            )
            for rank in range(self.index * self.size, (self.index + 1) * self.size)
        ]
        self.saved, self.saving = {}, False
        self._to_load = buffers, random or [None] * self.size
        self._owing = [1] * self.size
        self.patience = Patience(self._strategy)
        self._begin_generation()

    def reconnect(self) -> None:
        """Make new links, as soon as the members have ended their step."""
        self._begin_generation()
        if self.owing and self.built:
            usual = 2 * self.patience.step if self.leaves else self.patience.limit
            self.patience.expect(max(usual, _LEAVE_SECONDS))

    def connect(self) -> None:
        """Make the links to the servers, and the process group of the members."""
        self._demand(GroupPhase.CONNECTING)
        buffers, random = self._to_load or (None, [None] * self.size)
        self._to_load = None
        for member, state in zip(self.processes, random, strict=True):
            member.send(Connect(self.name, buffers, state))

    def end(self, dead: Mapping[int, str], reason: str) -> None:
        """Kill all processes, and report this."""
        for place, member in enumerate(self.processes):
            # Until a lost node is noticed, processes may be placed on it, which then never run.
            never_ran = member.hello is None and dead.get(place) == LOST_NODE
            died = place in dead and not never_ran
            self.deaths += died
            kind = EventKind.DIED if died else EventKind.STOPPED
            report(member.event(kind, dead.get(place, reason)))
        self.kill()

    def kill(self) -> None:
        """Kill all processes without a report."""
        for member in self.processes:
            self._cluster.kill(member)

    # -- steps ----------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Exclude the time until the next step from the phase ``wait``."""
        self._first = True

    def step(
        self,
        indices: Array,
        weights: Array | None,
        version: int,
        *,
        reads: bool,
        following: tuple[BatchKey, Array] | None = None,
    ) -> None:
        """Let the members compute the gradient of the leased batch and push it.

        Args:
            indices, weights, reads: As in ``Step``, for the whole batch.
            version: The version of the parameters with which it is computed.
            following: The batch that the group probably gets next, and the indices of its samples.
        """
        assert self.lease is not None
        self._demand(GroupPhase.STEPPING)
        self._step_began = time.monotonic()
        self.version = version
        self._stepped = {}
        report(self.processes[0].event(EventKind.LEASED, batch=self.lease))
        next_key, next_indices = following or (None, None)
        for place, member in enumerate(self.processes):
            samples = number_of_samples(len(indices), place, self.size)
            step = Step(
                self.lease,
                _part(indices, place, self.size),
                None if weights is None else _part(weights, place, self.size),
                samples / len(indices),
                reads,
                self._first,
                next_key,
                None if next_indices is None else _part(next_indices, place, self.size),
            )
            member.send(step)
        self._first = False

    def release(self) -> None:
        """End the lease: the batch was applied, or an update was made without it."""
        self.lease = None
        if self.phase is GroupPhase.STAGED:
            self.phase = GroupPhase.IDLE

    def save(self) -> None:
        """Ask the members for their buffers and random states, which ``saved`` then holds."""
        self.saved, self.saving = {}, True
        self._demand(self.phase)
        for member in self.processes:
            member.send(Save())

    # -- messages -------------------------------------------------------------------------------

    def receive(self, place: int, message: Message) -> bool:
        """Process a message of a member.

        Returns:
            Whether the gradient of the leased batch is now staged.
        """
        before = self.phase
        self.patience.hear()
        match message:
            case Hello():
                if all(member.hello is not None for member in self.processes):
                    self.patience.expect()
            case Ready():
                kind = EventKind.STARTED if self._starts == 1 else EventKind.RESTARTED
                report(self.processes[place].event(kind))
                self._answered(place)
            case Done():
                self._answered(place)
            case Stepped():
                if self.phase is GroupPhase.STEPPING:
                    self._stepped[place] = message
                self._answered(place)
            case Broken():
                if self.phase in (GroupPhase.CONNECTING, GroupPhase.STEPPING):
                    self.phase = GroupPhase.BROKEN
                    self.broken, self.broken_at = (place, message.reason), time.monotonic()
                self._answered(place)
            case Saved():
                self.saved[place] = message
                self.saving = len(self.saved) < self.size
                self._answered(place)
            case _:
                raise TypeError(f"expected a message of a worker, got {message!r}")
        return self.phase is not before and self.phase is GroupPhase.STAGED

    def _answered(self, place: int) -> None:
        self._owing[place] -= 1
        if self.owing:
            return
        self.patience.rest()
        if self.phase is GroupPhase.CONNECTING:
            self.phase = GroupPhase.IDLE
        elif self.phase is GroupPhase.STEPPING:
            self.fruitless_deaths = 0
            self.patience.note_step(time.monotonic() - self._step_began)
            # Without a lease, an update was made without this gradient.
            self.phase = GroupPhase.IDLE if self.lease is None else GroupPhase.STAGED

    def _demand(self, phase: GroupPhase) -> None:
        """Begin a phase that ends when all members have answered."""
        self.phase = phase
        self._owing = [answers + 1 for answers in self._owing]
        self.patience.expect()

    def _begin_generation(self) -> None:
        self.generation += 1
        self.phase = GroupPhase.STARTING
        self.lease, self.version = None, -1


def _part(samples: Array, place: int, size: int) -> Array:
    """Return the samples that a member is sent, as many as ``number_of_samples`` says.

    Even a member that gets none has to step, because the others wait for it. It is sent the first
    one.
    """
    part = np.array_split(samples, size)[place]
    return part if len(part) else samples[:1]
