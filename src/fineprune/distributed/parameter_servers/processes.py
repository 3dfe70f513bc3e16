"""The processes of a training as the driver sees them, and what happens to them.

Each event is logged as one line by the logger ``fineprune.distributed``. ``args[0]`` of each record
is the ``Event``, for programs that react to events.
"""

import contextlib
import logging
from dataclasses import dataclass
from enum import Enum
from typing import Any

import ray
from ray.exceptions import RayError

from fineprune.distributed.parameter_servers.epoch import BatchKey
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
    WAITING = "waiting"  # For Ray, or processes for free CPUs, which is reported repeatedly.
    SHARED = "shared"  # Dedicated servers share nodes with workers: there are too few nodes.
    LEASED = "computes"  # A group was given a batch; the event names the group's leader.
    UPDATED = "updated"  # The servers were told to apply gradients, which makes a version.


_LEVELS = {
    EventKind.STARTED: logging.INFO,
    EventKind.STOPPED: logging.INFO,
    EventKind.LEASED: logging.DEBUG,
    EventKind.UPDATED: logging.DEBUG,
}


@dataclass(frozen=True)
class Event:
    """One event, in words in its ``line``. Attributes that do not apply are None.

    ``process``, ``index`` (the worker's rank, or the server's index) and ``pid`` are those of the
    process, ``version`` is that of the parameters, and ``batch`` the batch that it concerns.
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


def report(kind: EventKind, line: str, **about: Any) -> None:
    """Log an event with further attributes of ``Event``."""
    LOGGER.log(_LEVELS.get(kind, logging.WARNING), "%s", Event(kind, line, **about))


@dataclass(eq=False)
class Process:
    """A worker or a server: an actor, and its successors.

    Ray's own restarts are not used, because an actor is given the present state when it begins, and
    because errors of a dead actor have to be told from those of its successor.

    Attributes:
        index: The worker's rank, or the server's index.
        identity: Its identifier in Ray, which errors name.
        where: Its process ID and the name of its node; None until it has begun.
        pending: The number of calls that have not returned.
        starts: How many times an actor was started.
        fruitless_deaths: The number of deaths since the worker last computed a gradient.
    """

    kind: ProcessKind
    index: int
    actor: Any = None
    identity: str = ""
    where: tuple[int, str] | None = None
    pending: int = 0
    starts: int = 0
    fruitless_deaths: int = 0

    def start(self, actor: Any) -> None:
        """Take an actor that has just been made."""
        self.actor, self.identity, self.where = actor, actor._actor_id.hex(), None
        self.starts += 1

    def note_begun(self, where: tuple[int, str]) -> None:
        """Note that the actor has begun."""
        if self.where is None:
            self.where = where
            self.report(EventKind.STARTED if self.starts == 1 else EventKind.RESTARTED)

    def end(self, reason: str) -> bool:
        """Kill the actor, which died or hangs, and report it; return whether it had run.

        Until a lost node is noticed, an actor may be placed on it, which then never runs.

        Raises:
            RunError: A worker died repeatedly.
        """
        died = self.where is not None or reason != LOST_NODE
        self.report(EventKind.DIED if died else EventKind.STOPPED, reason)
        self.kill()
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
        pid, node = self.where or (None, None)
        line = f"{self.kind.value} {self.index} {kind.value}"
        line += f" (process {pid} on {node})" if pid else ""
        line += f": {reason}" if reason else ""
        report(kind, line, process=self.kind, index=self.index, pid=pid, batch=batch)
