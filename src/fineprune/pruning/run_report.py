"""RunReport: what a training has cost so far, and where this is reported."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fineprune.errors import InputError, check_one_of
from fineprune.labels.dataset_attributes import classes_of
from fineprune.labels.label_watch import LabelWatch
from fineprune.pruning.step_counts import StepCounts

# Number of samples that a summary lists as the most suspicious.
_SUSPECTS = 10

# Called with named numbers and the number of optimizer steps (or epochs) that they belong to.
Write = Callable[[dict[str, float], int], object]


@dataclass
class RunTotals:
    """The sums over the epochs that ended. They are part of the pruner's state.

    Attributes:
        epochs: Number of epochs that were trained.
        samples: Number of samples that these epochs trained.
        batches: Number of ``record`` calls of this rank.
        steps: Number of optimizer steps.
        extra: How many of them are not planned, since an epoch was in progress when the size of a
            step changed.
    """

    epochs: int = 0
    samples: int = 0
    batches: int = 0
    steps: int = 0
    extra: int = 0


class RunReport:
    """Adds up what the epochs of a training cost, and reports it.

    Args:
        counts: Those of the ``Pruner``.
        dataset: The data set, which may name the classes; None if there is none.

    Attributes:
        totals: The sums over the epochs that ended.
    """

    def __init__(self, counts: StepCounts, dataset: Any) -> None:
        self.totals = RunTotals()
        self._counts = counts
        self._policy = counts.policy
        self._num_samples = counts.num_samples
        self._shape = counts.shape
        self._dataset = dataset
        self._seconds = self._seconds_written = 0.0
        self._writers: list[tuple[Write, bool]] = []

    @property
    def skipped(self) -> float:
        """The share of the sample-steps so far that was skipped."""
        full = self.totals.epochs * self._num_samples
        return (full - self.totals.samples) / full if full else 0.0

    @contextlib.contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Time the work of choosing samples and ending epochs."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began

    def add_epoch(self, trained: int, batches: int) -> None:
        """Add an epoch that trained so many samples, in the batches that this rank recorded.

        If it recorded none, it took the planned steps, as far as these are known.
        """
        steps = math.ceil(batches / self._shape.accumulation)
        if not batches and self._shape.batch_size is not None:
            steps = self._shape.steps_of(trained)
        self.totals.epochs += 1
        self.totals.samples += trained
        self.totals.batches += batches
        self.totals.steps += steps

    def add_writer(self, target: Any, by: str) -> None:
        """Report each epoch to ``target``; see ``Pruner.log``."""
        check_one_of("by", by, ("steps", "epochs"))
        self._writers.append((as_writer(target), by == "steps"))

    def write(self, epoch: int, trained: int) -> None:
        """Report an epoch that has just been added."""
        if not self._writers:
            return
        overhead = self._seconds - self._seconds_written
        self._seconds_written = self._seconds
        values = {
            "epoch": epoch,
            "skipped": (self._num_samples - trained) / self._num_samples,
            "saved": self.skipped,
            "overhead_seconds": overhead,
            "suspects": self._policy.num_suspects(),
        }
        known = {f"fineprune/{name}": value for name, value in values.items() if value is not None}
        for write, by_steps in self._writers:
            write(dict(known), self.totals.steps if by_steps else self.totals.epochs)

    def summary(self, batches: int, steps_done: int, watch: LabelWatch | None) -> dict[str, Any]:
        """Return the summary of ``Pruner.summary``.

        Args:
            batches: Number of batches that this rank has recorded of the epoch in progress.
            steps_done: Number of optimizer steps so far.
            watch: The evidence on the labels, if logits are recorded.
        """
        suspects, facts = self._findings(watch)
        planned = self._counts.known_steps()
        return {
            "policy": self._policy.name,
            "epochs": self._policy.epochs,
            "epochs_done": self.totals.epochs,
            "skipped": self.skipped,
            "predicted_saving": self._counts.predicted_saving(),
            "steps": steps_done,
            "total_steps": None if planned is None else planned + self.totals.extra,
            "record_calls": self.totals.batches + batches,
            "bookkeeping_seconds": self._seconds,
            "suspects": suspects,
            "facts": facts,
        }

    def _findings(self, watch: LabelWatch | None) -> tuple[list[int], list[str]]:
        """Return the first suspects and the facts; both are empty if nothing is known."""
        policy = self._policy
        suspects: list[int] = []
        facts: list[str] = []
        if watch is not None:
            try:
                names = classes_of(self._dataset, watch.num_classes)
            except InputError:  # A page says it.
                names = None
            suspects, facts = watch.so_far(_SUSPECTS, names)
        values = None if suspects else policy.suspicion()
        if values is not None:
            order = values.nan_to_num(0.0).argsort(descending=True, stable=True)[:_SUSPECTS]
            suspects = order[values[order] > 0].tolist()  # A count of 0 suspects nothing.
        return suspects, facts


def as_writer(target: Any) -> Write:
    """Return a function that reports numbers to the ``target`` of ``Pruner.log``."""
    add_scalar = getattr(target, "add_scalar", None)
    if add_scalar is not None:

        def write(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                add_scalar(name, value, step)

        return write
    if not callable(target):
        raise InputError(
            f"expected a callable(dict, step), such as wandb.log, or a SummaryWriter, got "
            f"{type(target).__name__}"
        )
    given: Write = target
    return given
