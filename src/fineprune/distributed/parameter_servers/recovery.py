"""What happens when a process of a training dies, hangs or loses its links.

- A worker: its group is restarted, and the batch that the group had is queued again.
- A server: it is restarted, all servers return to the last snapshot that all of them have, the
  batches of the updates since then are queued again or lost, and all groups make new links.

The end of a channel shows a death at once. A link that broke shows that something is wrong, but not
what; the end of a channel usually follows. A process that hangs is killed when the patience with it
ends, and then counts as dead.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fineprune.distributed.parameter_servers.epoch_state import EpochState
from fineprune.distributed.parameter_servers.events import Event, EventKind, ProcessKind, report
from fineprune.distributed.parameter_servers.messages import Arrays, Forget
from fineprune.distributed.parameter_servers.placement import REPORT_EVERY, available
from fineprune.distributed.parameter_servers.processes import Cluster, Process
from fineprune.distributed.parameter_servers.server_group import ServerGroup
from fineprune.distributed.parameter_servers.worker_group import GroupPhase, WorkerGroup
from fineprune.distributed.strategy import Strategy
from fineprune.errors import RunError

# If a group dies this many times without computing a gradient in between, the training ends.
_FRUITLESS_DEATHS = 3
# How long after a link broke the end of a channel may come that explains it.
_GRACE_SECONDS = 1.0
# A process that does not answer for this many seconds may be the reason why others wait.
_SUSPECT_SECONDS = 2.0
# A process whose links broke and that does not answer for this many seconds counts as dead, even on
# a busy node.
_SILENT_SECONDS = 5.0


@dataclass
class Recovery:
    """Restarts processes, and returns the training to a state from which it can continue.

    Attributes:
        epoch: The epoch in progress.
        buffers: The buffers that workers load when they are started again.
    """

    _cluster: Cluster
    _strategy: Strategy
    _servers: ServerGroup
    _groups: Sequence[WorkerGroup]
    epoch: EpochState
    buffers: Arrays
    _waited: float = 0.0  # how long processes have waited for CPUs, in seconds
    _reported: float = 0.0  # the value of ``_waited`` when it was last reported

    def ended(self, process: Process, reason: str) -> None:
        """Recover from the death of a process."""
        if process.kind is ProcessKind.SERVER:
            self._server_died(process.index, reason)
        else:
            group, place = divmod(process.index, self._strategy.group)
            self._replace(self._groups[group], {place: reason}, reason)

    def look(self, seconds: float) -> None:
        """Look for processes that hang, and for the reasons why links broke."""
        self._cluster.add_silence(seconds)
        for index, reason in self._servers.hanging(seconds).items():
            self._server_died(index, reason)
        for group in self._groups:
            if group.phase is GroupPhase.BROKEN:
                self._explain(group)
            # Otherwise, workers may be silent because of a server.
            elif self._servers.silence < _SUSPECT_SECONDS and group.patience.ends(seconds):
                self._end_silence(group)
        self._report_waiting(seconds)

    def _server_died(self, index: int, reason: str) -> None:
        """Restart a server, return all servers to one version, and let the groups reconnect."""
        was_ready = self._servers.is_ready(index)
        self._servers.replace(index, reason)
        if not was_ready:
            return  # All others were rolled back when it died the last time.
        for group in self._groups:
            if group.phase is GroupPhase.CONNECTING:
                # It may be waiting for the dead server to make a link, which cannot be aborted.
                silent = dict.fromkeys(_silent(group), "killed because it did not answer")
                self._replace(group, silent, "a server died")
            else:
                self.epoch.ledger.orphan(group.index)
                group.reconnect()
        self._servers.roll_back()
        lose = self._strategy.undone_batches == "lose"
        version = self._servers.version
        batches = self.epoch.undo(version, lose=lose)
        fate = "lost" if lose else "queued again"
        told = f"{batches} batches are {fate}" if batches else "no update is undone"
        report(Event(EventKind.ROLLED_BACK, reason=told, version=version))

    def _explain(self, group: WorkerGroup) -> None:
        """Restart a group that lost a link, if no death explains it, or else the silent server."""
        seconds = time.monotonic() - group.broken_at
        if seconds < _GRACE_SECONDS:
            return
        if self._servers.silence < _SUSPECT_SECONDS:
            place, reason = group.broken
            self._replace(group, dict.fromkeys(_silent(group) or [place], reason), reason)
        elif self._servers.silence >= _SILENT_SECONDS:
            reason = "killed because a link to it broke and it did not answer"
            self._server_died(self._servers.most_silent, reason)

    def _end_silence(self, group: WorkerGroup) -> None:
        """Restart a group that was silent for too long."""
        reason = f"killed because it was silent for {group.patience} while {group.phase.value}"
        # Members that leave their process group may wait for one another for ever.
        dead = _silent(group) or ([] if group.leaves else group.owing[:1])
        self._replace(group, dict.fromkeys(dead, reason), reason)

    def _replace(self, group: WorkerGroup, dead: Mapping[int, str], reason: str) -> None:
        """Restart a group, and queue its batch again.

        Args:
            dead: The places of the members that died or hang, each with the reason.
            reason: Why the other members have to be restarted.
        """
        self._servers.send(Forget(group.name))
        self.epoch.ledger.orphan(group.index)
        group.end(dead, "a member of its group died" if dead else reason)
        if dead:
            group.fruitless_deaths += 1
        if group.fruitless_deaths == _FRUITLESS_DEATHS:
            raise RunError(
                f"group {group.index} died {group.fruitless_deaths} times without a batch in "
                f"between; the last time: {reason}"
            )
        group.start(self.buffers)

    def _report_waiting(self, seconds: float) -> None:
        """Report processes that wait for CPUs, from time to time."""
        workers = (process for group in self._groups for process in group.processes)
        unplaced = [str(p) for p in (*self._servers.processes, *workers) if p.hello is None]
        if not unplaced:
            if self._reported:
                self._cluster.placement.report_shared_nodes()
            self._waited = self._reported = 0.0
            return
        self._waited += seconds
        if self._waited >= self._reported + REPORT_EVERY and self._cluster.placement.unplaced():
            self._reported = self._waited
            reason = f"{self._waited:.0f} s so far for {', '.join(unplaced)}, on {available()}"
            report(Event(EventKind.WAITING, reason=reason))


def _silent(group: WorkerGroup) -> list[int]:
    """Return the places of the members of a group that do not answer pings."""
    processes = enumerate(group.processes)
    return [place for place, one in processes if one.silence >= _SUSPECT_SECONDS]
