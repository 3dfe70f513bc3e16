"""The processes of a training as the driver sees them, groups of workers, and what happens to both.

Each event is logged as one line. The logger is ``fineprune.distributed``. A program that reacts to
events, such as a test, adds a filter or a handler to it: ``args[0]`` of each record is the
``Event``.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import ray
from ray.exceptions import RayError

from fineprune.distributed.parameter_servers.epoch import BatchKey, Stepped
from fineprune.distributed.parameter_servers.failures import LOST_NODE
from fineprune.errors import RunError

# If a worker dies so many times without computing a gradient in between, the same cause would kill
# it again.
_FRUITLESS_DEATHS = 3
LOGGER = logging.getLogger("fineprune.distributed")


class ProcessKind(Enum):
    """The role of a process in the training."""

    WORKER = "worker"
    SERVER = "server"


class EventKind(Enum):
    """What happened."""

    STARTED = "started"
    RESTARTED = "restarted"  # in place of one that died
    DIED = "died"
    STOPPED = "stopped"  # It never ran, because its node was lost.
    ROLLED_BACK = "rolled back"  # The parameters were, because a server died.
    WAITING = "waiting"  # Processes wait for free CPUs. This is reported repeatedly.
    SHARED = "shared"  # Dedicated servers share nodes with workers: there are too few nodes.
    LEASED = "computes"  # A group was given a batch; the event names the group's leader.
    UPDATED = "updated"  # The servers were told to apply gradients, which makes a version.


_LEVELS = dict.fromkeys(EventKind, logging.WARNING) | {
    EventKind.STARTED: logging.INFO,
    EventKind.STOPPED: logging.INFO,
    EventKind.LEASED: logging.DEBUG,
    EventKind.UPDATED: logging.DEBUG,
}


@dataclass(frozen=True)
class Event:
    """One event. ``str`` returns its line. Attributes that do not apply are None.

    Attributes:
        kind: What happened.
        line: The same in words.
        process: The role of the process that the event concerns.
        index: The worker's rank, or the server's index.
        pid: The process ID on the node.
        version: The version of the parameters.
        batch: The batch that the event concerns.
    """

    kind: EventKind
    line: str
    process: ProcessKind | None = None
    index: int | None = None
    pid: int | None = None
    version: int | None = None
    batch: BatchKey | None = None

    def __str__(self) -> str:
        return self.line


def report(event: Event) -> None:
    """Log an event."""
    LOGGER.log(_LEVELS[event.kind], "%s", event)


@dataclass(frozen=True)
class Started:
    """Where an actor runs: its identifier in Ray, its process ID, and the name of its node."""

    actor: str
    pid: int
    node: str


@dataclass(eq=False)
class Process:
    """A worker or a server: an actor, and its successors.

    Ray's own restarts are not used, because an actor is given the present state when it begins, and
    because errors of a dead actor have to be told from those of its successor.

    Attributes:
        kind: Its role.
        index: The worker's rank, or the server's index.
        make: Function that makes the actor.
        actor: The actor.
        where: Where it runs; None until it has begun.
        pending: The number of calls that have not returned.
        deaths: The number of deaths since ``Training.take_deaths`` was last called.
        starts: How many times an actor was started.
        fruitless_deaths: The number of deaths since the worker last computed a gradient.
    """

    kind: ProcessKind
    index: int
    make: Callable[["Process"], Any]
    actor: Any = None
    where: Started | None = None
    pending: int = 0
    deaths: int = 0
    starts: int = 0
    fruitless_deaths: int = 0

    def start(self) -> None:
        """Start an actor."""
        self.starts += 1
        self.actor, self.where = self.make(self), None

    def note_begun(self, where: Started) -> None:
        """Note that the actor has begun."""
        if self.where is None:
            self.where = where
            self.report(EventKind.STARTED if self.starts == 1 else EventKind.RESTARTED)

    def end(self, reason: str) -> bool:
        """Kill the actor, which died or hangs, and report it.

        Returns:
            Whether this is a death. Until a lost node is noticed, an actor may be placed on it,
            which then never runs.

        Raises:
            RunError: A worker died repeatedly.
        """
        died = self.where is not None or reason != LOST_NODE
        self.report(EventKind.DIED if died else EventKind.STOPPED, reason)
        self.kill()
        self.deaths += died
        self.fruitless_deaths += died
        if self.kind is ProcessKind.WORKER and self.fruitless_deaths == _FRUITLESS_DEATHS:
            raise RunError(
                f"worker {self.index} died {_FRUITLESS_DEATHS} times without a batch in between; "
                f"the last time: {reason}"
            )
        return died

    def kill(self) -> None:
        """Kill the actor without a report."""
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self.actor, no_restart=True)

    def report(self, kind: EventKind, reason: str = "", batch: BatchKey | None = None) -> None:
        """Report an event that concerns this process."""
        line, pid = f"{self.kind.value} {self.index} {kind.value}", None
        if self.where is not None:
            pid = self.where.pid
            line += f" (process {pid} on {self.where.node})"
        line += f": {reason}" if reason else ""
        report(Event(kind, line, self.kind, self.index, pid, batch=batch))


@dataclass(eq=False)
class Group:
    """Workers that compute a gradient together. A worker alone is a group of one.

    Attributes:
        index: The index of the group.
        workers: The members. The first one is the leader.
        lease: The batch that the group has, if any. It loses it during a step if an update is made
            without its gradient, if a member dies, or if the parameters are rolled back.
        version: The version of the parameters with which it computes.
        shares: The weight of each member's gradient in their mean, by its place; without members
            that get no sample.
        stepped: What the members found out in the step, by their places.
        parts: Ray's references to the parts of the members' gradients, by their places, one for
            each server.
        gradients: The same of their mean.
        arrived: When the gradient was complete; 0 before.
    """

    index: int
    workers: list[Process]
    lease: int | None = None
    version: int = -1
    shares: dict[int, float] = field(default_factory=dict)
    stepped: dict[int, Stepped] = field(default_factory=dict)
    parts: dict[int, list[Any]] = field(default_factory=dict)
    gradients: list[Any] = field(default_factory=list)
    arrived: float = 0.0

    @property
    def idle(self) -> bool:
        """Whether it can compute a batch."""
        ready = all(worker.where is not None and not worker.pending for worker in self.workers)
        return self.lease is None and ready

    def release(self) -> None:
        """End the lease: the batch was applied, or it is queued again."""
        self.lease, self.arrived = None, 0.0
        self.shares, self.stepped, self.parts, self.gradients = {}, {}, {}, []
