"""Strategy: which processes compute gradients, wait for others, and hold the parameters."""

import dataclasses

from fineprune.errors import InputError, check_at_least, check_between, check_one_of, check_positive

STRATEGIES = ("none", "sync", "async", "mixed")
# What a recipe sets for all its trials with servers, however many there are.
OF_ANY_SERVERS = ("gradients", "silence_seconds", "snapshot_every")
_OF_SERVERS = ("workers", "servers", "placement", *OF_ANY_SERVERS)
_MOST_SIMULATED = 1024


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a training is distributed (Campos et al., ICCS 2017, section 5).

    It is the section ``distributed`` of a recipe. Under ``torchrun``, the strategy ``none`` is
    all-reduce. With parameter servers, ``training.batch_size`` is that of each worker.

    Attributes:
        strategy: ``none``, or with parameter servers ``sync``, ``async`` or ``mixed``.
        workers: The number of replicas of the model.
        group: With ``mixed``, the number of replicas whose mean gradient is sent.
        backup: The number of workers that a synchronous update does not wait for. It takes the
            gradients of the first ``workers - backup``; the batches of the others are queued again.
        servers: The number of parameter servers; each holds an equal part of the parameters.
        placement: ``shared`` puts servers on the workers' nodes, ``dedicated`` on nodes of their
            own. If there are too few nodes for that, a warning is logged.
        staleness_bound: The largest staleness of an asynchronous gradient, in updates; None for no
            bound. A worker whose gradient might exceed it waits before it reads the parameters.
        rate_by_staleness: Whether to divide the learning rate of an asynchronous update by the
            gradient's staleness, if that is above 1.
        gradients: The dtype in which gradients are sent, ``float32`` or ``bfloat16``.
        silence_seconds: How long a worker or a server may take for its start, a step or an update
            before it is replaced. The time that it waits for free CPUs does not count.
        snapshot_every: The number of updates between two snapshots of the servers within an epoch;
            0 for none. If a server dies, the updates since the last one are undone, and their
            batches are trained again.
        simulate: The number of workers to simulate in one process, with ``group``, ``backup`` and
            ``staleness_bound`` as above; 0 for none.
        simulate_as: The strategy to simulate, ``async``, ``sync`` or ``mixed``.
        step_seconds: The usual durations of the steps of the simulated workers or groups, in any
            unit; none if all are equal.
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
        check_one_of("distributed.placement", self.placement, ("shared", "dedicated"))
        check_one_of("distributed.gradients", self.gradients, ("float32", "bfloat16"))
        check_one_of("distributed.simulate_as", self.simulate_as, STRATEGIES[1:])
        check_positive("distributed.silence_seconds", self.silence_seconds)
        for name, least in {"workers": 1, "group": 1, "servers": 1, "backup": 0}.items():
            check_at_least(f"distributed.{name}", getattr(self, name), least)
        check_at_least("distributed.snapshot_every", self.snapshot_every, 0)
        check_at_least("distributed.staleness_bound", self.staleness_bound or 0, 0)
        # Each simulated worker has a copy of the parameters.
        check_between("distributed.simulate", self.simulate, 0, _MOST_SIMULATED)
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
        self._check_fit()

    def _check_fit(self) -> None:
        """Check that each setting fits the strategy, real or simulated."""
        simulated = self.simulate_as if self.simulate else "none"
        kind = self.strategy if self.served else simulated
        stale = ("async", "mixed")
        for name, used, fitting in (
            ("group", kind, ("mixed",)),
            ("backup", kind, ("sync",)),
            ("staleness_bound", kind, stale),
            ("rate_by_staleness", self.strategy, stale),
            ("simulate", self.strategy, ("none",)),
            ("step_seconds", simulated, stale),
            ("step_spread", simulated, stale),
        ):
            if used not in fitting and getattr(self, name) != getattr(Strategy, name):
                which = "simulate_as" if name.startswith("step_") else "strategy"
                raise InputError(
                    f"expected distributed.{name} with {which} {' or '.join(fitting)} only, got it "
                    f"with {used!r}"
                )
        check_at_least("distributed.step_spread", self.step_spread, 0)
        for seconds in self.step_seconds:
            check_positive("distributed.step_seconds", seconds)
        if self.step_seconds and len(self.step_seconds) != self.simulated_groups:
            raise InputError(
                f"expected distributed.step_seconds to have {self.simulated_groups} numbers, one "
                f"for each simulated worker or group, got {len(self.step_seconds)}"
            )

    @property
    def without_effect(self) -> str | None:
        """Say which settings have no effect without servers; None if there is none.

        A recipe may have them for other runs, so it is no error.
        """
        given = [name for name in _OF_SERVERS if getattr(self, name) != getattr(Strategy, name)]
        if self.served or not given:
            return None
        remedy = "set distributed.strategy to sync, async or mixed"
        if self.simulate:
            remedy = "distributed.simulate is the number of simulated workers"
        names = ", ".join(f"distributed.{name}" for name in given)
        return f"no effect without parameter servers: {names}; {remedy}"

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
