"""Training with parameter servers: one process decides, workers and servers do as they are told.

The driver is a plain loop over calls that end. It leases batches to groups of replicas, lets them
stage their gradients on all servers, and then tells all servers to apply: a death between two
servers' pushes leaves nothing applied, and no gradient is ever applied twice.

Epochs drain: an epoch ends when each of its batches is applied or named as lost, and the next one
begins after that. So an epoch means the same under every strategy, and what is decided between
epochs, such as which samples the next one skips, rests on all of the last one's losses.
"""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey, BatchLedger
from fineprune.distributed.parameter_servers.flat_layout import FlatLayout, flat_layout
from fineprune.distributed.parameter_servers.link import LinkBroken, open_store
from fineprune.distributed.parameter_servers.ray_cluster import Cluster, Died, Process
from fineprune.distributed.parameter_servers.server import (
    Answered,
    MakeOptimizer,
    ParameterServer,
    Rendezvous,
)
from fineprune.distributed.parameter_servers.staleness import may_apply, may_start
from fineprune.distributed.parameter_servers.worker import Build, Computed, Worker
from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError

_DEATHS_IN_VAIN = 3


@dataclass(frozen=True)
class Update:
    """One update of the parameters.

    Attributes:
        version: that it made.
        keys: its batches, sorted.
        staleness: of its gradients, which is the same for all.
        indices: of its samples, int64, shape (B,), batch after batch.
        losses: of its samples, float32, shape (B,), as they were at the parameters that were read.
    """

    version: int
    keys: tuple[BatchKey, ...]
    staleness: int
    indices: Tensor
    losses: Tensor


@dataclass
class EpochResult:
    """What became of an epoch.

    Attributes:
        updates: in the order of their first batches. Record each one's indices and losses as one
            batch, in this order: it depends on no worker's speed in `sync` without backups.
        lost: batches whose gradients went down with a server; in no update.
        staleness: of each update, in the order in which they were applied.
        dropped: gradients that were discarded because they came too late.
        undone: updates that a server's death undid; in `sync` their batches were queued again.
        worker_deaths, server_deaths: how many were noticed.
        seconds: sums over all processes: data, compute, group reduce (on CPUs; what the backward
            pass did not hide), push, pull, wait (a worker between two calls) and queue, apply, send
            (a server). pull spans the server's queue, apply and send of the same turn.
    """

    updates: list[Update] = field(default_factory=list)
    lost: list[BatchKey] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    dropped: int = 0
    undone: int = 0
    worker_deaths: int = 0
    server_deaths: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class _Group:
    index: int
    members: list[Process] = field(default_factory=list)
    life: int = 0  # counts its links
    phase: str = "starting"  # then connecting, idle, computing, pushing, staged
    calls: dict[Any, str] = field(default_factory=dict)
    version: int = -1  # that it has read; -1 for none
    lease: BatchKey | None = None
    losses: dict[int, Computed] = field(default_factory=dict)
    fruitless: int = 0  # lives in a row without a batch

    @property
    def reader(self) -> str:
        return f"group{self.index}-life{self.life}"


class _ServerDied(Exception):
    pass


