"""The servers as the coordinator sees them: their requests, snapshots and rollbacks.

All servers get the same requests in the same order, and execute them in this order. Therefore all
servers have the same version after each request, without communicating with one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fineprune.distributed.parameter_servers.events import EventKind, ProcessKind, report
from fineprune.distributed.parameter_servers.flat_layout import FlatLayout
from fineprune.distributed.parameter_servers.messages import (
    Done,
    Hello,
    Message,
    Ready,
    Restore,
    Snapshot,
    Update,
    Written,
)
from fineprune.distributed.parameter_servers.patience import Patience
from fineprune.distributed.parameter_servers.processes import Cluster, Process
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous
from fineprune.distributed.parameter_servers.server import MakeOptimizer, ParameterServer
from fineprune.distributed.strategy import Strategy
from fineprune.errors import RunError

# If a server dies this many times, and the parameters do not get beyond their furthest version in
# between, the training ends, because the same cause would kill the server again.
_FRUITLESS_DEATHS = 5


@dataclass
class _Server:
    """A server: its process, and what the coordinator knows about it.

    Attributes:
        process: The process.
        patience: The silence of the process.
        started: Whether the process holds its part of the parameters.
        restores: The number of requests to restore that it has not answered.
        starts: The number of processes of this server that have started so far.
        fruitless_deaths: The number of deaths since the parameters last got beyond their furthest
            version.
    """

    process: Process
    patience: Patience
    started: bool = False
    restores: int = 0
    starts: int = 0
    fruitless_deaths: int = 0


class ServerGroup:
    """The servers of a training. All methods that make a request return at once.

    Args:
        parameters: The initial parameters, shape (elements,), on the CPU.
        folder: The folder for snapshots, which all nodes must share.
        state: The state of each server, as returned by ``state``; None to start a new training.

    Attributes:
        version: The version of the parameters after all requests so far.
        deaths: The number of servers that died since ``Coordinator.take_deaths`` was last called.
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
        state: Sequence[Tensor] | None,
    ) -> None:
        self.version = 0
        self.deaths = 0
        self._cluster = cluster
        self._strategy = strategy
        self._layout = layout
        self._parameters = parameters
        self._optimizer = optimizer
        self._rendezvous = rendezvous
        self._folder = folder
        # The version of the last snapshot that all servers have written, and its number.
        self._common_version = -1
        self._common_number = -1
        if state is not None:
            self._common_number = 0
            for path, content in zip(self._common_paths(), state, strict=True):
                path.write_bytes(content.numpy().data)
        # The snapshots that are being written, by their numbers: the version, and the servers that
        # have not written it.
        self._snapshots: dict[int, tuple[int, set[int]]] = {}
        self._numbers = 0
        self._furthest_version = -1
        self._servers = [self._new_server(index) for index in range(layout.servers)]

    @property
    def ready(self) -> bool:
        """Whether all servers have started and hold the same version of the parameters."""
        return all(map(self.is_ready, range(len(self._servers))))

    @property
    def saved(self) -> bool:
        """Whether all servers are ready and have written a snapshot of this version."""
        return self.ready and self.version == self._common_version

    @property
    def processes(self) -> list[Process]:
        """The processes, by index."""
        return [server.process for server in self._servers]

    @property
    def silence(self) -> float:
        """For how many seconds the most silent server has not answered."""
        return self._servers[self.most_silent].process.silence

    @property
    def most_silent(self) -> int:
        """The index of the server that has not answered for the longest time."""
        silence = [server.process.silence for server in self._servers]
        return silence.index(max(silence))

    def is_ready(self, index: int) -> bool:
        """Return whether a server has started and holds the common version."""
        return self._servers[index].started and not self._servers[index].restores

    # -- requests -------------------------------------------------------------------------------

    def update(self, update: Update) -> None:
        """Let all servers apply staged gradients as one update and send the parameters."""
        if update.contributions:
            self.version += 1
        self.send(update)

    def snapshot(self) -> None:
        """Let all servers write a snapshot, unless this version is already written or requested."""
        requested = {version for version, _ in self._snapshots.values()}
        if self.version in {self._common_version, *requested}:
            return
        self._numbers += 1
        self._snapshots[self._numbers] = self.version, set(range(len(self._servers)))
        for index, server in enumerate(self._servers):
            server.process.send(Snapshot(self._numbers, str(self._path(index, self._numbers))))
            self._expect(index)

    def send(self, request: Message) -> None:
        """Make a request of which nothing needs to be noted here."""
        for server in self._servers:
            server.process.send(request)

    # -- the last common snapshot ---------------------------------------------------------------

    def parameters(self) -> Tensor:
        """Return the parameters at the last common snapshot, shape (elements,)."""
        states = (torch.load(path, mmap=True, weights_only=True) for path in self._common_paths())
        return torch.cat([state["parameters"] for state in states])

    def state(self) -> list[Tensor]:
        """Return each server's state at the last common snapshot, from which it can be restored.

        It consists of the bytes of the snapshot's file; uint8.
        """
        return [torch.from_numpy(np.fromfile(path, np.uint8)) for path in self._common_paths()]

    # -- messages -------------------------------------------------------------------------------

    def receive(self, index: int, message: Message) -> None:
        """Process a message of a server."""
        server = self._servers[index]
        match message:
            case Hello():
                pass
            case Ready():
                server.started = True
                server.starts += 1
                kind = EventKind.STARTED if server.starts == 1 else EventKind.RESTARTED
                report(server.process.event(kind))
                self._restore(index)
            case Done():
                server.restores -= 1
            case Written():
                self._note_snapshot(message.number, index)
            case _:
                raise TypeError(f"expected a message of a server, got {message!r}")
        self._expect(index)

    def hanging(self, seconds: float) -> dict[int, str]:
        """Return the servers that hang, each with the reason."""
        found = {}
        for index, server in enumerate(self._servers):
            silence = server.process.silence
            if server.patience.ends(seconds):
                waited = server.patience.silence
                found[index] = f"killed because it had not answered for {waited:.0f} s"
            elif server.started and silence > self._strategy.silence_seconds:
                found[index] = f"killed because it was silent for {silence:.0f} s"
        return found

    # -- deaths and rollbacks -------------------------------------------------------------------

    def replace(self, index: int, reason: str) -> None:
        """Restart a server that died or hangs."""
        server = self._servers[index]
        report(server.process.event(EventKind.DIED, reason))
        self.deaths += 1
        self._cluster.kill(server.process)
        if self._common_version < 0:
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
        fresh = self._new_server(index)
        fresh.starts, fresh.fruitless_deaths = server.starts, server.fruitless_deaths
        self._servers[index] = fresh

    def roll_back(self) -> None:
        """Let all servers restore the last common version; see ``ready``."""
        self._snapshots.clear()
        self.version = self._common_version
        for index, server in enumerate(self._servers):
            if server.started:
                self._restore(index)

    def kill(self) -> None:
        """Kill all processes without a report."""
        for server in self._servers:
            self._cluster.kill(server.process)

    def _new_server(self, index: int) -> _Server:
        process = self._cluster.start(
            ProcessKind.SERVER,
            index,
            ParameterServer,
            self._layout,
            index,
            self._parameters[self._layout.part(index)].numpy(),
            self._optimizer,
            self._rendezvous,
        )
        return _Server(process, Patience(self._strategy))

    def _restore(self, index: int) -> None:
        """Restore a server to the last common snapshot."""
        if self._common_number < 0:
            return  # it already has the initial parameters
        server = self._servers[index]
        server.restores += 1
        server.process.send(Restore(str(self._path(index, self._common_number))))

    def _expect(self, index: int) -> None:
        """Set what is expected of a server, now that it has been heard or asked for something."""
        server = self._servers[index]
        writes = any(index in missing for _, missing in self._snapshots.values())
        if not server.started or server.restores or writes:
            server.patience.expect()
        else:
            server.patience.rest()

    def _note_snapshot(self, number: int, index: int) -> None:
        """If all servers have written a snapshot, make it the one for rollbacks."""
        if number not in self._snapshots:
            return  # requested before a rollback
        version, missing = self._snapshots[number]
        missing.discard(index)
        if missing:
            return
        del self._snapshots[number]
        self._common_version, self._common_number = version, number
        for path in self._folder.glob("server*-snapshot*.pt"):
            if int(path.stem.rpartition("snapshot")[2]) < number:
                path.unlink()

    def _common_paths(self) -> list[Path]:
        return [self._path(index, self._common_number) for index in range(self._layout.servers)]

    def _path(self, index: int, number: int) -> Path:
        return self._folder / f"server{index}-snapshot{number}.pt"
