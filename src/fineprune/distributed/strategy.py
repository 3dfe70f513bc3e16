"""Strategy: which processes compute gradients, wait for others, and hold the parameters.

This is the only description of a distributed training. The ``distributed`` section of a recipe is a
``Strategy``, and the driver of the parameter servers receives the same object.
"""

import dataclasses
from collections.abc import Collection

from fineprune.errors import InputError, check_at_least, check_between, check_one_of, check_positive

STRATEGIES = ("none", "sync", "async", "mixed")
PLACEMENTS = ("shared", "dedicated")
GRADIENT_TYPES = ("float32", "bfloat16")
MOST_SIMULATED = 1024

# Settings that mean something with parameter servers only, however many there are, and all such.
OF_ANY_SERVERS = (
    "gradients",
    "silence_seconds",
    "snapshot_every",
)
_OF_SERVERS = ("workers", "servers", "placement", *OF_ANY_SERVERS)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a training is distributed (Campos et al., ICCS 2017, section 5).

    Under ``torchrun``, a training with the strategy ``none`` is distributed by all-reduce, and
    nothing needs to be set. With parameter servers, ``training.batch_size`` is the batch size of
    each worker.

    Attributes:
        strategy: ``none``, or with parameter servers ``sync``, ``async`` or ``mixed``.
        workers: The number of replicas of the model.
        group: The number of replicas that average their gradients before one of them pushes the
            mean; above 1 with ``mixed`` only.
        backup: The number of workers that a synchronous update does not wait for. An update takes
            the gradients of the first ``workers - backup``, and the batches of the others are
            queued again.
        servers: The number of parameter servers; each holds an equal part of the parameters.
        placement: ``shared`` puts servers on the workers' nodes, ``dedicated`` on nodes of their
            own. If there are too few nodes for that, a warning is logged.
        staleness_bound: The largest staleness of an asynchronous gradient, in updates, also of
            simulated workers; None for no bound. A worker whose gradient might exceed the bound
            waits before it reads the parameters. Dead workers are not waited for.
        rate_by_staleness: Whether to divide the learning rate of an asynchronous update by the
            gradient's staleness, if that is above 1.
        gradients: The dtype in which gradients are sent, ``float32`` or ``bfloat16``.
        silence_seconds: How long a worker or a server may take for anything that it is asked:
            its start, a step, an update. Then it counts as hanging, and is killed and replaced. The
            time that it waits for free CPUs does not count.
        snapshot_every: The number of updates between two snapshots of the servers within an epoch;
            0 for snapshots at the end of each epoch only. If a server dies, the updates since the
            last snapshot are undone, and their batches are trained again.
        simulate: The number of workers to simulate in one process; 0 for none. Then ``group`` and
            ``backup`` have the same meaning as with servers.
        simulate_as: The strategy to simulate, ``async``, ``sync`` or ``mixed``.
        step_seconds: The usual durations of the steps of the simulated workers (with ``mixed``, of
            the groups), in any unit; none if all are equal. They determine the order of
            asynchronous updates.
        step_spread: The standard deviation of the logarithm of each of these durations.

    Raises:
        InputError: A value is out of range, or the values do not fit together.
    """

    strategy: str = "none"
    workers: int = 2
    group: int = 1
    backup: int = 0
    servers: int = 1
    placement: str = "shared"
    staleness_bound: int | None = None
    rate_by_staleness: bool = False
    gradients: str = "float32"
    silence_seconds: float = 300.0
    snapshot_every: int = 50
    simulate: int = 0
    simulate_as: str = "async"
    step_seconds: tuple[float, ...] = ()
    step_spread: float = 0.0

    def __post_init__(self) -> None:
        if self.strategy == "all-reduce":
            raise InputError(
                f"expected distributed.strategy to be one of {', '.join(STRATEGIES)}, got "
                f"'all-reduce': set none, and start the command with torchrun"
            )
        check_one_of("distributed.strategy", self.strategy, STRATEGIES)
        check_one_of("distributed.placement", self.placement, PLACEMENTS)
        check_one_of("distributed.gradients", self.gradients, GRADIENT_TYPES)
        check_positive("distributed.silence_seconds", self.silence_seconds)
        for name in ("workers", "group", "servers"):
            check_at_least(f"distributed.{name}", getattr(self, name), 1)
        for name in ("backup", "snapshot_every"):
            check_at_least(f"distributed.{name}", getattr(self, name), 0)
        # Each simulated worker has a copy of the parameters.
        check_between("distributed.simulate", self.simulate, 0, MOST_SIMULATED)
        if self.staleness_bound is not None:
            check_at_least("distributed.staleness_bound", self.staleness_bound, 0)
        check_one_of("distributed.simulate_as", self.simulate_as, STRATEGIES[1:])
        name, workers = ("simulate", self.simulate) if self.simulate else ("workers", self.workers)
        if self.backup >= workers:
            raise InputError(
                f"expected distributed.backup below distributed.{name}, got {self.backup} of "
                f"{workers}"
            )
        if workers % self.group:
            raise InputError(
                f"expected distributed.{name} to be a multiple of distributed.group, got "
                f"{workers} and {self.group}"
            )
        self._check_steps()
        kind = self.simulate_as if self.simulate and not self.served else self.strategy
        only = {
            "group": (self.group > 1, ("mixed",)),
            "backup": (self.backup > 0, ("sync",)),
            "staleness_bound": (self.staleness_bound is not None, ("async", "mixed")),
            "rate_by_staleness": (self.rate_by_staleness, ("async", "mixed")),
            "simulate": (self.simulate > 0, ("none",)),
        }
        for name, (given, strategies) in only.items():
            used = kind if name in ("group", "backup", "staleness_bound") else self.strategy
            if given and used not in strategies:
                raise InputError(
                    f"expected distributed.{name} with strategy {' or '.join(strategies)} only, "
                    f"got it with {used!r}"
                )

    def without_effect(self, given: Collection[str] = ()) -> str | None:
        """Say which settings have no effect without servers; None if there is none.

        A recipe may have them for other runs, so it is no error.

        Args:
            given: Names of settings that were given for this run, perhaps with their defaults.
        """
        ignored = [
            f"distributed.{field.name}"
            for field in dataclasses.fields(self)
            if field.name in _OF_SERVERS
            and (field.name in given or getattr(self, field.name) != field.default)
        ]
        if self.served or not ignored:
            return None
        remedy = "set distributed.strategy to sync, async or mixed"
        if self.simulate:
            remedy = "distributed.simulate is the number of simulated workers"
        return f"no effect without parameter servers: {', '.join(ignored)}; {remedy}"

    def _check_steps(self) -> None:
        check_at_least("distributed.step_spread", self.step_spread, 0)
        for seconds in self.step_seconds:
            check_positive("distributed.step_seconds", seconds)
        if not self.step_seconds and not self.step_spread:
            return
        if not self.simulate:
            raise InputError(
                "expected distributed.step_seconds and step_spread with distributed.simulate, got "
                "none: set it to the number of simulated workers, or remove them"
            )
        if self.simulate_as == "sync":
            raise InputError(
                'expected distributed.step_seconds and step_spread with simulate_as = "async" or '
                '"mixed", got "sync", whose updates do not depend on them: remove them'
            )
        if self.step_seconds and len(self.step_seconds) != self.simulated_groups:
            raise InputError(
                f"expected distributed.step_seconds to have {self.simulated_groups} numbers, one "
                f"for each simulated worker or group, got {len(self.step_seconds)}"
            )

    @property
    def served(self) -> bool:
        """Whether parameter servers hold the parameters."""
        return self.strategy != "none"

    @property
    def synchronous(self) -> bool:
        """Whether an update waits for the gradients of several groups."""
        return self.strategy == "sync"

    @property
    def groups(self) -> int:
        """The number of groups of replicas; a worker alone is a group of one."""
        return self.workers // self.group

    @property
    def quorum(self) -> int:
        """The number of groups whose gradients one update averages."""
        return self.workers - self.backup if self.synchronous else 1

    @property
    def dedicated_servers(self) -> int:
        """The number of servers that have CPUs of their own."""
        return self.servers if self.placement == "dedicated" else 0

    @property
    def batches_per_update(self) -> int:
        """The number of workers' batches whose mean gradient makes one update, with servers."""
        return self.quorum * self.group if self.served else 1

    @property
    def simulated_groups(self) -> int:
        """The number of simulated workers or groups whose gradients may be stale."""
        return 1 if self.simulate_as == "sync" else self.simulate // self.group

    @property
    def simulated_batches(self) -> int:
        """The number of batches whose mean gradient makes one simulated update."""
        if not self.simulate:
            return 1
        return self.simulate - self.backup if self.simulate_as == "sync" else self.group