class Coordinator:
    """Servers and groups of replicas, as actors of a cluster, and the loop that drives them.

    Args:
        cluster: with places for the strategy's groups, members and servers.
        strategy: who waits for whom.
        model: the parameters and buffers to begin with; only read.
        build: makes a replica, given its rank; picklable. Replicas' parameters are overwritten.
        optimizer: makes a server's optimizer, see `ParameterServer`; picklable.
        snapshots: folder for the servers' snapshots, the same one on all nodes; made here.
        snapshot_every: updates between two snapshots inside an epoch; 0 for none but at its end.
        state: of an earlier training with as many servers, to go on with.
        timeout_seconds: of each message between worker and server.

    Raises:
        InputError: the model does not fit, or the state is of another layout.
        RuntimeError: a server died before there was anything to bring it back to.
    """

    def __init__(
        self,
        cluster: Cluster,
        strategy: Strategy,
        model: nn.Module,
        build: Build,
        optimizer: MakeOptimizer,
        snapshots: Path,
        *,
        snapshot_every: int = 0,
        state: dict[str, Any] | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        self._cluster = cluster
        self._strategy = strategy
        self._layout: FlatLayout = flat_layout(model, strategy.servers)
        if state is not None and state["layout"] != self._layout.contents:
            raise InputError(
                "expected a state of the same model and number of servers, got one of others: "
                "resume with the settings that it was made with"
            )
        self._build = build
        self._optimizer = optimizer
        self._store = open_store(cluster.host, timeout_seconds=timeout_seconds)
        self._rendezvous = Rendezvous(
            cluster.host, self._store.port, timeout_seconds, strategy.gradients == "bfloat16"
        )
        self._folder = snapshots
        self._folder.mkdir(parents=True, exist_ok=True)
        self._snapshot_every = snapshot_every
        self._lives = 0
        self._turn = 0
        self._version = 0
        self._common = -1  # version of the last snapshot that all servers have, and its turn
        self._common_turn = -1
        self._result = EpochResult()
        self._updates: dict[int, Update] = {}
        self._turns: dict[Any, str] = {}  # calls to servers that belong to no group
        self._saving: dict[int, tuple[int, int]] = {}  # turn: version, servers still at it
        self._ledger = BatchLedger(0, 0)
        self._batches: list[np.ndarray[Any, Any]] = []
        self._first_version = 0
        self._initial = self._layout.flat(model).cpu()
        self._buffers: dict[str, np.ndarray[Any, Any]] = (
            {name: buffer.cpu().numpy().copy() for name, buffer in model.named_buffers()}
            if state is None
            else state["buffers"]
        )
        self._servers = [self._new_server(index) for index in range(strategy.servers)]
        self._groups = [_Group(index) for index in range(strategy.groups)]
        for group in self._groups:  # their processes start while the servers' do
            self._start(group)
        try:
            if state is None:
                for server in self._servers:
                    self._ask(server, "ping")
            else:
                versions = {
                    self._ask(server, "restore", 0, part)
                    for server, part in zip(self._servers, state["servers"], strict=True)
                }
                self._version = versions.pop()
            self._snapshot(wait=True)
        except (Died, _ServerDied):
            raise RuntimeError(
                "a server died before the training began: see that its node has the memory for "
                "its part of the parameters, and twice that for the optimizer's state"
            ) from None

    # -- for the caller -----------------------------------------------------------------------

    def wait_for_workers(self) -> None:
        """Wait until all workers have joined, so that an epoch's time is that of training alone.

        Raises:
            RuntimeError: a group died again and again.
        """
        while calls := [call for group in self._groups for call in group.calls]:
            try:
                for call in self._cluster.wait(calls):
                    self._handle(call)
            except _ServerDied:
                self._recover()

    def run_epoch(
        self,
        epoch: int,
        batches: Sequence[Tensor],
        rate: Callable[[int], float],
    ) -> EpochResult:
        """Train an epoch to its end.

        Args:
            epoch: from 0; each once.
            batches: indices of each batch's samples, int64, on the CPU. A group splits its batch
                over its members. The gradients of an update are averaged in proportion to their
                batches' samples.
            rate: from the number of the epoch's batches applied so far to the learning rate.

        Raises:
            InputError: a batch is empty.
            RuntimeError: a group died again and again without a batch in between.
        """
        self._result = EpochResult()
        self._updates = {}
        self._batches = [np.asarray(batch.numpy(), dtype=np.int64) for batch in batches]
        if not all(len(batch) for batch in self._batches):
            raise InputError("expected batches of at least one sample, got an empty one")
        self._rate = rate
        self._ledger = BatchLedger(epoch, len(batches))
        self._first_version = self._version
        for group in self._groups:
            if group.phase == "idle":
                for member in group.members:
                    member.call("rest")
        while True:
            try:
                self._drain()
                self._snapshot(wait=True)
                break
            except _ServerDied:
                self._recover()
        result = self._result
        in_order = [self._updates[version] for version in sorted(self._updates)]
        result.staleness = [update.staleness for update in in_order]
        result.updates = sorted(in_order, key=lambda update: update.keys[0])
        result.lost = self._ledger.lost
        return result

    def load_into(self, model: nn.Module) -> None:
        """Copy the parameters into a model, between epochs, and the first worker's buffers.

        Normalisation statistics are each replica's own; the first group's leader's are the ones
        that are kept.
        """
        parts = self._ask_all("parameters")
        self._layout.load(model, torch.cat(parts))
        buffers = self.buffers()
        for name, buffer in model.named_buffers():
            buffer.copy_(torch.from_numpy(np.array(buffers[name])))

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the buffers of the first group's leader, between epochs.

        Where that process just died they are those of the last time they were asked for, or the
        model's to begin with.
        """
        with contextlib.suppress(Died):
            self._buffers = self._cluster.result(self._groups[0].members[0].call("buffers"))
        return self._buffers

    def state(self) -> dict[str, Any]:
        """Return everything a later training goes on from, between epochs.

        Strings, bytes (of `torch.save`) and NumPy arrays.
        """
        return {
            "layout": self._layout.contents,
            "servers": self._ask_all("state"),
            "buffers": self.buffers(),
        }

    def close(self) -> None:
        """End all processes and remove the snapshots."""
        for group in self._groups:
            for member in group.members:
                member.kill()
        for server in self._servers:
            server.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def processes(self) -> dict[str, list[Process]]:
        """Return the living processes: `servers`, and `workers` in the order of their ranks."""
        workers = [member for group in self._groups for member in group.members]
        return {"servers": list(self._servers), "workers": workers}

    # -- the loop -----------------------------------------------------------------------------

    def _drain(self) -> None:
        """Go on until all batches are applied or lost, and no server has anything to do."""
        self._decide()
        while self._ledger.remaining or self._turns:
            calls = list(self._turns)
            for group in self._groups:
                calls += group.calls
            if not calls:
                raise RuntimeError(
                    f"{self._ledger.remaining} batches are left and nobody works on them: a bug"
                )
            for call in self._cluster.wait(calls):
                self._handle(call)
                self._decide()

    def _handle(self, call: Any) -> None:
        if call in self._turns:
            self._end_turn(call, self._turns.pop(call))
            return
        for group in self._groups:
            if call in group.calls:
                what = group.calls.pop(call)
                try:
                    self._note(group, what, self._cluster.result(call))
                except (Died, LinkBroken) as error:
                    self._check_servers()
                    self._bury(group, error)
                    return
                if not group.calls:
                    self._advance(group)
                return

    def _note(self, group: _Group, what: str, result: Any) -> None:
        """Keep the result of one call of a group."""
        if what == "push":
            self._add(result)
        elif what.startswith("compute"):
            member = int(what.removeprefix("compute"))
            group.losses[member] = result
            self._add(result.seconds)

    def _add(self, seconds: dict[str, float]) -> None:
        for phase, value in seconds.items():
            self._result.seconds[phase] = self._result.seconds.get(phase, 0.0) + value

    def _advance(self, group: _Group) -> None:
        """Move a group on, all of whose calls have ended."""
        if group.phase == "starting":
            group.phase = "connecting"
            for member in group.members:
                group.calls[member.call("connect", group.reader)] = "connect"
            for server in self._servers:
                group.calls[server.call("connect", group.reader)] = "server"
        elif group.phase == "computing":
            group.fruitless = 0
            if group.lease is None:  # its update was made without it
                group.phase = "idle"
                return
            group.phase = "pushing"
            group.calls[group.members[0].call("push", group.lease)] = "push"
            for server in self._servers:
                group.calls[server.call("stage", group.reader, group.lease)] = "server"
        elif group.phase == "pushing" and group.lease is not None:
            group.phase = "staged"
            self._ledger.stage(group.lease)
        else:
            group.phase = "idle"

    def _decide(self) -> None:
        """Apply what may be applied, and give batches to whom may begin."""
        if self._strategy.synchronous:
            staged = self._ledger.staged
            quorum = min(self._strategy.quorum, self._ledger.remaining)
            if staged and len(staged) >= quorum:
                self._take_turn([self._holder(key) for key in staged[:quorum]])
        else:
            while ready := self._ready():
                self._take_turn([ready])
        if any(group.phase == "idle" for group in self._groups):
            self._take_turn([])

    def _ready(self) -> _Group | None:
        """Return a group whose staged gradient may be applied, the first that came first."""
        for key in self._ledger.staged:
            group = self._holder(key)
            others = [g.version for g in self._groups if g.lease is not None and g is not group]
            if may_apply(self._version, others, self._strategy.staleness_bound):
                return group
        return None

    def _holder(self, key: BatchKey) -> _Group:
        return next(group for group in self._groups if group.lease == key)

    def _take_turn(self, accepted: list[_Group]) -> None:
        """Apply the accepted groups' gradients, and let all idle groups read and begin."""
        gradients: list[tuple[BatchKey, str, float]] = []
        rate = 0.0
        if accepted:
            gradients, rate = self._apply(accepted)
        readers = []
        for group in self._groups:
            if group.phase == "idle" and self._lease(group):
                readers.append(group)
        readers = [group for group in readers if group.version != self._version]
        if gradients or readers:
            self._turn += 1
            names = [group.reader for group in readers]
            for server in self._servers:
                call = server.call("update", self._turn, gradients, names, rate)
                self._turns[call] = "update"
        for group in self._groups:
            if group.phase == "leased":
                self._compute(group, reads=group in readers)
        every = self._snapshot_every
        if accepted and every and (self._version - self._first_version) % every == 0:
            self._snapshot(wait=False)

    def _apply(self, accepted: list[_Group]) -> tuple[list[tuple[BatchKey, str, float]], float]:
        """Write an update down; returns what the servers have to know."""
        done = len(self._ledger.applied)
        taken = sorted((group.lease, group) for group in accepted if group.lease is not None)
        keys = tuple(key for key, _ in taken)
        sizes = [len(self._batches[key.batch]) for key in keys]
        gradients = [
            (key, group.reader, size / sum(sizes))
            for (key, group), size in zip(taken, sizes, strict=True)
        ]
        staleness = self._version - accepted[0].version
        rate = self._rate(done)
        if self._strategy.rate_by_staleness:
            rate /= max(1, staleness)
        self._ledger.apply(keys)
        self._version += 1
        losses = [group.losses[m].losses for _, group in taken for m in sorted(group.losses)]
        self._updates[self._version] = Update(
            self._version,
            keys,
            staleness,
            torch.from_numpy(np.concatenate([self._batches[key.batch] for key in keys])),
            torch.from_numpy(np.concatenate(losses)),
        )
        for group in accepted:
            group.phase, group.lease = "idle", None
        if self._strategy.synchronous:
            for group in self._groups:
                if group.lease is not None:
                    self._ledger.reject(group.lease)
                    self._result.dropped += 1
                    group.lease = None
                    if group.phase == "staged":
                        group.phase = "idle"
        return gradients, rate

    def _lease(self, group: _Group) -> bool:
        in_flight = sum(other.lease is not None for other in self._groups)
        if not may_start(in_flight, self._strategy.staleness_bound):
            return False
        group.lease = self._ledger.lease(group.index)
        if group.lease is None:
            return False
        group.phase = "leased"
        return True

    def _compute(self, group: _Group, *, reads: bool) -> None:
        assert group.lease is not None
        group.phase = "computing"
        group.version = self._version
        group.losses = {}
        indices = self._batches[group.lease.batch]
        parts = np.array_split(indices, len(group.members))
        for place, (member, part) in enumerate(zip(group.members, parts, strict=True)):
            share = len(part) / len(indices)
            # A member for which nothing is left has to step with the others all the same.
            sent = part if len(part) else indices[:1]
            call = member.call("compute", group.lease, sent, share, reads)
            group.calls[call] = f"compute{place}"

    # -- servers ------------------------------------------------------------------------------

    def _new_server(self, index: int) -> Process:
        part = self._initial[self._layout.part(index)].numpy()
        arguments = (self._layout, index, part, self._optimizer, self._rendezvous)
        return self._cluster.server(index, _make_server, arguments)

    def _end_turn(self, call: Any, what: str) -> None:
        try:
            result = self._cluster.result(call)
        except Died:
            raise _ServerDied from None
        if isinstance(result, Answered):
            self._add({"queue": result.queue, "apply": result.apply, "send": result.send})
        elif what.startswith("snapshot"):
            turn = int(what.removeprefix("snapshot"))
            version, left = self._saving.pop(turn)
            if left > 1:
                self._saving[turn] = (version, left - 1)
            else:
                self._keep(version, turn)

    def _snapshot(self, *, wait: bool) -> None:
        """Let all servers write this version down."""
        under_way = {version for version, _ in self._saving.values()}
        if self._version != self._common and self._version not in under_way:
            self._turn += 1
            self._saving[self._turn] = (self._version, len(self._servers))
            for index, server in enumerate(self._servers):
                call = server.call("snapshot", self._turn, self._path(index, self._turn))
                self._turns[call] = f"snapshot{self._turn}"
        while wait and self._turns:
            for call in self._cluster.wait(list(self._turns)):
                self._end_turn(call, self._turns.pop(call))

    def _keep(self, version: int, turn: int) -> None:
        """Make a version that all servers have written the one to go back to."""
        if turn < self._common_turn:
            return
        self._common, self._common_turn = version, turn
        for path in self._folder.glob("server*-turn*.pt"):
            if int(path.stem.rpartition("turn")[2]) < turn:
                path.unlink()

    def _path(self, index: int, turn: int) -> Path:
        return self._folder / f"server{index}-turn{turn}.pt"

    def _check_servers(self) -> None:
        for call in [server.call("ping") for server in self._servers]:
            try:
                self._cluster.result(call)
            except Died:
                raise _ServerDied from None

    def _recover(self) -> None:
        """Bring all servers, the dead ones made anew, back to their last common version."""
        self._turns.clear()
        self._saving.clear()
        for group in self._groups:  # new processes start while the servers' do
            self._ledger.orphan(group.index)
            if len(group.members) > 1 or group.phase == "connecting":
                # They may hang in a collective, or wait for the dead server to make a link.
                self._kill(group)
                self._start(group)
            else:
                self._restart(group)
        for index in range(len(self._servers)):
            deaths = 0
            while not self._restore(index):
                deaths += 1
                if deaths == _DEATHS_IN_VAIN:
                    raise RuntimeError(f"server {index} died {deaths} times without an update")
        undone = [version for version in self._updates if version > self._common]
        for version in undone:
            keys = self._updates.pop(version).keys
            self._ledger.undo(keys, lose=not self._strategy.synchronous)
        self._result.undone += len(undone)
        self._version = self._common

    def _restore(self, index: int) -> bool:
        """Take a server back to the last common version, or make it anew where it is dead."""
        server = self._servers[index]
        path = self._path(index, self._common_turn)
        try:
            self._ask(server, "restore", self._turn, path)
        except Died:
            server.kill()
            self._result.server_deaths += 1
            self._servers[index] = self._new_server(index)
            return False
        return True

    def _ask(self, server: Process, method: str, *arguments: Any) -> Any:
        self._cluster.result(server.made)
        return self._cluster.result(server.call(method, *arguments))

    def _ask_all(self, method: str) -> list[Any]:
        """Ask all servers in a turn of its own, between epochs; a death is made good."""
        while True:
            self._turn += 1
            calls = [server.call(method, self._turn) for server in self._servers]
            try:
                return [self._cluster.result(call) for call in calls]
            except Died:
                self._recover()

    # -- groups -------------------------------------------------------------------------------

    def _start(self, group: _Group) -> None:
        """Make a group's processes, and let them join as soon as they are there."""
        size = self._strategy.group
        group.members = [
            self._cluster.replica(
                group.index,
                Worker,
                (
                    self._build,
                    group.index * size + member,
                    member,
                    size,
                    self._strategy.servers,
                    self._rendezvous,
                ),
            )
            for member in range(size)
        ]
        self._restart(group)
        for member in group.members:
            group.calls[member.made] = "made"
            if self._buffers:
                group.calls[member.call("load_buffers", self._buffers)] = "buffers"

    def _restart(self, group: _Group) -> None:
        """Give a group's living processes links anew, when they have left what they are at."""
        self._lives += 1
        group.life = self._lives
        group.phase, group.lease, group.version = "starting", None, -1
        group.calls = {member.call("disconnect"): "disconnect" for member in group.members}

    def _bury(self, group: _Group, error: Exception) -> None:
        """End a group of which a member died, queue its batch again, and make it anew."""
        self._result.worker_deaths += 1
        group.fruitless += 1
        if group.fruitless >= _DEATHS_IN_VAIN:
            raise RuntimeError(
                f"group {group.index} died {group.fruitless} times without a batch in between; "
                f"the last time: {error}"
            )
        self._kill(group)
        for server in self._servers:
            server.call("forget", self._turn, group.reader)
        self._ledger.orphan(group.index)
        self._start(group)

    def _kill(self, group: _Group) -> None:
        for member in group.members:
            member.kill()
        group.calls = {}


def _make_server(
    layout: FlatLayout,
    index: int,
    part: np.ndarray[Any, Any],
    optimizer: MakeOptimizer,
    rendezvous: Rendezvous,
    host: str,
) -> ParameterServer:
    return ParameterServer(
        layout, index, torch.from_numpy(np.array(part)), optimizer, rendezvous, host
    )
