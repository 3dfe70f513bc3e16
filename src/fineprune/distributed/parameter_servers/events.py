"""Events: what happens to the workers and servers of a training, each logged as one line.

Lines go to the logger ``fineprune.distributed``. A program that wants to react to an event, as the
tests do, gives the coordinator a function instead of reading lines.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey

LOGGER = logging.getLogger("fineprune.distributed")


class ProcessKind(Enum):
    """What a process of the training does."""

    WORKER = "worker"
    SERVER = "server"


class EventKind(Enum):
    """What happened.

    A process ``STARTED``, or was ``RESTARTED`` in place of one that died; it ``DIED``, or was
    ``STOPPED`` because another process died. After a server's death the parameters are
    ``ROLLED_BACK``. ``WAITING`` is repeated as long as there are not enough CPUs. Nodes are
    ``SHARED`` if there is no room for dedicated servers on nodes of their own. A batch was
    ``LEASED`` to a worker, the leader of its group, or its gradient was ``STAGED`` on a server, or
    gradients are being applied: the parameters are ``UPDATED``.
    """

    STARTED = "started"
    RESTARTED = "restarted"
    DIED = "died"
    STOPPED = "stopped"
    ROLLED_BACK = "rolled back"
    WAITING = "waiting"
    SHARED = "shared"
    LEASED = "leased"
    STAGED = "staged"
    UPDATED = "updated"


_LEVELS = {
    EventKind.STARTED: logging.INFO,
    EventKind.RESTARTED: logging.WARNING,
    EventKind.DIED: logging.WARNING,
    EventKind.STOPPED: logging.INFO,
    EventKind.ROLLED_BACK: logging.WARNING,
    EventKind.WAITING: logging.WARNING,
    EventKind.SHARED: logging.WARNING,
    EventKind.LEASED: logging.DEBUG,
    EventKind.STAGED: logging.DEBUG,
    EventKind.UPDATED: logging.DEBUG,
}


@dataclass(frozen=True)
class Event:
    """One event. ``str`` makes its line; what does not concern its kind is None or empty.

    Attributes:
        kind: What happened.
        process: The kind of process that it happened to.
        index: The worker's rank, or the server's index.
        pid: The number of the process on its node.
        node: The name of the node.
        reason: Why it happened, in words.
        version: The version of the parameters.
        batch: The batch that it is about.
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
        line = self._what()
        return f"{line}: {self.reason}" if self.reason else line

    def _what(self) -> str:
        name = f"{self.process.value} {self.index}" if self.process else ""
        match self.kind:
            case EventKind.ROLLED_BACK:
                return f"rolled back to version {self.version}"
            case EventKind.UPDATED:
                return f"updated to version {self.version}"
            case EventKind.WAITING:
                return "waiting for CPUs"
            case EventKind.SHARED:
                return f"dedicated servers share nodes with workers: {self.node}"
            case EventKind.LEASED | EventKind.STAGED if self.batch is not None:
                to = "to" if self.kind is EventKind.LEASED else "on"
                batch = f"batch {self.batch.batch} of epoch {self.batch.epoch}"
                return f"{batch} {self.kind.value} {to} {name}"
            case _:
                where = f" (process {self.pid} on {self.node})" if self.pid is not None else ""
                return f"{name} {self.kind.value}{where}"


Report = Callable[[Event], None]


def reporter(on_event: Report | None = None) -> Report:
    """Return a function that logs an event and then calls ``on_event`` with it."""

    def report(event: Event) -> None:
        LOGGER.log(_LEVELS[event.kind], "%s", event)
        if on_event is not None:
            on_event(event)

    return report
