"""The scheduler decides which gradients make the next update and which group gets which batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey
from fineprune.distributed.parameter_servers.epoch_state import EpochState
from fineprune.distributed.parameter_servers.events import Event, EventKind, report
from fineprune.distributed.parameter_servers.messages import Contribution, Update
from fineprune.distributed.parameter_servers.server_group import ServerGroup
from fineprune.distributed.parameter_servers.staleness import may_apply, may_start
from fineprune.distributed.parameter_servers.worker_group import GroupPhase, WorkerGroup
from fineprune.distributed.strategy import Strategy


@dataclass(frozen=True)
class Scheduler:
    """Tells the servers what to apply and the groups what to compute, according to the strategy."""

    _strategy: Strategy
    _servers: ServerGroup
    _groups: Sequence[WorkerGroup]

    def decide(self, epoch: EpochState) -> None:
        """Apply the gradients that may be applied, and lease batches to the idle groups.

        After the end of the epoch, this does nothing.
        """
        if epoch.should_stop():
            for key in epoch.ledger.stop(self._strategy.quorum):
                self._holder(key).release()
        while accepted := self._acceptable(epoch):
            self._step(epoch, accepted)
        if any(group.phase is GroupPhase.IDLE for group in self._groups):
            self._step(epoch, [])

    def _acceptable(self, epoch: EpochState) -> list[WorkerGroup]:
        """Return the groups whose staged gradients make the next update; empty if it must wait."""
        staged = epoch.ledger.staged
        if self._strategy.synchronous:
            quorum = min(self._strategy.quorum, epoch.ledger.remaining)
            if len(staged) < quorum:
                return []
            return [self._holder(key) for key in staged[:quorum]]
        for key in staged:
            holder = self._holder(key)
            others = [g.version for g in self._groups if g.lease is not None and g is not holder]
            if may_apply(self._servers.version, others, self._strategy.staleness_bound):
                return [holder]
        return []

    def _step(self, epoch: EpochState, accepted: Sequence[WorkerGroup]) -> None:
        """Apply the gradients of the accepted groups, and start the idle groups on new batches."""
        contributions, rate = self._accept(epoch, accepted) if accepted else ([], 0.0)
        version = self._servers.version + (1 if contributions else 0)
        leased = [group for group in self._groups if self._lease(epoch, group)]
        readers = [group for group in leased if group.version != version]
        if contributions or readers:
            self._servers.update(Update(contributions, [group.name for group in readers], rate))
        # The groups without a lease get the lowest batches.
        idle = max(0, self._strategy.quorum - self._in_flight())
        for group in leased:
            assert group.lease is not None
            following = epoch.ledger.announce(group.index, idle)
            group.step(
                epoch.indices(group.lease),
                epoch.weights(group.lease),
                version,
                reads=group in readers,
                following=following and (following, epoch.indices(following)),
            )
        every = self._strategy.snapshot_every
        if contributions and every and epoch.updates % every == 0:
            self._servers.snapshot()

    def _accept(
        self, epoch: EpochState, accepted: Sequence[WorkerGroup]
    ) -> tuple[list[Contribution], float]:
        """Record an update. Return what the servers have to apply, and the learning rate."""
        version = self._servers.version
        staleness = version - accepted[0].version
        rate = epoch.rate()
        if self._strategy.rate_by_staleness:
            rate /= max(1, staleness)
        groups = {group.lease: group for group in accepted if group.lease is not None}
        computed = {
            key: (group.index, group.losses, group.watched) for key, group in groups.items()
        }
        shares = epoch.apply(version + 1, staleness, computed)
        contributions = [
            Contribution(key, groups[key].name, share) for key, share in shares.items()
        ]
        batches = ", ".join(str(key.batch) for key in shares)
        report(Event(EventKind.UPDATED, reason=f"batches {batches}", version=version + 1))
        for group in accepted:
            group.release()
        if self._strategy.synchronous:  # the other gradients come too late
            for group in self._groups:
                if group.lease is not None:
                    epoch.ledger.reject(group.lease)
                    epoch.result.dropped += 1
                    group.release()
        return contributions, rate

    def _lease(self, epoch: EpochState, group: WorkerGroup) -> bool:
        """Lease a batch to a group if it is idle and may start; return whether it got a batch."""
        if group.phase is not GroupPhase.IDLE:
            return False
        if not may_start(self._in_flight(), self._strategy.staleness_bound):
            return False
        group.lease = epoch.ledger.lease(group.index)
        return group.lease is not None

    def _in_flight(self) -> int:
        return sum(group.lease is not None for group in self._groups)

    def _holder(self, key: BatchKey) -> WorkerGroup:
        return next(group for group in self._groups if group.lease == key)
