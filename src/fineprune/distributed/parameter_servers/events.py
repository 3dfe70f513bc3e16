"""Events: what happens to the workers and servers of a training. Each is logged as one line.

The logger is ``fineprune.distributed``. A program that reacts to events, such as a test, adds a
filter or a handler to it: ``args[0]`` of each record is the ``Event``.
"""

import logging
from dataclasses import dataclass
from enum import Enum

from fineprune.distributed.parameter_servers.batches import BatchKey

LOGGER = logging.getLogger("fineprune.distributed")


class ProcessKind(Enum):
    """The role of a process in the training."""

    WORKER = "worker"
    SERVER = "server"


class EventKind(Enum):
    """What happened.

    - ``STARTED``: A process started. ``RESTARTED``: It replaces one that died.
    - ``DIED``: A process died. ``STOPPED``: It was killed because another process died.
    - ``ROLLED_BACK``: The parameters were rolled back because a server died.
    - ``WAITING``: A process waits for free CPUs. This is reported repeatedly.
    - ``SHARED``: Dedicated servers share nodes with workers, because there are too few nodes.
    - ``LEASED``: A batch was leased to a group; the event names the group's leader.
    - ``UPDATED``: The servers were told to apply gradients, which makes a version.
    """

    STARTED = "started"
    RESTARTED = "restarted"
    DIED = "died"
    STOPPED = "stopped"
    ROLLED_BACK = "rolled back"
    WAITING = "waiting"
    SHARED = "shared"
    LEASED = "leased"
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
    """One event. ``str`` returns its line. Attributes that do not apply are None or empty.

    Attributes:
        kind: What happened.
        process: The role of the process that the event concerns.
        index: The worker's rank, or the server's index.
        pid: The process ID on the node.
        node: The name of the node.
        reason: The reason, in words.
        version: The version of the parameters.
        batch: The batch that the event concerns.
    """

    kind: EventKind
    process: ProcessKind | None = None
    index: int | None = None
    pid: int | None = None
    node: str = ""
    reason: str = ""
    version: int | None = None
    batch: BatchKey | None = None

    def __str__(self) -> str:
        name = f"{self.process.value} {self.index}" if self.process else ""
        match self.kind:
            case EventKind.ROLLED_BACK | EventKind.UPDATED:
                line = f"{self.kind.value} to version {self.version}"
            case EventKind.WAITING:
                line = "waiting for CPUs"
            case EventKind.SHARED:
                line = f"dedicated servers share nodes with workers: {self.node}"
            case EventKind.LEASED if self.batch is not None:
                line = f"batch {self.batch.batch} of epoch {self.batch.epoch} leased to {name}"
            case _:
                where = f" (process {self.pid} on {self.node})" if self.pid is not None else ""
                line = f"{name} {self.kind.value}{where}"
        return f"{line}: {self.reason}" if self.reason else line


def report(event: Event) -> None:
    """Log an event."""
    LOGGER.log(_LEVELS.get(event.kind, logging.WARNING), "%s", event)
