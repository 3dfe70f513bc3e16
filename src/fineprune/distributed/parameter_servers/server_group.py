"""The servers as the coordinator sees them: numbered requests, snapshots and the way back to one.

All requests that read or change the parameters are numbered in one sequence, which every server
follows. So all servers agree on the version at each request without talking to one another.
"""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
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
)
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous
from fineprune.distributed.parameter_servers.server import (
    Answered,
    Contribution,
    MakeOptimizer,
    ParameterServer,
)

R = TypeVar("R")

# A server that dies so often while it is brought back ends the training.
_FRUITLESS_DEATHS = 3


class ServerDied(Exception):
    """A server died: roll all of them back to their last common version."""


class ServerCall(Enum):
    """The requests that the servers have under way."""

    UPDATE = "update"
    SNAPSHOT = "snapshot"


class ServerGroup:
    """The servers of a training. All methods that start a request return at once.

    Args:
        cluster: Starts their processes.
        layout: The layout of the parameters, and with it the number of servers.
        parameters: The parameters to begin with, shape (elements,), on the CPU.
        optimizer: Makes a server's optimizer; see ``ParameterServer``.
        rendezvous: How links are made.
        folder: The folder for snapshots, the same one on all nodes.
        report: Called with each event.

    Attributes:
        version: The version of the parameters once all requests so far are executed.
        pending: The updates and snapshots that have not ended.
        deaths: How many deaths were noticed.
    """

    def __init__(
        self,
        cluster: Cluster,
        layout: FlatLayout,
        parameters: Tensor,
        optimizer: MakeOptimizer,
        rendezvous: Rendezvous,
        folder: Path,
        report: Report,
    ) -> None:
        self.version = 0
        self.deaths = 0
        self.pending: dict[Call[Any], tuple[ServerCall, int]] = {}
        self._cluster = cluster
        self._layout = layout
        self._parameters = parameters
        self._optimizer = optimizer
        self._rendezvous = rendezvous
        self._folder = folder
        self._report = report
        self._sequence = 0
        # The version of the last snapshot that all servers have, and the number of its request.
        self._common_version = -1
        self._common_sequence = -1
        # For each snapshot under way: its version, and the number of servers that have not ended.
        self._snapshots: dict[int, tuple[int, int]] = {}
        self._locations: dict[int, Location] = {}
        self._servers = [self._start(index) for index in range(layout.servers)]

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
        for server in self._servers:
            call = server.call(ParameterServer.update, self._sequence, contributions, readers, rate)
            self.pending[call] = (ServerCall.UPDATE, self._sequence)

    def snapshot(self) -> None:
        """Let all servers write this version to files, unless they have, or are about to."""
        under_way = {version for version, _ in self._snapshots.values()}
        if self.version == self._common_version or self.version in under_way:
            return
        self._sequence += 1
        self._snapshots[self._sequence] = (self.version, len(self._servers))
        for index, server in enumerate(self._servers):
            path = self._path(index, self._sequence)
            call = server.call(ParameterServer.snapshot, self._sequence, path)
            self.pending[call] = (ServerCall.SNAPSHOT, self._sequence)

    def finish(self, call: Call[Any]) -> dict[str, float]:
        """Take the result of a pending request that one server has ended.

        Returns:
            How long its phases took, in seconds.

        Raises:
            ServerDied: The server died.
        """
        kind, sequence = self.pending.pop(call)
        try:
            result = self._cluster.result(call)
        except Died as error:
            raise ServerDied(str(error)) from None
        match kind, result:
            case ServerCall.UPDATE, Answered():
                return {"queue": result.queue, "apply": result.apply, "send": result.send}
            case ServerCall.SNAPSHOT, _:
                version, left = self._snapshots.pop(sequence)
                if left > 1:
                    self._snapshots[sequence] = (version, left - 1)
                else:
                    self._keep(version, sequence)
        return {}

    def parameters(self) -> Tensor:
        """Return the parameters, shape (elements,).

        Raises:
            ServerDied: A server died.
        """
        self._sequence += 1
        calls = [
            server.call(ParameterServer.parameters, self._sequence) for server in self._servers
        ]
        return torch.cat(self._results(calls))

    def state(self) -> list[bytes]:
        """Return what each server resumes from.

        Raises:
            ServerDied: A server died.
        """
        self._sequence += 1
        return self._results(
            [server.call(ParameterServer.state, self._sequence) for server in self._servers]
        )

    # -- a group's links --------------------------------------------------------------------------

    def connect(self, reader: str) -> list[Call[None]]:
        """Let each server make its link to a group."""
        return [server.call(ParameterServer.connect, reader) for server in self._servers]

    def stage(self, reader: str, key: BatchKey) -> list[Call[None]]:
        """Let each server receive a group's gradient."""
        return [server.call(ParameterServer.stage, reader, key) for server in self._servers]

    def forget(self, reader: str) -> None:
        """Let each server close its link to a group, once all requests so far are executed."""
        for server in self._servers:
            server.call(ParameterServer.forget, self._sequence, reader)

    # -- their life -------------------------------------------------------------------------------

    def begin(self, state: Sequence[bytes] | None) -> None:
        """Wait until all servers are there.

        Args:
            state: What each of them resumes from, from ``state``; None to start anew.

        Raises:
            ServerDied: A server died.
        """
        try:
            for index in range(len(self._servers)):
                self._wait_for_start(index)
        except Died as error:
            raise ServerDied(str(error)) from None
        if state is not None:
            calls = [
                server.call(ParameterServer.restore, 0, part)
                for server, part in zip(self._servers, state, strict=True)
            ]
            self.version = self._results(calls)[0]

    def check(self) -> None:
        """Wait for an answer of each server.

        Raises:
            ServerDied: A server died.
        """
        self._results([server.call(ParameterServer.ping) for server in self._servers])

    def roll_back(self) -> None:
        """Bring all servers, the dead ones made anew, back to their last common version.

        Raises:
            RuntimeError: A server died again and again on the way.
        """
        self.pending.clear()
        self._snapshots.clear()
        for index in range(len(self._servers)):
            deaths = 0
            while not self._restore(index):
                deaths += 1
                if deaths == _FRUITLESS_DEATHS:
                    raise RuntimeError(f"server {index} died {deaths} times without an update")
        self.version = self._common_version

    def kill(self) -> None:
        """End all processes at once."""
        for server in self._servers:
            server.kill()

    def _start(self, index: int) -> Process[ParameterServer]:
        self._locations.pop(index, None)
        return self._cluster.start_server(
            index,
            ParameterServer,
            self._layout,
            index,
            self._parameters[self._layout.part(index)].numpy(),
            self._optimizer,
            self._rendezvous,
        )

    def _wait_for_start(self, index: int, kind: EventKind = EventKind.STARTED) -> None:
        """Wait until a server is there: its calls may overtake one another."""
        if index not in self._locations:
            self._locations[index] = self._cluster.result(self._servers[index].made)
            self._report(self._event(kind, index))

    def _restore(self, index: int) -> bool:
        """Take a server back to the last common version, or start it again if it is dead."""
        path = self._path(index, self._common_sequence)
        try:
            self._wait_for_start(index, EventKind.RESTARTED)
            server = self._servers[index]
            self._cluster.result(server.call(ParameterServer.restore, self._sequence, path))
        except Died as error:
            self.deaths += 1
            self._report(self._event(EventKind.DIED, index, str(error)))
            self._servers[index].kill()
            self._servers[index] = self._start(index)
            return False
        return True

    def _results(self, calls: Sequence[Call[R]]) -> list[R]:
        try:
            return [self._cluster.result(call) for call in calls]
        except Died as error:
            raise ServerDied(str(error)) from None

    def _keep(self, version: int, sequence: int) -> None:
        """Make a snapshot that all servers have written the one to go back to."""
        if sequence < self._common_sequence:
            return
        self._common_version, self._common_sequence = version, sequence
        for path in self._folder.glob("server*-sequence*.pt"):
            if int(path.stem.rpartition("sequence")[2]) < sequence:
                path.unlink()

    def _path(self, index: int, sequence: int) -> Path:
        return self._folder / f"server{index}-sequence{sequence}.pt"

    def _event(self, kind: EventKind, index: int, reason: str = "") -> Event:
        where = self._locations.get(index)
        if where is None:
            return Event(kind, ProcessKind.SERVER, index, reason=reason)
        return Event(kind, ProcessKind.SERVER, index, where.pid, where.node, reason)
