"""Strategy: how workers and parameter servers share a training."""

from dataclasses import dataclass

MODES = ("sync", "async", "mixed")


@dataclass(frozen=True)
class Strategy:
    """Who waits for whom.

    Attributes:
        mode: `sync`, `async` or `mixed` (synchronous inside a group, asynchronous between them).
        workers: replicas in all.
        servers: that share the parameters.
        backup: in `sync`, so many of the workers are backups: an update takes the gradients of the
            first `workers - backup`, and the batches of the others are queued again.
        group: in `mixed`, replicas of a group.
        bound: in `async` and `mixed`, the most updates that a gradient may be behind; a worker that
            might be further waits before it reads, never for the dead.
        divide_rate: divide the learning rate of an update by its gradient's staleness, at least 1.
        bfloat16: send float32 gradients rounded to bfloat16.

    Raises:
        ValueError: settings that do not fit together.
    """

    mode: str = "sync"
    workers: int = 1
    servers: int = 1
    backup: int = 0
    group: int = 1
    bound: int | None = None
    divide_rate: bool = False
    bfloat16: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"expected mode to be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.workers < 1 or self.servers < 1:
            raise ValueError(
                f"expected at least one worker and one server, got {self.workers} and "
                f"{self.servers}"
            )
        if not 0 <= self.backup < self.workers:
            raise ValueError(
                f"expected fewer backups than workers, got {self.backup} of {self.workers}"
            )
        if self.backup and self.mode != "sync":
            raise ValueError(f"expected backup workers in sync only, got {self.backup}")
        if self.group < 1 or self.workers % self.group:
            raise ValueError(
                f"expected groups that divide the workers, got {self.group} of {self.workers}"
            )
        if self.group > 1 and self.mode != "mixed":
            raise ValueError(f"expected groups in mixed only, got groups of {self.group}")
        if self.mode == "sync" and (self.bound is not None or self.divide_rate):
            raise ValueError("expected bound and divide_rate in async and mixed only, got sync")
        if self.bound is not None and self.bound < 0:
            raise ValueError(f"expected a bound of at least 0, got {self.bound}")

    @property
    def groups(self) -> int:
        """Groups of replicas; a worker alone is one."""
        return self.workers // self.group

    @property
    def quorum(self) -> int:
        """Gradients that an update averages."""
        return self.workers - self.backup if self.mode == "sync" else 1
