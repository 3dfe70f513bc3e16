"""BrokenFiles: which files could not be used, and whether there are too many of them."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fineprune.errors import RunError

_LOGGER = logging.getLogger(__name__)


class Broken(NamedTuple):
    """A file that could not be used: the index of its sample, where it is, and what is wrong."""

    sample: int
    path: str
    reason: str


class BrokenFiles:
    """Logs each broken file of a data set once, and ends the run if there are too many.

    Args:
        samples: The number of samples in the data set.
        limit: The largest share of them that may be broken. Unless it is 0, one file may always be.

    Attributes:
        replaced: How many samples of batches replaced a broken one; its reader adds to it.
    """

    def __init__(self, samples: int, limit: float) -> None:
        self._samples = samples
        self._allowed = max(1, int(limit * samples)) if limit else 0
        self._known: set[int] = set()
        self.replaced = 0

    def add(self, broken: Sequence[Broken], *, of_all: bool) -> None:
        """Take note of the broken files of a batch; ``of_all`` says that no other file is in it."""
        for file in broken:
            if file.sample not in self._known:
                self._known.add(file.sample)
                _LOGGER.warning("broken image %s: %s", file.path, file.reason)
        if broken:
            last = f"; the last one is {broken[-1].path}: {broken[-1].reason}"
            self._check(last)
            if of_all:
                raise RunError(f"all images of a batch are broken{last}")

    def take_replaced(self) -> int:
        """Return how many samples replaced a broken one since the last call."""
        replaced, self.replaced = self.replaced, 0
        return replaced

    def share(self, gather: Callable[[set[int]], list[set[int]]]) -> None:
        """Take note of what the other ranks know, each of which reads a part of the samples.

        ``gather``, a collective, returns the values of all ranks.
        """
        self._known = set().union(*gather(self._known))
        self._check("")

    def _check(self, last: str) -> None:
        if len(self._known) > self._allowed:
            raise RunError(
                f"{len(self._known)} of {self._samples} images are broken, and data.broken_limit "
                f"allows {self._allowed}{last}"
            )
