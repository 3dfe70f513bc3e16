"""RunTotals: what the epochs of a training cost, and a function that reports it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fineprune.errors import InputError
from fineprune.pruning.epoch import Epoch
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.step_counts import BatchShape

# Called with named numbers and the number of optimizer steps that they belong to.
Write = Callable[[dict[str, float], int], object]


@dataclass
class RunTotals:
    """The sums over the epochs that ended. They are part of the pruner's state.

    Attributes:
        epochs: Number of epochs.
        samples: Number of samples that these epochs trained.
        steps: Number of optimizer steps.
    """

    epochs: int = 0
    samples: int = 0
    steps: int = 0

    def add(self, epoch: Epoch, shape: BatchShape) -> None:
        """Add an epoch that has ended. Without records, it took the planned steps, if known."""
        self.epochs += 1
        self.samples += epoch.trained
        if epoch.batches:
            self.steps += -(-epoch.batches // shape.accumulation)
        elif shape.batch_size is not None:
            self.steps += shape.steps_of(epoch.trained)

    def skipped(self, num_samples: int) -> float:
        """Return the share of the sample-steps so far that was skipped, of N samples per epoch."""
        full = self.epochs * num_samples
        return (full - self.samples) / full if full else 0.0


def values_of(
    epoch: Epoch, totals: RunTotals, policy: Policy, num_samples: int
) -> dict[str, float]:
    """Return what is reported of an epoch that has just been added to the totals."""
    values = {
        "epoch": epoch.number,
        "skipped": (num_samples - epoch.trained) / num_samples,
        "saved": totals.skipped(num_samples),
        "suspects": policy.num_suspects(),
    }
    return {f"fineprune/{name}": value for name, value in values.items() if value is not None}


def as_writer(target: Any) -> Write:
    """Return a function that reports numbers to the argument ``log`` of a ``Pruner``."""
    add_scalar = getattr(target, "add_scalar", None)
    if add_scalar is not None:

        def write(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                add_scalar(name, value, step)

        return write
    if not callable(target):
        raise InputError(
            f"expected log as a callable(dict, step), such as wandb.log, or a SummaryWriter, got "
            f"{type(target).__name__}"
        )
    given: Write = target
    return given
