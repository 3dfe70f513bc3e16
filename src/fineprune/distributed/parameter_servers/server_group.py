"""The servers as the coordinator sees them: numbered requests, snapshots and the way back to one.

All requests that read or change the parameters are numbered in one sequence, which every server
follows. So all servers agree on the version at each request without talking to one another.
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

R = TypeVar("R")

# Seconds within which a living process answers, however busy its node is.
PROBE_SECONDS = 5.0
# Seconds after which a server that does not answer may be the reason why workers are silent.
_SUSPECT_SECONDS = 2.0
# A server that dies so often, without the parameters getting beyond the furthest version in
# between, ends the training: the same cause would kill it again.
_FRUITLESS_DEATHS = 5


class ServerDied(Exception):
    """A server died: roll all of them back to their last common version."""


class ServerCall(Enum):
    """The calls that the coordinator waits for."""

    PLACE = "place"
    START = "start"
    RESTORE = "restore"
    UPDATE = "update"
    SNAPSHOT = "snapshot"


# Those that are numbered in the sequence: a death among them undoes updates.
_REQUESTS = (ServerCall.UPDATE, ServerCall.SNAPSHOT)


@dataclass
class PendingRequest:
    """A call to a server that has not ended.

    Attributes:
        kind: What it does.
        server: The index of the server.
        sequence: The number of the request; for a restore, of the last one that is executed.
        seconds: How long it has been waited for.
    """

    kind: ServerCall
    server: int
    sequence: int
    seconds: float = 0.0


@dataclass
class _Server:
    """A server: its process, and what is known of it.

    Attributes:
        process: Its process.
        location: Where the process runs; None until it does.
        ping: The ping that it has not answered yet.
        silence: The number of seconds since then.
        starts: The number of its processes that have started so far.
        fruitless_deaths: The number of deaths without an update in between that went further than
            all before.
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
        cluster: Starts their processes.
        strategy: How long a server may be silent.
        layout: The layout of the parameters, and with it the number of servers.
        parameters: The parameters to begin with, shape (elements,), on the CPU.
        optimizer: Makes a server's optimizer; see ``ParameterServer``.
        rendezvous: How links are made.
        folder: The folder for snapshots, the same one on all nodes.
        state: What each server resumes from, from ``state``; None to start anew.
        report: Called with each event.

    Attributes:
        version: The version of the parameters once all requests so far are executed.
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
        # The version of the last snapshot that all servers have, and the number of its request.
        self._common_version = -1
        self._common_sequence = -1
        # The snapshots under way: the number of each request, and the version that it writes.
        self._snapshots: dict[int, int] = {}
        self._furthest_version = -1
        self._servers = [_Server(self._new_process(index)) for index in range(layout.servers)]
        for index in range(layout.servers):
            self._await_start(index)

    @property
    def ready(self) -> bool:
        """Whether all servers are there, with the parameters of one version."""
        of_start = (ServerCall.PLACE, ServerCall.START, ServerCall.RESTORE)
        return not any(request.kind in of_start for request in self.pending.values())

    @property
    def answering(self) -> bool:
        """Whether no server owes an answer: one that does may be the reason why a worker waits."""
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
            contributions: The gradients, in the order of their keys. Without any there is no
                update, and the version stays.
            readers: The names of the groups that get the parameters as they are then.
            rate: The learning rate.
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
        """Let all servers write this version to files, unless they have, or are about to."""
        if self.version == self._common_version or self.version in self._snapshots.values():
            return
        self._sequence += 1
        self._snapshots[self._sequence] = self.version
        for index, server in enumerate(self._servers):
            path = self._path(index, self._sequence)
            call = server.process.call(ParameterServer.snapshot, self._sequence, path)
            self._await(call, ServerCall.SNAPSHOT, index)

    def parameters(self) -> list[Call[Tensor]]:
        """Ask each server for its part of the parameters, shape (elements of the part,)."""
        self._sequence += 1
        return [
            server.process.call(ParameterServer.parameters, self._sequence)
            for server in self._servers
        ]

    def state(self) -> list[Call[bytes]]:
        """Ask each server for what it resumes from."""
        self._sequence += 1
        return [
            server.process.call(ParameterServer.state, self._sequence) for server in self._servers
        ]

    def finish(self, call: Call[Any]) -> dict[str, float]:
        """Take the result of a pending call that has ended.

        Returns:
            How long the phases of an update took, in seconds.

        Raises:
            ServerDied: The server died.
            RuntimeError: Servers died again and again.
        """
        request = self.pending.pop(call)
        try:
            result = self._cluster.result(call)
        except Died as error:
            self._replace(request.server, str(error))
            if request.kind in _REQUESTS:
                raise ServerDied from None
            return {}  # the others need not go back any further
        server = self._servers[request.server]
        match request.kind, result:
            case ServerCall.PLACE, Location():
                server.location = result
            case ServerCall.START, _:
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
        """Let each server make its link to a group."""
        return [server.process.call(ParameterServer.connect, reader) for server in self._servers]

    def stage(self, reader: str, key: BatchKey) -> list[Call[None]]:
        """Let each server receive a group's gradient."""
        return [server.process.call(ParameterServer.stage, reader, key) for server in self._servers]

    def forget(self, reader: str) -> None:
        """Let each server close its link to a group, once all requests so far are executed."""
        for server in self._servers:
            server.process.call(ParameterServer.forget, self._sequence, reader)

    # -- their life -------------------------------------------------------------------------------

    def check(self, *, silent_is_dead: bool) -> None:
        """Look whether a server has died: the reason why a group's links may be broken.

        This takes five seconds at most.

        Args:
            silent_is_dead: Whether a server that does not answer is killed and counts as dead. If
                not, ``add_silence`` decides that later.

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
                reason = "killed, since a link to it broke and it does not answer"
            self._replace(index, reason)
            raise ServerDied

    def add_silence(self, seconds: float) -> None:
        """Note that some more seconds have passed, and look for servers that hang.

        Raises:
            ServerDied: A server died, or was killed because it was silent for too long.
        """
        for request in list(self.pending.values()):
            if request.kind is ServerCall.PLACE or self._servers[request.server].location is None:
                continue
            request.seconds += seconds
            if request.seconds > self._strategy.startup_seconds:
                what = f"it was at a {request.kind.value} for {request.seconds:.0f} s"
                self._replace(request.server, f"killed, since {what}")
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
                    self._replace(index, f"killed, since it was silent for {server.silence:.0f} s")
                    raise ServerDied

    def roll_back(self) -> None:
        """Bring all servers back to their last common version; ``ready`` says when they are."""
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
        """End all processes at once, and report nothing."""
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
        """Take a server to the last common version, or to the state that the training began with.

        Wait for its start first: its calls may overtake one another.
        """
        source: Path | bytes
        if self._common_sequence >= 0:
            source = self._path(index, self._common_sequence)
        elif self._state is not None:
            source = self._state[index]
        else:
            return  # it has the parameters that it was made with
        process = self._servers[index].process
        call = process.call(ParameterServer.restore, self._sequence, source)
        self._await(call, ServerCall.RESTORE, index)

    def _replace(self, index: int, reason: str) -> None:
        """Start a server again that died, or that hangs.

        Raises:
            RuntimeError: It died again and again, or there is nothing yet to bring it back to.
        """
        server = self._servers[index]
        self._report(self._event(EventKind.DIED, index, reason))
        server.process.kill()
        if self._common_sequence < 0:
            raise RuntimeError(
                "a server died before the training began: see that its node has the memory for "
                "its part of the parameters, and twice that for the optimizer's state"
            )
        if self.version > self._furthest_version:
            self._furthest_version = self.version
            for each in self._servers:
                each.fruitless_deaths = 0
        server.fruitless_deaths += 1
        if server.fruitless_deaths == _FRUITLESS_DEATHS:
            raise RuntimeError(
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
        """If all servers have written a snapshot, make it the one to go back to."""
        if any(
            request.kind is ServerCall.SNAPSHOT and request.sequence == sequence
            for request in self.pending.values()
        ):
            return
        version = self._snapshots.pop(sequence)
        if sequence < self._common_sequence:
            return  # its files took longer than those of a later one
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
