"""Units of failure as the driver sees them: a server, or a group of workers, with their actors."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from fineprune.distributed.parameter_servers.batches import BatchKey
from fineprune.distributed.parameter_servers.epoch import Computed
from fineprune.distributed.parameter_servers.events import Event, EventKind, ProcessKind, report
from fineprune.distributed.parameter_servers.failures import LOST_NODE, Failure
from fineprune.distributed.parameter_servers.server import Started
from fineprune.distributed.parameter_servers.worker import Stepped
from fineprune.errors import RunError

# If a group dies so many times without computing a gradient in between, the same cause would kill
# it again.
_FRUITLESS_DEATHS = 3


@dataclass(eq=False)
class Unit:
    """Actors that are started and killed together. A worker alone is a group of one.

    Attributes:
        kind: What the actors are.
        index: The index of the server, or of the group.
        size: The number of actors.
        make: Function that makes the actor with a given rank or index.
        actors: The actors, by their places.
        where: Where each actor runs; None until it has begun.
        deaths: The number of actors that died since ``Training.take_deaths`` was last called.
        starts: How many times the actors were started.
        fruitless_deaths: The number of deaths since the group last computed a gradient.
    """

    kind: ProcessKind
    index: int
    size: int
    make: Callable[[ProcessKind, int], Any]
    actors: list[Any] = field(default_factory=list)
    where: list[Started | None] = field(default_factory=list)
    deaths: int = 0
    starts: int = 0
    fruitless_deaths: int = 0

    @property
    def ready(self) -> bool:
        """Whether all actors have begun."""
        return bool(self.where) and all(self.where)

    def start(self) -> None:
        """Start the actors."""
        self.starts += 1
        first = self.index * self.size
        self.actors = [self.make(self.kind, first + place) for place in range(self.size)]
        self.where = [None] * self.size

    def note_begun(self, place: int, where: Started) -> None:
        """Note that an actor has begun."""
        if self.where[place] is None:
            self.where[place] = where
            self.report(place, EventKind.STARTED if self.starts == 1 else EventKind.RESTARTED)

    def end(self, dead: Mapping[int, str], reason: str) -> bool:
        """Kill all actors, and report it.

        Args:
            dead: The places of those that died or hang, each with the reason.
            reason: Why the others have to be started again.

        Returns:
            Whether one died. Until a lost node is noticed, actors may be placed on it, which then
            never run.
        """
        died = {
            place for place in dead if self.where[place] is not None or dead[place] != LOST_NODE
        }
        for place in range(len(self.actors)):
            kind = EventKind.DIED if place in died else EventKind.STOPPED
            self.report(place, kind, dead.get(place, reason))
        self.kill()
        self.deaths += len(died)
        self.fruitless_deaths += bool(died)
        if self.kind is ProcessKind.WORKER and self.fruitless_deaths == _FRUITLESS_DEATHS:
            raise RunError(
                f"group {self.index} died {self.fruitless_deaths} times without a batch in "
                f"between; the last time: {next(iter(dead.values()))}"
            )
        return bool(died)

    def kill(self) -> None:
        """Kill all actors without a report."""
        for actor in self.actors:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)

    def report(
        self, place: int, kind: EventKind, reason: str = "", batch: BatchKey | None = None
    ) -> None:
        """Report an event that concerns an actor."""
        where = self.where[place]
        pid, node = (where.pid, where.node) if where else (None, "")
        index = self.index * self.size + place
        report(Event(kind, self.kind, index, pid, node, reason, batch=batch))


@dataclass(eq=False)
class Group(Unit):
    """A group of workers, and the gradient that it computes.

    Attributes:
        lease: The batch that it has, if any. It loses it during a step if an update is made without
            its gradient.
        version: The version of the parameters with which it computes.
        busy: The number of members that compute.
        stepped: What the members found out in the step, by their places.
        gradients: Ray's references to the parts of the gradient, one for each server.
        first: Whether its next step is the first of an epoch.
        failure: The error of a member, which the death of another may explain, and its time.
    """

    lease: int | None = None
    version: int = -1
    busy: int = 0
    stepped: dict[int, Stepped] = field(default_factory=dict)
    gradients: list[Any] = field(default_factory=list)
    first: bool = True
    failure: tuple[Failure, float] | None = None

    @property
    def idle(self) -> bool:
        """Whether it can compute a batch."""
        return self.ready and not self.busy and self.lease is None

    @property
    def waiting(self) -> bool:
        """Whether its gradient exists and waits for an update."""
        return self.lease is not None and len(self.stepped) == self.size

    @property
    def computed(self) -> Computed:
        """What the members computed, in the order of the batch's samples."""
        parts = [self.stepped[place] for place in sorted(self.stepped)]
        return Computed(
            self.index,
            np.concatenate([part.losses for part in parts]),
            {
                name: np.concatenate([part.watched[name] for part in parts])
                for name in parts[0].watched
            },
        )

    def start(self) -> None:
        """Start the members, without a batch."""
        super().start()
        self.lease, self.busy, self.failure = None, 0, None
        self.stepped, self.gradients = {}, []

    def release(self) -> None:
        """End the lease: the batch was applied, or it is queued again."""
        self.lease = None
        self.gradients = []
