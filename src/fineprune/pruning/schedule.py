"""Algorithm 2 in integer arithmetic: which epochs skip samples, and when the counts are cleared.

The paper numbers epochs ``e = 1..E``. The public methods count ``epoch = e - 1`` from 0, as PyTorch
does. A schedule does not depend on data, so it is known completely before the training starts.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fineprune.errors import InputError, check_whole_number

Attenuate = Literal["window", "epoch"]


@dataclass(frozen=True)
class Schedule:
    """Says which epochs prune and when the counts are cleared (the paper's Algorithm 2).

    Epoch ``e`` (counted from 1) prunes if ``position(e) >= start_e`` and ``e mod block < count``.
    The position is ``e mod window``: in general, the distance to the last boundary at or before
    ``e``. The counts are cleared at the end of every boundary epoch.

    Args:
        epochs: Number of training epochs.
        window: Number of epochs per window, or a tuple of the lengths of successive windows, the
            last of which is repeated.
        start: The paper's StartingPoint: the position in the window from which on epochs may prune.
            A tuple gives one for each window.
        attenuation: The factor, at least 1, by which the start is reduced: each time, it becomes
            ``int(start / attenuation)``.
        block: The paper's PruningBlock, in epochs.
        count: The paper's PruningCount: the number of epochs per block that prune.
        attenuate: When the start is reduced: ``"window"`` for once per window after the first (the
            text of the paper), ``"epoch"`` for once per epoch after the first window (its listing,
            read literally).

    Raises:
        InputError: A value is out of range.
    """

    epochs: int
    window: int | tuple[int, ...]
    start: int | tuple[int, ...]
    attenuation: float = 1.0
    block: int = 1
    count: int = 1
    attenuate: Attenuate = "window"

    def __post_init__(self) -> None:
        check_whole_number("epochs", self.epochs, 1)
        windows = self.window if isinstance(self.window, Sequence) else (self.window,)
        starts = self.start if isinstance(self.start, Sequence) else (self.start,) * len(windows)
        if not windows or len(starts) != len(windows):
            raise InputError(
                f"expected one start for each of the {len(windows)} windows (at least one), "
                f"got window={self.window!r} and start={self.start!r}"
            )
        for length in windows:
            check_whole_number("window", length, 1)
        for start in starts:
            check_whole_number("start", start, 0)
        check_whole_number("block", self.block, 1)
        check_whole_number("count", self.count, 0)
        if self.count > self.block:
            raise InputError(
                f"expected count (pruning epochs in a block) of at most block, "
                f"got count={self.count} and block={self.block}"
            )
        if not (math.isfinite(self.attenuation) and self.attenuation >= 1):
            raise InputError(
                f"expected attenuation to be a finite number of at least 1, got {self.attenuation}"
            )
        if self.attenuate not in ("window", "epoch"):
            raise InputError(f'expected attenuate="window" or "epoch", got {self.attenuate!r}')
        # Equal schedules must compare equal, so equal windows at the end are stored only once.
        while len(windows) > 1 and (windows[-1], starts[-1]) == (windows[-2], starts[-2]):
            windows, starts = windows[:-1], starts[:-1]
        for name, values in (("window", windows), ("start", starts)):
            object.__setattr__(self, name, tuple(values) if len(values) > 1 else values[0])

    @classmethod
    def from_milestones(
        cls,
        epochs: int,
        milestones: Sequence[int],
        windows_per_interval: int = 1,
        *,
        start: float = 0.5,
        attenuation: float = 1.0,
        block: int = 1,
        count: int = 1,
        attenuate: Attenuate = "window",
    ) -> "Schedule":
        """Make the windows from the epochs after which the learning rate falls.

        Each interval of length L between milestones is cut into m windows at ``round(j*L/m)``. The
        last interval ends with the training; but if it is shorter than evenly spaced ones before,
        it is a full one that the training does not complete. Thus,
        ``from_milestones(E, [W, 2 * W, ...])`` equals ``Schedule(E, W, ...)`` for every E.

        Args:
            epochs: Number of training epochs.
            milestones: The epochs (counted from 1, ascending) after which the rate falls, as in
                ``MultiStepLR``. The first one beyond the training ends the last interval.
            windows_per_interval: Number m of windows between two milestones.
            start: The start as a share of each window, in [0, 1].
            attenuation, block, count, attenuate: As in ``Schedule``.

        Raises:
            InputError: A value is out of range, the milestones do not ascend, or an interval has
                fewer epochs than windows.
        """
        check_whole_number("epochs", epochs, 1)
        check_whole_number("windows_per_interval", windows_per_interval, 1)
        milestones = list(milestones)
        for milestone in milestones:
            check_whole_number("milestones", milestone, 1)
        if any(a >= b for a, b in itertools.pairwise(milestones)):
            raise InputError(f"expected milestones in ascending order, got {milestones}")
        if not 0 <= start <= 1:
            raise InputError(f"expected start as a share of each window in [0, 1], got {start}")
        ends = [0, *milestones]
        lengths = [b - a for a, b in itertools.pairwise(ends) if a < epochs]
        rest = epochs - ends[-1]
        if rest > 0:
            evenly = len(set(lengths)) == 1 and rest < lengths[0]
            lengths.append(lengths[0] if evenly else rest)
        if windows_per_interval > min(lengths):
            raise InputError(
                f"expected at most {min(lengths)} windows_per_interval, the epochs of the shortest "
                f"interval between milestones, got {windows_per_interval}"
            )
        windows: list[int] = []
        for length in lengths:
            cuts = [
                round(j * length / windows_per_interval) for j in range(windows_per_interval + 1)
            ]
            windows += [b - a for a, b in itertools.pairwise(cuts)]
        # The small addend prevents 49 * (1 / 49) = 0.9999999999999999 from losing an epoch.
        starts = tuple(math.floor(start * length + 1e-9) for length in windows)
        return cls(epochs, tuple(windows), starts, attenuation, block, count, attenuate)

    @functools.cached_property
    def boundaries(self) -> tuple[int, ...]:
        """The epochs ``e`` (counted from 1, ascending) at whose end the counts are cleared."""
        lengths = _as_tuple(self.window)
        ends = itertools.accumulate(itertools.chain(lengths, itertools.repeat(lengths[-1])))
        return tuple(itertools.takewhile(lambda end: end <= self.epochs, ends))

    @property
    def longest_window(self) -> int:
        """Length of the longest window in epochs, which is the largest possible count."""
        return max(_as_tuple(self.window))

    def prunes(self, epoch: int) -> bool:
        """Return whether ``epoch`` (counted from 0) skips samples; InputError: there is no such."""
        e = self._number(epoch)
        return self._position(e) >= self._start(e) and e % self.block < self.count

    def clears(self, epoch: int) -> bool:
        """Return whether the counts are cleared at the end of ``epoch`` (counted from 0)."""
        return self._position(self._number(epoch)) == 0

    def pruned_epochs(self) -> int:
        """Return how many epochs prune, by stepping through Algorithm 2 (formulas 3, 4: exact)."""
        return sum(self.prunes(epoch) for epoch in range(self.epochs))

    def _number(self, epoch: int) -> int:
        check_epoch(epoch, self.epochs)
        return epoch + 1

    def _position(self, e: int) -> int:
        reached = bisect.bisect_right(self.boundaries, e)
        return e - (self.boundaries[reached - 1] if reached else 0)

    def _start(self, e: int) -> int:
        passed = bisect.bisect_left(self.boundaries, e)  # The boundary kW is in window k - 1.
        times = passed
        if self.attenuate == "epoch":
            times = max(0, e - _of_window(self.window, 0))
        return _attenuated(_of_window(self.start, passed), self.attenuation, times)


def _as_tuple(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def _of_window(value: int | tuple[int, ...], window: int) -> int:
    """Return the value of a window, of which the last one is repeated."""
    values = _as_tuple(value)
    return values[min(window, len(values) - 1)]


def _attenuated(start: int, attenuation: float, times: int) -> int:
    for _ in range(times):
        reduced = int(start / attenuation)
        if reduced == start:
            break
        start = reduced
    return start


def check_epoch(epoch: int, epochs: int) -> None:
    """Raise InputError if ``epoch`` (counted from 0) is not one of the training's ``epochs``."""
    if not 0 <= epoch < epochs:
        raise InputError(
            f"expected an epoch in 0..{epochs - 1}, got {epoch}: count epochs from 0, and make "
            f"the schedule as long as the training"
        )
