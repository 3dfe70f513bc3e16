"""What a training costs on a cluster: the cluster, the costs of a step, and the file with both."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fineprune.errors import (
    InputError,
    check_at_least,
    check_between,
    check_positive,
    check_whole_number,
    explaining,
)
from fineprune.training.convert import check_known, converted

# A configuration gives the number of workers in four digits.
_MOST_ACCELERATORS = 9_999


@dataclass(frozen=True)
class ClusterShape:
    """The cluster to plan for. All nodes and all links are equal.

    Attributes:
        nodes: The largest number of nodes.
        accelerators: The number of workers per node, one for each accelerator.
        gigabits: The bandwidth of a node's link in Gbit/s in each direction, which all processes
            of the node share; 0 for a network that is never the limit.
        latency: The time of an empty message between two nodes, in seconds.
    """

    nodes: int = 1024
    accelerators: int = 1
    gigabits: float = 10.0
    latency: float = 5e-5

    def __post_init__(self) -> None:
        check_whole_number("cluster.nodes", self.nodes, 1)
        check_whole_number("cluster.accelerators", self.accelerators, 1)
        check_between("cluster.accelerators", self.accelerators, 1, _MOST_ACCELERATORS)
        for name in ("gigabits", "latency"):
            check_at_least(f"cluster.{name}", getattr(self, name), 0)

    def seconds(self, megabytes: float) -> float:
        """Return how long a link carries so many megabytes, in seconds."""
        return 8e-3 * megabytes / self.gigabits if self.gigabits else 0.0


@dataclass(frozen=True)
class Costs:
    """The costs of a step, which are measured on one machine or given.

    Attributes:
        steps: The durations of the steps of one worker that trains alone, in seconds. Their spread
            decides how long synchronous workers wait for one another.
        samples: The number of samples per step.
        megabytes: The size of the parameters, and of their gradient.
        overhead: The time of an exchange with servers, in seconds, excluding what is listed here:
            messages, copies and waiting in the worker.
        serve: How long one server that holds all parameters is busy with a gradient and with the
            answer to its worker, in seconds. With S servers, each is busy for a part of 1 / S.
        apply: How long it is busy with an update, in seconds.
        coordinate: How long the driver is busy with a gradient, in seconds.
        gradients: The size of a gradient on its way, as a part of ``megabytes``; 0.5 for bfloat16.
        overlaps: Whether the servers work on a gradient while the worker still computes, as with
            TensorFlow, which sends each layer's gradient as soon as it is known. Then ``serve`` and
            ``apply`` limit the throughput of the servers, but are no part of a worker's step.
    """

    steps: tuple[float, ...]
    samples: int
    megabytes: float
    overhead: float = 0.0
    serve: float = 0.0
    apply: float = 0.0
    coordinate: float = 0.0
    gradients: float = 1.0
    overlaps: bool = False

    def __post_init__(self) -> None:
        if not self.steps:
            raise InputError("expected costs.steps as a list of seconds, got []: give at least one")
        for step in self.steps:
            check_positive("costs.steps", step)
        check_whole_number("costs.samples", self.samples, 1)
        for name in ("megabytes", "overhead", "serve", "apply", "coordinate", "gradients"):
            check_at_least(f"costs.{name}", getattr(self, name), 0)

    @property
    def step(self) -> float:
        """The mean duration of a step, in seconds."""
        return sum(self.steps) / len(self.steps)


@dataclass(frozen=True)
class Target:
    """How the number of samples that a training needs depends on the workers.

    Attributes:
        epochs: The epochs that one worker needs to reach the target; None for those of the recipe.
        critical_batch: The batch size at which a training needs twice as many samples as with tiny
            batches (the gradient noise scale, McCandlish et al. 2018); None if larger batches need
            no more samples.
        per_staleness: The share of additional samples for each update of mean staleness.
    """

    epochs: float | None = None
    critical_batch: float | None = None
    per_staleness: float = 0.0

    def __post_init__(self) -> None:
        for name in ("epochs", "critical_batch"):
            value = getattr(self, name)
            if value is not None:
                check_positive(f"target.{name}", value)
        check_at_least("target.per_staleness", self.per_staleness, 0)

    def factor(self, alone: int, update: int, staleness: float) -> float:
        """Return how many times the samples of one worker a configuration needs."""
        batch = 1.0
        if self.critical_batch is not None:
            batch = (self.critical_batch + update) / (self.critical_batch + alone)
        return batch * (1 + self.per_staleness * staleness)


@dataclass(frozen=True)
class ClusterFile:
    """A file that describes a cluster; ``costs`` holds what is given of ``Costs``."""

    cluster: ClusterShape
    target: Target
    costs: dict[str, Any]


def read_cluster(path: Path) -> ClusterFile:
    """Read the description of a cluster: TOML with ``[cluster]``, ``[target]`` and ``[costs]``.

    All sections and keys are optional. Instead of ``costs.steps``, ``costs.step`` may give the
    duration of every step.
    """
    with (
        explaining(f"expected --cluster to be a TOML file, cannot read {path}", OSError),
        explaining(f"expected TOML in {path}, cannot parse it", ValueError),
    ):
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    costs = sections.get("costs")
    if isinstance(costs, dict) and "step" in costs:
        if "steps" in costs:
            raise InputError("expected costs.step or costs.steps, got both: remove one of them")
        costs["steps"] = [costs.pop("step")]
    for section in sections:
        check_known("section", section, ("cluster", "target", "costs"))
    costs = sections.get("costs", {})
    needed = {"steps": [1.0], "samples": 1, "megabytes": 0.0}
    made = converted("costs", Costs, {**needed, **costs})
    return ClusterFile(
        converted("cluster", ClusterShape, sections.get("cluster", {})),
        converted("target", Target, sections.get("target", {})),
        {name: getattr(made, name) for name in costs},
    )
