"""Algorithm 2 as pure integers: in which epochs are samples skipped, and when do counts clear?

The paper numbers epochs ``e = 1..E``; the public methods count ``epoch = e - 1`` from 0, as
PyTorch does. Nothing here depends on data, so everything about a schedule is known before the
training starts.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fineprune.errors import InputError

Attenuate = Literal["window", "epoch"]


@dataclass(frozen=True)
class Schedule:
    """When fine-pruning prunes ([P] section 4.3, Algorithm 2).

    Epoch ``e`` (from 1) prunes when ``position(e) >= start_e`` and ``e mod block < count``. The
    position is ``e mod window``; in general, the distance to the last boundary at or before ``e``.
    Counts are cleared at the end of every boundary epoch.

    Args:
        epochs: length of the training, in epochs.
        window: epochs in a window; or the lengths of the windows one after another, of which the
            last repeats to the end of the training.
        start: the paper's StartingPoint, the position in the window from which it may prune; or
            one for each window, before attenuation.
        attenuation: the start becomes ``int(start / attenuation)`` again and again; at least 1.
        block: the paper's PruningBlock, in epochs.
        count: the paper's PruningCount, the epochs in each block that prune; 0 prunes never.
        attenuate: ``"window"`` attenuates once for each window after the first (the paper's
            text), ``"epoch"`` once for each epoch after the first window (its listing, literally).
        opened: epochs ``e`` (from 1) whose end was made a boundary while they trained; see
            ``open_window``.

    Raises:
        InputError: a value is out of range.
    """

    epochs: int
    window: int | tuple[int, ...]
    start: int | tuple[int, ...]
    attenuation: float = 1.0
    block: int = 1
    count: int = 1
    attenuate: Attenuate = "window"
    opened: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_integer("epochs", self.epochs, least=1)
        windows = self.window if isinstance(self.window, Sequence) else (self.window,)
        starts = self.start if isinstance(self.start, Sequence) else (self.start,) * len(windows)
        if not windows or len(starts) != len(windows):
            raise InputError(
                f"expected one start for each of the {len(windows)} windows (at least one), "
                f"got window={self.window!r} and start={self.start!r}"
            )
        for length in windows:
            _check_integer("window", length, least=1)
        for start in starts:
            _check_integer("start", start, least=0)
        _check_integer("block", self.block, least=1)
        _check_integer("count", self.count, least=0)
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
        # One form for one schedule, so that equal schedules compare equal.
        while len(windows) > 1 and (windows[-1], starts[-1]) == (windows[-2], starts[-2]):
            windows, starts = windows[:-1], starts[:-1]
        constant = len(windows) == 1
        object.__setattr__(self, "window", windows[0] if constant else tuple(windows))
        object.__setattr__(self, "start", starts[0] if constant else tuple(starts))

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
        """Make the windows from the epochs after which the learning rate falls ([P] section 4.3).

        Every interval of length L between milestones is cut into m windows at ``round(j*L/m)``.
        The end of the training closes the last interval; but where the milestones are evenly
        spaced and the rest is shorter than their spacing, the last interval counts as a whole one
        that the end cuts short, so that ``from_milestones(E, [W, 2 * W, ...])`` equals
        ``Schedule(E, W, ...)`` for every E.

        Args:
            epochs: length of the training, in epochs.
            milestones: epochs from 1, rising, after which the rate falls, as ``MultiStepLR`` has
                them; those at the training's end or beyond never come.
            windows_per_interval: m, the number of windows between two milestones.
            start: the start as a share of each window, from 0 to 1.
            attenuation, block, count, attenuate: as in ``Schedule``.

        Raises:
            InputError: milestones that do not rise, or more windows than epochs in an interval.
        """
        _check_integer("epochs", epochs, least=1)
        _check_integer("windows_per_interval", windows_per_interval, least=1)
        milestones = list(milestones)
        for milestone in milestones:
            _check_integer("milestones", milestone, least=1)
        if any(a >= b for a, b in itertools.pairwise(milestones)):
            raise InputError(f"expected milestones that rise, got {milestones}")
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
        # The small addend keeps a share such as 49 * (1 / 49) from losing an epoch to rounding.
        starts = tuple(math.floor(start * length + 1e-9) for length in windows)
        return cls(epochs, tuple(windows), starts, attenuation, block, count, attenuate)

    @functools.cached_property
    def boundaries(self) -> tuple[int, ...]:
        """The epochs ``e`` (from 1, rising, up to ``epochs``) at whose end counts are cleared."""
        lengths = self.window if isinstance(self.window, tuple) else (self.window,)
        ends: list[int] = []
        end = 0
        for length in itertools.chain(lengths, itertools.repeat(lengths[-1])):
            end += length
            if end > self.epochs:
                return tuple(ends)
            ends.append(end)
        raise AssertionError("unreachable: the last window repeats for ever")

    @property
    def longest_window(self) -> int:
        """Length of the longest window in epochs, the largest count that a sample can reach."""
        return max(self.window) if isinstance(self.window, tuple) else self.window

    def prunes(self, epoch: int) -> bool:
        """Say whether ``epoch`` (from 0) skips samples.

        Raises:
            InputError: the epoch is outside the schedule.
        """
        e = self._number(epoch)
        # An epoch that became a boundary while it trained had been decided on before.
        position = self._position(e - 1) + 1 if e in self.opened else self._position(e)
        return position >= self._start(e) and e % self.block < self.count

    def clears(self, epoch: int) -> bool:
        """Say whether the counts are cleared at the end of ``epoch`` (from 0).

        Raises:
            InputError: the epoch is outside the schedule.
        """
        return self._position(self._number(epoch)) == 0

    def pruned_epochs(self) -> int:
        """Count the epochs that prune, by walking Algorithm 2 (exact, unlike formulas 3 and 4)."""
        return sum(self.prunes(epoch) for epoch in range(self.epochs))

    def open_window(self, epoch: int) -> "Schedule":
        """Return this schedule with a boundary at the end of ``epoch`` (from 0).

        For rates that fall while training (a plateau scheduler): the paper lets the window change
        during the training. Neither the epoch itself nor one before it is decided anew; the window
        that the new boundary cuts gives its length and start to those that follow.

        Raises:
            InputError: the epoch is outside the schedule.
        """
        e = self._number(epoch)
        if self._position(e) == 0:
            return self
        earlier = [b for b in self.boundaries if b < e]
        lengths = [b - a for a, b in itertools.pairwise([0, *earlier, e])]
        starts = [self._window_value(self.start, i) for i in range(len(lengths))]
        tail = range(len(lengths) - 1, max(len(lengths), self._listed_windows()))
        lengths += [self._window_value(self.window, i) for i in tail]
        starts += [self._window_value(self.start, i) for i in tail]
        opened = (*self.opened, e)
        return replace(self, window=tuple(lengths), start=tuple(starts), opened=opened)

    def _number(self, epoch: int) -> int:
        if not 0 <= epoch < self.epochs:
            raise InputError(
                f"expected an epoch in 0..{self.epochs - 1}, got {epoch}: "
                f"make the schedule as long as the training"
            )
        return epoch + 1

    def _position(self, e: int) -> int:
        reached = bisect.bisect_right(self.boundaries, e)
        return e - (self.boundaries[reached - 1] if reached else 0)

    def _start(self, e: int) -> int:
        passed = bisect.bisect_left(self.boundaries, e)  # boundaries before e, so kW is still k - 1
        start = self._window_value(self.start, passed)
        if self.attenuate == "window":
            times = passed
        else:
            times = max(0, e - self._window_value(self.window, 0))
        return _attenuated(start, self.attenuation, times)

    def _listed_windows(self) -> int:
        return len(self.window) if isinstance(self.window, tuple) else 1

    @staticmethod
    def _window_value(value: int | tuple[int, ...], window: int) -> int:
        return value[min(window, len(value) - 1)] if isinstance(value, tuple) else value


def _attenuated(start: int, attenuation: float, times: int) -> int:
    for _ in range(times):
        reduced = int(start / attenuation)
        if reduced == start:
            break
        start = reduced
    return start


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"expected {name} to be whole numbers of at least {least}, got {value!r}")
