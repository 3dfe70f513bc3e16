"""EpochCycle: the one owner of an epoch's state: what was planned, recorded, restored and ended.

::

    follow ------> PLANNED --+
                             +-- begin --> RECORDING -- end --> ENDED
    restore -----> RESTORED -+

A plan that is followed replaces the current epoch, with one exception. Some trainers set every
earlier epoch once after a state was loaded. A restored epoch is therefore set aside while an
earlier one is shown, and it is taken up again when its turn comes.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from fineprune.errors import InputError, warn_user
from fineprune.interrupts import uninterrupted
from fineprune.pruning.loss_buffer import Batch
from fineprune.pruning.plan import EpochPlan

# How often the samples of an epoch are loaded before a warning, if none is recorded. Two passes may
# be for a look at the data.
_MOST_READS = 3


class Phase(enum.Enum):
    """What has happened to the current epoch."""

    PLANNED = "planned"  # Nothing was recorded.
    RESTORED = "restored"  # A loaded state has losses of it; this process has recorded none.
    RECORDING = "recording"  # This process has recorded losses.
    ENDED = "ended"  # It takes no more losses.


@dataclass
class Progress:
    """An epoch, and how much of it was recorded.

    Attributes:
        plan: The samples that the epoch trains on.
        planned: The number of samples with which the epoch is complete, counted as ``samples``.
        batches: Number of ``record`` calls so far, which is the same on every rank.
        samples: Number of samples that all ranks together recorded so far, so that the number of
            ranks may change.
        restored: Whether a part of it comes from a loaded state.
        trained: Whether that state has all batches of it, however large batches are now.
    """

    plan: EpochPlan
    planned: int
    batches: int = 0
    samples: int = 0
    restored: bool = False
    trained: bool = False

    @property
    def left(self) -> int:
        """The number of samples that are missing, counted as ``samples``."""
        return 0 if self.trained else max(self.planned - self.samples, 0)


class EpochCycle:
    """The state of the current epoch, and the transitions from one epoch to the next.

    Recorded batches wait in ``pending`` until they are counted, many at a time: when there are
    ``limit`` of them, and before anybody asks for the state.

    Attributes:
        pending: The batches of the current epoch that were not counted yet.
        limit: The number of batches that may be pending. It is 1 until the epoch has begun.
        count: The function that counts them.
        sampler_read, plan_read: Whether the loop has asked the sampler for indices of it, and
            whether it has read its plan; see ``read_sampler`` and ``read_plan``.
        named: Whether the user has named an epoch, so that the state of a loader names none.
        behind: The number of the first epoch behind all that have ended, here or before a loaded
            state was saved.
        from_first: Whether the user has named epoch 0.
        ended_here: Whether this process has ended an epoch.
    """

    # The first epoch sets these.
    limit: int
    sampler_read: bool
    plan_read: bool
    _times_read: int
    _current: Progress
    _most: float

    def __init__(self) -> None:
        self.pending: list[Batch] = []
        self.count: Callable[[list[Batch]], None]
        self._phase = Phase.PLANNED
        self.named = self.ended_here = self.from_first = False
        self.behind = 0
        self._aside: Progress | None = None
        self._driver: object | None = None

    def settle(self) -> None:
        """Count the batches that are pending."""
        if self.pending:
            with uninterrupted():
                batches = self.pending.copy()
                self.pending.clear()  # If a batch is wrong, it is not counted a second time.
                self.count(batches)

    @property
    def phase(self) -> Phase:
        """What has happened to the current epoch."""
        self.settle()
        return self._phase

    @property
    def current(self) -> Progress:
        """The current epoch. It is missing until ``follow`` or ``restore`` is called."""
        self.settle()
        return self._current

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._current.plan.epoch

    @property
    def is_open(self) -> bool:
        """Whether the current epoch has not ended."""
        return self.phase is not Phase.ENDED

    @property
    def unfinished(self) -> Progress | None:
        """The epoch that has losses and has not ended; None if there is none.

        It is the current one, unless it was restored and set aside.
        """
        has_losses = self.phase in (Phase.RESTORED, Phase.RECORDING)
        return self.current if has_losses else self._aside

    @property
    def next_epoch(self) -> int:
        """The epoch with which the training goes on; the number of epochs if all have ended."""
        if self.unfinished is not None:
            return self.unfinished.plan.epoch
        return self.epoch if self.is_open else self.epoch + 1

    @property
    def driven(self) -> bool:
        """Whether a loop, or ``start_epoch``, has the current epoch in progress."""
        return self._driver is not None

    @property
    def in_loop(self) -> bool:
        """Whether a loop over ``epochs()`` has the current epoch in progress."""
        return self.driven and self._driver is not self

    def drive(self, loop: object | None = None) -> None:
        """Give the current epoch to a loop over the epochs, or to the user of ``start_epoch``."""
        self._driver = self if loop is None else loop
        self.named = True

    def let_go(self, driver: object | None = None) -> None:
        """Take the current epoch back from this driver; from any driver if none is given."""
        if driver is None or driver is self._driver:
            self._driver = None

    def must_end_before(self, epoch: int) -> bool:
        """Return whether another epoch has losses and must end before ``epoch`` becomes current."""
        unfinished = self.unfinished
        if unfinished is None or unfinished.plan.epoch == epoch:
            return False
        return self.phase is Phase.RECORDING or epoch > unfinished.plan.epoch

    def follow(self, plan: EpochPlan, planned: int) -> None:
        """Make an epoch current of which nothing was recorded."""
        if self.phase is Phase.RESTORED:
            self._aside = self._current
        self._show(Progress(plan, planned), Phase.PLANNED)

    def take_up(self, epoch: int) -> bool:
        """Make an epoch current again if it was set aside; return whether it was."""
        if self._aside is None or self._aside.plan.epoch != epoch:
            return False
        self._show(self._aside, Phase.RESTORED)
        self._aside = None
        return True

    def restore(self, progress: Progress, phase: Phase) -> None:
        """Make the epoch of a loaded state current, and forget all others."""
        self.pending.clear()
        self._aside = None
        self.behind = progress.plan.epoch + (phase is Phase.ENDED)
        self._show(progress, phase)

    def begin(self, most: float) -> None:
        """Begin to record the current epoch, which takes at most so many samples in all."""
        self._phase = Phase.RECORDING
        self._most = most

    def begin_loop(self) -> None:
        """Note that a loop over the epochs begins, before which nothing may be recorded."""
        if self.phase is Phase.RECORDING and not self.named:
            raise InputError(
                f"expected no losses before the loop over the epochs, got those of "
                f"{self.current.batches} batches of epoch {self.epoch}, perhaps from a trial: make "
                f"a new Pruner for the training"
            )

    def read_sampler(self) -> None:
        """Note that the loop asks the sampler for indices."""
        if self.phase is Phase.RECORDING and not self.sampler_read and not self.plan_read:
            raise InputError(
                f"expected losses of the batches of epoch {self.epoch} only, got those of "
                f"{self.current.samples} samples before its first batch was loaded: make a new "
                f"Pruner, record no validation or trial batches, and let no framework keep one "
                f"iterator over several epochs (start it anew in each)"
            )
        self.sampler_read = True
        self._times_read += not self.named
        if self._times_read == _MOST_READS and self.phase is Phase.PLANNED:
            warn_user(
                f"the samples of epoch {self.epoch} were loaded {_MOST_READS} times without a new "
                f"epoch, so the same samples are trained each time: loop over pruner.epochs(), or "
                f"call pruner.set_epoch(epoch)"
            )
        self._limit()

    def read_plan(self) -> None:
        """Note that the loop reads the plan."""
        self.plan_read = True
        self._limit()

    def _limit(self) -> None:
        """Take no more samples if the loop begins a complete epoch anew."""
        if self.phase is Phase.RECORDING and self.current.samples >= self.current.planned:
            self._most = self.current.samples
            self.limit = 1

    def room(self) -> float:
        """Return how many more samples the current epoch takes."""
        return self._most - self._current.samples

    def add(self, samples: int) -> None:
        """Count a batch of the current epoch, with which so many more samples are recorded."""
        self._current.samples += samples
        self._current.batches += 1

    def end(self, progress: Progress) -> None:
        """End the current epoch or, if this is another one, the epoch that was set aside."""
        self._aside = None
        self.behind = max(self.behind, progress.plan.epoch + 1)
        if progress is self._current:
            self._phase = Phase.ENDED
            self._driver = None
            self.limit = 1
        self.ended_here = True

    def close(self) -> None:
        """End the current epoch, of which nothing was recorded, and keep the one set aside."""
        self._phase = Phase.ENDED

    def _show(self, progress: Progress, phase: Phase) -> None:
        self._current = progress
        self._phase = phase
        self.limit = 1
        self.sampler_read = self.plan_read = False
        self._times_read = 0
