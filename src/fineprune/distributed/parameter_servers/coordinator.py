"""The coordinator: it leases batches to groups of workers, and tells the servers what to apply.

It is a plain loop over calls that end. A group computes a gradient and stages it on all servers;
only then are all servers told to apply it. So a death between two servers leaves nothing applied in
part, and no gradient is ever applied twice.

Epochs drain: an epoch ends when each of its batches is applied or lost, and the next one begins
after that. So an epoch means the same under every strategy, and what is decided between two epochs,
such as which samples the next one skips, rests on all losses of the last one.
"""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.epoch_state import EpochResult, EpochState
from fineprune.distributed.parameter_servers.events import Event, EventKind, Report, reporter
from fineprune.distributed.parameter_servers.flat_layout import flat_layout
from fineprune.distributed.parameter_servers.link import open_store
from fineprune.distributed.parameter_servers.ray_cluster import Call, Cluster, Died
from fineprune.distributed.parameter_servers.rendezvous import Rendezvous
from fineprune.distributed.parameter_servers.server import Contribution, MakeOptimizer
from fineprune.distributed.parameter_servers.server_group import ServerDied, ServerGroup
from fineprune.distributed.parameter_servers.staleness import may_apply, may_start
from fineprune.distributed.parameter_servers.worker import Build
from fineprune.distributed.parameter_servers.worker_group import (
    Buffers,
    GroupBroken,
    GroupPhase,
    WorkerGroup,
)
from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError

R = TypeVar("R")

# A group that dies so often without a gradient in between ends the training.
_FRUITLESS_DEATHS = 3


