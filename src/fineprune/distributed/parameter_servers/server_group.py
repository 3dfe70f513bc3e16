"""The servers as the coordinator sees them: numbered requests, snapshots and rollbacks.

All requests that read or change the parameters are numbered in one sequence, which every server
follows. Therefore all servers have the same version at each request, without communicating with one
another.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.events import Event, EventKind, ProcessKind, Report
from fineprune.distributed.parameter_servers.flat_layout import FlatLayout
from fineprune.distributed.parameter_servers.ray_cluster import (
    Call,
    Cluster,
    Died,
    Location,
    Process,
    Silent,
)
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous
from fineprune.distributed.parameter_servers.server import (
    Answered,
    Contribution,
    MakeOptimizer,
    ParameterServer,
)
from fineprune.distributed.strategy import Strategy
from fineprune.errors import RunError

R = TypeVar("R")

# A process that does not answer for this many seconds counts as silent, even on a busy node.
PROBE_SECONDS = 5.0
# If a server does not answer for this many seconds, workers may be silent because of it.
_SUSPECT_SECONDS = 2.0
# If a server dies this many times, and the parameters do not get beyond their furthest version in
# between, the training ends, because the same cause would kill the server again.
_FRUITLESS_DEATHS = 5


class ServerDied(Exception):
    """A server died, so all servers must be rolled back to their last common version."""


class ServerCall(Enum):
    """The kinds of calls to servers that the coordinator waits for."""

    PLACE = "place"
    START = "start"
    RESTORE = "restore"
    UPDATE = "update"
    SNAPSHOT = "snapshot"


# The calls that are numbered in the sequence. If a server dies during one, updates are undone.
_REQUESTS = (ServerCall.UPDATE, ServerCall.SNAPSHOT)


@dataclass
class PendingRequest:
    """A call to a server that has not ended.

    Attributes:
        kind: The kind of the call.
        server: The index of the server.
        sequence: The number of the request. For a restore, it is the number of the last request
            that counts as executed.
        seconds: How long the coordinator has waited for it.
    """

    kind: ServerCall
    server: int
    sequence: int
    seconds: float = 0.0


@dataclass
class _Server:
    """A server: its process, and what the coordinator knows about it.

    Attributes:
        process: The process.
        location: Where the process runs; None until it has been placed.
        ping: The ping that the process has not answered yet.
        silence: The number of seconds since this ping.
        starts: The number of processes of this server that have started so far.
        fruitless_deaths: The number of deaths since the parameters last got beyond their furthest
            version.
    """

    process: Process[ParameterServer]
    location: Location | None = None
    ping: Call[None] | None = None
    silence: float = 0.0
    starts: int = 0
    fruitless_deaths: int = 0


class ServerGroup:
    """The servers of a training. All methods that start a request return at once.

    Args:
        cluster: The cluster, which starts the processes.
        strategy: The strategy, which says how long a server may be silent.
        layout: The layout of the parameters, which includes the number of servers.
        parameters: The initial parameters, shape (elements,), on the CPU.
        optimizer: Function that makes a server's optimizer; see ``ParameterServer``.
        rendezvous: The settings of all links.
        folder: The folder for snapshots, which all nodes must share.
        state: The state of each server, as returned by ``state``; None to start a new training.
        report: Function that is called with each event.

    Attributes:
        version: The version of the parameters after all requests so far.
        pending: The calls that have not ended.
    """

    def __init__(
        self,
        cluster: Cluster,
        strategy: Strategy,
        layout: FlatLayout,
        parameters: Tensor,
        optimizer: MakeOptimizer,
        rendezvous: Rendezvous,
        folder: Path,
        state: Sequence[bytes] | None,
        report: Report,
    ) -> None:
        self.version = 0
        self.pending: dict[Call[Any], PendingRequest] = {}
        self._cluster = cluster
        self._strategy = strategy
        self._layout = layout
        self._parameters = parameters
        self._optimizer = optimizer
        self._rendezvous = rendezvous
        self._folder = folder
        self._state = state
        self._report = report
        self._sequence = 0
        # The version of the last snapshot that all servers have written, and its request's number.
        self._common_version = -1
        self._common_sequence = -1
        # The snapshots being written: the number of each request, and the version that it writes.
        self._snapshots: dict[int, int] = {}
        self._furthest_version = -1
        self._servers = [_Server(self._new_process(index)) for index in range(layout.servers)]
        for index in range(layout.servers):
            self._await_start(index)

    @property
    def ready(self) -> bool:
        """Whether all servers have started and hold the same version of the parameters."""
        of_start = (ServerCall.PLACE, ServerCall.START, ServerCall.RESTORE)
        return not any(request.kind in of_start for request in self.pending.values())

    @property
    def answering(self) -> bool:
        """Whether all servers answer. Otherwise, a worker may be silent because of a server."""
        return all(server.silence < _SUSPECT_SECONDS for server in self._servers)

    @property
    def unplaced(self) -> list[str]:
        """The names of the servers whose processes do not run yet."""
        return [
            f"server {request.server}"
            for request in self.pending.values()
            if request.kind is ServerCall.PLACE
        ]

    # -- requests in the sequence -----------------------------------------------------------------

    def update(
        self, contributions: Sequence[Contribution], readers: Sequence[str], rate: float
    ) -> None:
        """Apply staged gradients as one update, and send the parameters to readers.

        Args:
            contributions: The gradients, in the order of their keys. If there are none, there is no
                update, and the version stays the same.
            readers: The names of the groups that receive the parameters after the update.
            rate: The learning rate of the update.
        """
        self._sequence += 1
        if contributions:
            self.version += 1
        for index, server in enumerate(self._servers):
            call = server.process.call(
                ParameterServer.update, self._sequence, contributions, readers, rate
            )
            self._await(call, ServerCall.UPDATE, index)

    def snapshot(self) -> None:
        """Let all servers write a snapshot, unless this version is already written or requested."""
        if self.version == self._common_version or self.version in self._snapshots.values():
            return
        self._sequence += 1
        self._snapshots[self._sequence] = self.version
        for index, server in enumerate(self._servers):
            path = self._path(index, self._sequence)
            call = server.process.call(ParameterServer.snapshot, self._sequence, path)
            self._await(call, ServerCall.SNAPSHOT, index)

    def parameters(self) -> list[Call[Tensor]]:
        """Request each server's part of the parameters, shape (elements of the part,)."""
        self._sequence += 1
        return [
            server.process.call(ParameterServer.parameters, self._sequence)
            for server in self._servers
        ]

    def state(self) -> list[Call[bytes]]:
        """Request each server's state, from which it can be restored."""
        self._sequence += 1
        return [
            server.process.call(ParameterServer.state, self._sequence) for server in self._servers
        ]

    def finish(self, call: Call[Any]) -> dict[str, float]:
        """Process the result of a pending call that has ended.

        Returns:
            The duration of each phase of an update, in seconds; empty for other calls.

        Raises:
            ServerDied: The server died.
            RunError: A server died repeatedly.
        """
        request = self.pending.pop(call)
        try:
            result = self._cluster.result(call)
        except Died as error:
            self._replace(request.server, str(error))
            if request.kind in _REQUESTS:
                raise ServerDied from None
            return {}  # the other servers are already rolled back
        server = self._servers[request.server]
        match request.kind, result:
            case ServerCall.PLACE, Location():
                server.location = result
            case ServerCall.START, _:
                # Calls may overtake one another. The placing has ended too, or ends at once.
                if server.process.placed in self.pending:
                    self.finish(server.process.placed)
                    if self._servers[request.server] is not server:
                        return {}  # it died meanwhile and was replaced
                server.starts += 1
                kind = EventKind.STARTED if server.starts == 1 else EventKind.RESTARTED
                self._report(self._event(kind, request.server))
                self._restore(request.server)
            case ServerCall.RESTORE, int():
                self.version = result
            case ServerCall.UPDATE, Answered():
                return {"queue": result.queue, "apply": result.apply, "send": result.send}
            case ServerCall.SNAPSHOT, _:
                self._keep_if_common(request.sequence)
        return {}

    def results(self, calls: Sequence[Call[R]]) -> list[R]:
        """Return the results of one call to each server, all of which have ended.

        Raises:
            ServerDied: A server died.
        """
        results = []
        for index, call in enumerate(calls):
            try:
                results.append(self._cluster.result(call))
            except Died as error:
                self._replace(index, str(error))
                raise ServerDied from None
        return results

    # -- a group's links --------------------------------------------------------------------------

    def connect(self, reader: str) -> list[Call[None]]:
        """Start to make the link from each server to a group."""
        return [server.process.call(ParameterServer.connect, reader) for server in self._servers]

    def stage(self, reader: str, key: BatchKey) -> list[Call[None]]:
        """Start to receive a group's gradient on each server."""
        return [server.process.call(ParameterServer.stage, reader, key) for server in self._servers]

    def forget(self, reader: str) -> None:
        """Close the links to a group, after all requests so far have been executed."""
        for server in self._servers:
            server.process.call(ParameterServer.forget, self._sequence, reader)

    # -- deaths and rollbacks ---------------------------------------------------------------------

    def check(self, *, silent_is_dead: bool) -> None:
        """Check whether a server has died, which may be why a group's links are broken.

        This takes at most ``PROBE_SECONDS``.

        Args:
            silent_is_dead: Whether a server that does not answer is killed and counts as dead.
                Otherwise, ``add_silence`` decides later.

        Raises:
            ServerDied: A server died.
        """
        pings = {
            index: server.process.ping()
            for index, server in enumerate(self._servers)
            if server.location
        }
        deadline = time.monotonic() + PROBE_SECONDS
        for index, ping in pings.items():
            try:
                self._cluster.result(ping, max(0.0, deadline - time.monotonic()))
                continue
            except Died as error:
                reason = str(error)
            except Silent:
                if not silent_is_dead:
                    continue
                reason = "killed because a link to it broke and it did not answer"
            self._replace(index, reason)
            raise ServerDied

    def add_silence(self, seconds: float) -> None:
        """Add to the time for which servers have been silent, and look for servers that hang.

        Raises:
            ServerDied: A server died, or was killed because it was silent for too long.
        """
        for request in list(self.pending.values()):
            if request.kind is ServerCall.PLACE or self._servers[request.server].location is None:
                continue
            request.seconds += seconds
            if request.seconds > self._strategy.startup_seconds:
                what = f"its {request.kind.value} had not ended after {request.seconds:.0f} s"
                self._replace(request.server, f"killed because {what}")
                if request.kind in _REQUESTS:
                    raise ServerDied
        for index, server in enumerate(self._servers):
            if server.location is None:
                continue
            if server.ping is None:
                server.ping, server.silence = server.process.ping(), 0.0
            elif self._cluster.wait([server.ping], 0.0):
                ping, server.ping, server.silence = server.ping, None, 0.0
                try:
                    self._cluster.result(ping)
                except Died as error:
                    self._replace(index, str(error))
                    raise ServerDied from None
            else:
                server.silence += seconds
                if server.silence > self._strategy.silence_seconds:
                    reason = f"killed because it was silent for {server.silence:.0f} s"
                    self._replace(index, reason)
                    raise ServerDied

    def roll_back(self) -> None:
        """Start to restore the last common version on all servers; see ``ready``."""
        self._snapshots.clear()
        self.version = self._common_version
        self.pending = {
            call: request
            for call, request in self.pending.items()
            if request.kind in (ServerCall.PLACE, ServerCall.START)
        }
        starting = {request.server for request in self.pending.values()}
        for index in range(len(self._servers)):
            if index not in starting:
                self._restore(index)

    def kill(self) -> None:
        """Kill all processes without a report."""
        for server in self._servers:
            server.process.kill()

    def _new_process(self, index: int) -> Process[ParameterServer]:
        return self._cluster.start_server(
            index,
            ParameterServer,
            self._layout,
            index,
            self._parameters[self._layout.part(index)].numpy(),
            self._optimizer,
            self._rendezvous,
        )

    def _await_start(self, index: int) -> None:
        process = self._servers[index].process
        self._await(process.placed, ServerCall.PLACE, index)
        self._await(process.made, ServerCall.START, index)

    def _restore(self, index: int) -> None:
        """Restore a server to the last common version, or to the training's initial state.

        The server must have started, because calls to it may overtake one another.
        """
        source: Path | bytes
        if self._common_sequence >= 0:
            source = self._path(index, self._common_sequence)
        elif self._state is not None:
            source = self._state[index]
        else:
            return  # it already has the initial parameters
        process = self._servers[index].process
        call = process.call(ParameterServer.restore, self._sequence, source)
        self._await(call, ServerCall.RESTORE, index)

    def _replace(self, index: int, reason: str) -> None:
        """Restart a server that died or hangs.

        Raises:
            RunError: The server died repeatedly, or before the first snapshot was complete.
        """
        server = self._servers[index]
        self._report(self._event(EventKind.DIED, index, reason))
        server.process.kill()
        if self._common_sequence < 0:
            raise RunError(
                "a server died before the training began: check that its node has enough memory "
                "for its part of the parameters, and twice that for the optimizer's state"
            )
        if self.version > self._furthest_version:
            self._furthest_version = self.version
            for each in self._servers:
                each.fruitless_deaths = 0
        server.fruitless_deaths += 1
        if server.fruitless_deaths == _FRUITLESS_DEATHS:
            raise RunError(
                f"server {index} died {server.fruitless_deaths} times without getting beyond "
                f"version {self._furthest_version}; the last time: {reason}"
            )
        self.pending = {
            call: request for call, request in self.pending.items() if request.server != index
        }
        self._servers[index] = _Server(
            self._new_process(index),
            starts=server.starts,
            fruitless_deaths=server.fruitless_deaths,
        )
        self._await_start(index)

    def _keep_if_common(self, sequence: int) -> None:
        """If all servers have written a snapshot, make it the one for rollbacks."""
        if any(
            request.kind is ServerCall.SNAPSHOT and request.sequence == sequence
            for request in self.pending.values()
        ):
            return
        version = self._snapshots.pop(sequence)
        if sequence < self._common_sequence:
            return  # a later snapshot was complete earlier
        self._common_version, self._common_sequence = version, sequence
        for path in self._folder.glob("server*-sequence*.pt"):
            if int(path.stem.rpartition("sequence")[2]) < sequence:
                path.unlink()

    def _path(self, index: int, sequence: int) -> Path:
        return self._folder / f"server{index}-sequence{sequence}.pt"

    def _event(self, kind: EventKind, index: int, reason: str = "") -> Event:
        where = self._servers[index].location
        pid, node = (where.pid, where.node) if where else (None, "")
        return Event(kind, ProcessKind.SERVER, index, pid, node, reason)

    def _await(self, call: Call[Any], kind: ServerCall, index: int) -> None:
        self.pending[call] = PendingRequest(kind, index, self._sequence)
