"""Events: what happens to the workers and servers of a training. Each is logged as one line.

The logger is ``fineprune.distributed``. A program that reacts to events, such as a test, adds a
filter or a handler to it: ``args[0]`` of each record is the ``Event``.
"""

import logging
from dataclasses import dataclass
from enum import Enum

from fineprune.distributed.parameter_servers.epoch import BatchKey

LOGGER = logging.getLogger("fineprune.distributed")


class ProcessKind(Enum):
    """The role of a process in the training."""

    WORKER = "worker"
    SERVER = "server"


class EventKind(Enum):
    """What happened.

    - ``STARTED``: A process started. ``RESTARTED``: It replaces one that died.
    - ``DIED``: A process died. ``STOPPED``: It never ran, because its node was lost.
    - ``ROLLED_BACK``: The parameters were rolled back because a server died.
    - ``WAITING``: Processes wait for free CPUs. This is reported repeatedly.
    - ``SHARED``: Dedicated servers share nodes with workers, because there are too few nodes.
    - ``LEASED``: A group was given a batch; the event names the group's leader.
    - ``UPDATED``: The servers were told to apply gradients, which makes a version.
    """

    STARTED = "started"
    RESTARTED = "restarted"
    DIED = "died"
    STOPPED = "stopped"
    ROLLED_BACK = "rolled back"
    WAITING = "waiting"
    SHARED = "shared"
    LEASED = "computes"
    UPDATED = "updated"


# The others are warnings.
_LEVELS = {
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
    LOGGER.log(_LEVELS.get(event.kind, logging.WARNING), "%s", event)