class Coordinator:
    """Trains a model on the servers and workers of a cluster, epoch by epoch.

    Args:
        cluster: Has places for the strategy's groups, members and servers.
        strategy: Who waits for whom.
        model: The parameters and buffers to begin with; the model is only read.
        build: Makes a replica, given its rank; picklable. The replicas' parameters are overwritten.
        optimizer: Makes a server's optimizer, see ``ParameterServer``; picklable.
        snapshots: The folder for the servers' snapshots, the same one on all nodes. It is made
            here, and removed by ``close``.
        snapshot_every: The number of updates between two snapshots inside an epoch; with 0 there is
            one only at the end of each epoch.
        state: The state of an earlier training with as many servers, to go on from.
        timeout_seconds: How long each message between a worker and a server may take.
        on_event: Called with each event, in the thread that calls the coordinator. Events are also
            logged.

    Raises:
        InputError: The model does not fit, or the state is of another layout.
        RuntimeError: A server died before there was anything to bring it back to.
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
        on_event: Report | None = None,
    ) -> None:
        self._cluster = cluster
        self._strategy = strategy
        self._layout = flat_layout(model, strategy.servers)
        if state is not None and state["layout"] != self._layout.contents:
            raise InputError(
                "expected a state of the same model and number of servers, got one of others: "
                "resume with the settings that it was made with"
            )
        self._report = reporter(on_event)
        self._folder = snapshots
        self._folder.mkdir(parents=True, exist_ok=True)
        self._snapshot_every = snapshot_every
        self._epoch = EpochState(0, [], lambda applied: 0.0, 0)
        self._buffers: Buffers = (
            {name: buffer.cpu().numpy().copy() for name, buffer in model.named_buffers()}
            if state is None
            else state["buffers"]
        )
        self._store = open_store(cluster.host, timeout_seconds=timeout_seconds)
        rendezvous = Rendezvous(
            cluster.host, self._store.port, timeout_seconds, strategy.gradients == "bfloat16"
        )
        self._servers = ServerGroup(
            cluster,
            self._layout,
            self._layout.flat(model).cpu(),
            optimizer,
            rendezvous,
            snapshots,
            self._report,
        )
        self._groups = [
            WorkerGroup(index, cluster, strategy, build, rendezvous, self._report)
            for index in range(strategy.groups)
        ]
        for group in self._groups:  # their processes start while the servers' do
            group.start(self._buffers)
        try:
            self._servers.begin(None if state is None else state["servers"])
            self._snapshot()
        except ServerDied:
            raise RuntimeError(
                "a server died before the training began: see that its node has the memory for "
                "its part of the parameters, and twice that for the optimizer's state"
            ) from None

    # -- for the caller ---------------------------------------------------------------------------

    def wait_for_workers(self) -> None:
        """Wait until all workers have joined, so that an epoch's time is that of training alone.

        Raises:
            RuntimeError: A group died again and again.
        """
        while calls := [call for group in self._groups for call in group.pending]:
            try:
                for call in self._cluster.wait(calls):
                    self._handle(call)
            except ServerDied:
                self._recover()

    def run_epoch(
        self, epoch: int, batches: Sequence[Tensor], rate: Callable[[int], float]
    ) -> EpochResult:
        """Train an epoch to its end.

        Args:
            epoch: The epoch, from 0; each can be trained once.
            batches: The indices of each batch's samples, int64, on the CPU. A group divides its
                batch among its members. The gradients of an update are averaged in proportion to
                their batches' samples.
            rate: Returns the learning rate, given the number of the epoch's batches applied so far.

        Raises:
            InputError: A batch is empty.
            RuntimeError: A group died again and again without a gradient in between.
        """
        self._epoch = EpochState(epoch, batches, rate, self._servers.version)
        for group in self._groups:
            if group.phase is GroupPhase.IDLE:
                group.rest()
        while True:
            try:
                self._drain()
                self._snapshot()
                return self._epoch.finish()
            except ServerDied:
                self._recover()

    def load_into(self, model: nn.Module) -> None:
        """Copy the parameters into a model, between epochs, and the first worker's buffers.

        Normalisation statistics are each replica's own; those of the first group's leader are kept.
        """
        self._layout.load(model, self._undisturbed(self._servers.parameters))
        buffers = self.buffers()
        for name, buffer in model.named_buffers():
            buffer.copy_(torch.from_numpy(np.array(buffers[name])))

    def buffers(self) -> Buffers:
        """Return the buffers of the first group's leader, between epochs.

        If that process just died, they are those that were returned the last time, or those of the
        model that the training began with.
        """
        with contextlib.suppress(Died):
            self._buffers = self._groups[0].buffers()
        return self._buffers

    def state(self) -> dict[str, Any]:
        """Return everything that a later training goes on from, between epochs.

        It holds strings, bytes (in the format of ``torch.save``) and NumPy arrays.
        """
        return {
            "layout": self._layout.contents,
            "servers": self._undisturbed(self._servers.state),
            "buffers": self.buffers(),
        }

    def close(self) -> None:
        """End all processes and remove the snapshots."""
        for group in self._groups:
            group.kill()
        self._servers.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the loop ---------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Go on until all batches are applied or lost, and the servers have nothing to do."""
        self._decide()
        while self._epoch.ledger.remaining or self._servers.pending:
            calls = list(self._servers.pending)
            for group in self._groups:
                calls += group.pending
            if not calls:
                raise RuntimeError(
                    f"{self._epoch.ledger.remaining} batches are left and nobody works on them: "
                    f"a bug"
                )
            for call in self._cluster.wait(calls):
                self._handle(call)
                self._decide()

    def _handle(self, call: Call[Any]) -> None:
        """Take the result of a call that has ended, and let its group go on."""
        if call in self._servers.pending:
            self._epoch.add_seconds(self._servers.finish(call))
            return
        for group in self._groups:
            if call in group.pending:
                try:
                    self._epoch.add_seconds(group.finish(call))
                except GroupBroken as broken:
                    self._servers.check()
                    self._replace(group, broken)
                    return
                if not group.pending:
                    self._advance(group)
                return

    def _advance(self, group: WorkerGroup) -> None:
        """Let a group go on to its next phase, since it waits for nothing any more."""
        if group.phase is GroupPhase.STARTING:
            group.connect(self._servers)
            return
        if group.phase is GroupPhase.COMPUTING:
            group.fruitless_deaths = 0
        if group.phase is GroupPhase.CONNECTING or group.lease is None:
            group.phase = GroupPhase.IDLE  # it may have lost its lease to an update without it
        elif group.phase is GroupPhase.COMPUTING:
            group.push(self._servers)
        elif group.phase is GroupPhase.PUSHING:
            group.phase = GroupPhase.STAGED
            self._epoch.ledger.stage(group.lease)

    def _decide(self) -> None:
        """Apply what may be applied, and lease batches to the groups that are idle."""
        while accepted := self._acceptable():
            self._step(accepted)
        if any(group.phase is GroupPhase.IDLE for group in self._groups):
            self._step([])

    def _acceptable(self) -> list[WorkerGroup]:
        """Return the groups whose staged gradients make the next update; none if it has to wait."""
        staged = self._epoch.ledger.staged
        if self._strategy.synchronous:
            quorum = min(self._strategy.quorum, self._epoch.ledger.remaining)
            if len(staged) < quorum:
                return []
            return [self._holder(key) for key in staged[:quorum]]
        for key in staged:
            holder = self._holder(key)
            others = [g.version for g in self._groups if g.lease is not None and g is not holder]
            if may_apply(self._servers.version, others, self._strategy.staleness_bound):
                return [holder]
        return []

    def _step(self, accepted: Sequence[WorkerGroup]) -> None:
        """Apply the gradients of the accepted groups; let all idle groups read and compute."""
        contributions, rate = self._accept(accepted) if accepted else ([], 0.0)
        version = self._servers.version + (1 if contributions else 0)
        leased = [group for group in self._groups if self._lease(group)]
        readers = [group for group in leased if group.version != version]
        if contributions or readers:
            self._servers.update(contributions, [group.name for group in readers], rate)
        for group in leased:
            assert group.lease is not None
            group.compute(self._epoch.indices(group.lease), version, reads=group in readers)
        every = self._snapshot_every
        if contributions and every and self._epoch.updates_since_start(version) % every == 0:
            self._servers.snapshot()

    def _accept(self, accepted: Sequence[WorkerGroup]) -> tuple[list[Contribution], float]:
        """Note an update; return what the servers have to apply, and the learning rate."""
        version = self._servers.version
        staleness = version - accepted[0].version
        rate = self._epoch.rate()
        if self._strategy.rate_by_staleness:
            rate /= max(1, staleness)
        groups = {group.lease: group for group in accepted if group.lease is not None}
        losses = {key: group.losses for key, group in groups.items()}
        shares = self._epoch.apply(version + 1, staleness, losses)
        contributions = [
            Contribution(key, groups[key].name, share) for key, share in shares.items()
        ]
        for group in accepted:
            group.release()
        if self._strategy.synchronous:  # the gradients of the others are too late
            for group in self._groups:
                if group.lease is not None:
                    self._epoch.ledger.reject(group.lease)
                    self._epoch.result.dropped += 1
                    group.release()
        return contributions, rate

    def _lease(self, group: WorkerGroup) -> bool:
        """Lease a batch to a group; return whether it is idle and there is one that it may have."""
        if group.phase is not GroupPhase.IDLE:
            return False
        in_flight = sum(other.lease is not None for other in self._groups)
        if not may_start(in_flight, self._strategy.staleness_bound):
            return False
        group.lease = self._epoch.ledger.lease(group.index)
        if group.lease is None:
            return False
        group.phase = GroupPhase.LEASED
        return True

    def _holder(self, key: BatchKey) -> WorkerGroup:
        return next(group for group in self._groups if group.lease == key)

    def _snapshot(self) -> None:
        """Let all servers write this version down, and wait until they have."""
        self._servers.snapshot()
        while self._servers.pending:
            for call in self._cluster.wait(list(self._servers.pending)):
                self._epoch.add_seconds(self._servers.finish(call))

    # -- deaths -----------------------------------------------------------------------------------

    def _replace(self, group: WorkerGroup, broken: GroupBroken) -> None:
        """Start a group again of which a member died, and queue its batch again."""
        self._epoch.result.worker_deaths += 1
        group.fruitless_deaths += 1
        if group.fruitless_deaths >= _FRUITLESS_DEATHS:
            raise RuntimeError(
                f"group {group.index} died {group.fruitless_deaths} times without a batch in "
                f"between; the last time: {broken.reason}"
            )
        group.end(broken.reason, died=broken.member)
        self._servers.forget(group.name)
        self._epoch.ledger.orphan(group.index)
        group.start(self._buffers)

    def _recover(self) -> None:
        """Bring all servers, the dead ones made anew, back to their last common version."""
        for group in self._groups:  # new processes start while the servers' do
            self._epoch.ledger.orphan(group.index)
            if group.size > 1 or group.phase is GroupPhase.CONNECTING:
                # They may hang in a collective, or wait for the dead server to make a link.
                group.end("a server died")
                group.start(self._buffers)
            else:
                group.reconnect()
        deaths = self._servers.deaths
        self._servers.roll_back()
        self._epoch.result.server_deaths += self._servers.deaths - deaths
        version = self._servers.version
        lose = not self._strategy.synchronous
        batches = self._epoch.undo(version, lose=lose)
        reason = f"{batches} batches are {'lost' if lose else 'queued again'}"
        self._report(Event(EventKind.ROLLED_BACK, reason=reason, version=version))

    def _undisturbed(self, ask: Callable[[], R]) -> R:
        """Ask the servers, again if one of them died meanwhile."""
        while True:
            try:
                return ask()
            except ServerDied:
                self._recover()
