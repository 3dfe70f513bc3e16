"""When gradients make an update: the one rule of all strategies. It knows neither Ray nor clocks.

The driver of real servers and simulated workers use it (Campos et al., ICCS 2017, section 5; backup
workers: Chen et al., 2016). The *version* of the parameters is the number of updates so far. The
*staleness* of a gradient is the number of updates between the read of its parameters and its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Gradient(Protocol):
    """A gradient that is computed, or waits for its update."""

    @property
    def version(self) -> int:
        """The version of the parameters that its worker has read."""
        ...


_Gradient = TypeVar("_Gradient", bound=Gradient)


@dataclass(frozen=True)
class UpdateRule:
    """When gradients make an update.

    Attributes:
        quorum: Synchronous: an update averages so many gradients of the current version, and all
            later ones of this version are discarded. None: asynchronous, each gradient is an update
            of its own.
        bound: The largest staleness of an asynchronous gradient; None for no bound.
    """

    quorum: int | None = None
    bound: int | None = None

    def may_start(self, in_flight: int) -> bool:
        """Return whether a worker may read the parameters, with so many gradients in flight.

        These are computed, or wait for their update.
        """
        return self.bound is None or in_flight <= self.bound

    def next_update(
        self,
        waiting: Sequence[_Gradient],
        computing: Sequence[_Gradient],
        version: int,
        remaining: int,
    ) -> list[_Gradient]:
        """Return the gradients of the next update; empty if it has to wait.

        Args:
            waiting: The complete gradients, in the order of their arrival.
            computing: The gradients that are still computed, by workers that are alive.
            version: The current version of the parameters.
            remaining: The number of gradients that the epoch still needs.
        """
        if self.quorum is not None:
            fresh = [gradient for gradient in waiting if gradient.version == version]
            number = min(self.quorum, remaining)
            return fresh[:number] if len(fresh) >= number else []
        for gradient in waiting:
            others = sorted(one.version for one in (*waiting, *computing) if one is not gradient)
            # After this update, the others can still keep the bound, the stalest one first.
            if self.bound is None or all(
                read + self.bound >= version + 1 + place for place, read in enumerate(others)
            ):
                return [gradient]
        return []
