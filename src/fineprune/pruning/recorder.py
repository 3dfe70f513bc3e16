"""Recorder: keeps what ``record`` is given, and reduces it to one value per sample.

The losses of each batch are copied at once and stay on their device. When they are needed (at the
end of the epoch, and for a state), the mean of each batch is taken over all ranks, and the losses
become one value per sample. One more reduction gives every rank those of all.
"""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.interrupts import uninterrupted
from fineprune.pruning.dropping_count import batch_means, batch_sums
from fineprune.pruning.epoch import Epoch
from fineprune.pruning.policies.policy import Losses, Marks, Means, Policy
from fineprune.pruning.replicas import Replicas

# A single process reduces the losses when about so many wait (48 MB), however many samples an epoch
# has. The host waits for the device each time.
_REDUCE_AT = 1 << 22


class Recorder:
    """Keeps the losses of the epoch in progress, as far as the policy needs them.

    ``nonfinite`` is the number of NaN or infinite ones of all ranks, as of the last reduction.
    """

    def __init__(self, policy: Policy, replicas: Replicas, num_samples: int) -> None:
        self._policy = policy
        self._replicas = replicas
        self._num_samples = num_samples
        self._needed = policy.learns_from_losses
        self.clear()

    def clear(self) -> None:
        """Forget everything that was recorded."""
        self.nonfinite = 0
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._number = self._waiting = 0  # The batches and the losses that were not reduced.
        self._with_logits = False
        # One value per sample that was reduced already.
        self._losses: Losses | None = None
        self._marks: Marks | None = None

    @property
    def reduced(self) -> bool:
        """Whether nothing waits to be reduced."""
        return not self._number

    def add(
        self,
        epoch: Epoch,
        index: torch.Tensor,
        numbers: npt.NDArray[np.integer] | None,
        losses: torch.Tensor,
        covered: int,
        *,
        with_logits: bool,
    ) -> bool:
        """Copy a batch, integers and floating-point losses, shape (B,) each, and count it.

        ``numbers`` are the indices if they are on the CPU, and were checked. ``covered`` is how far
        the batch brings the epoch, in samples of all ranks. Return whether so much waits that a
        single process should reduce it, so that it takes little memory.
        """
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        waiting = 0
        if self._needed or numbers is None:
            kept = losses.detach().to(torch.float32, copy=True)
            copied, waiting = [(index.to(torch.int64, copy=True), kept)], len(index)
        left = None if numbers is None or not epoch.once else epoch.left
        # From here on, nothing is called, so Ctrl-C cannot stop it half-way: a batch is recorded
        # and counts, or neither.
        self._batches += copied
        self._number += 1
        self._waiting += waiting
        self._with_logits |= with_logits
        epoch.batches += 1
        epoch.done += covered
        if left is not None:
            left[numbers] = False
        return self._waiting >= _REDUCE_AT and self._replicas.size == 1

    @uninterrupted()
    def reduce(self, epoch: Epoch) -> None:
        """Turn the losses that wait into one value per sample; all ranks must call this.

        Raises:
            InputError: An index on a device is wrong, or the ranks record different things.
        """
        self._check_ranks(epoch)
        batches, self._batches = self._batches, []
        self._number = self._waiting = 0
        if not batches:
            return
        index, losses, sizes = _on_host(batches)
        unchecked = [not one.is_cpu for one, _ in batches]
        if any(unchecked):
            parts = np.split(index, np.cumsum(sizes)[:-1])
            for numbers in itertools.compress(parts, unchecked):
                epoch.check(numbers)
                if epoch.once and epoch.left is not None:
                    epoch.left[numbers] = False
        if not self._needed:
            return
        sums = self._replicas.sum(batch_sums(losses, sizes))
        self.nonfinite += int(sums[:, 2].sum())
        self._add_up(index, losses, np.repeat(batch_means(sums), sizes))
        self._merge()

    def per_sample(self) -> tuple[Losses | None, Marks | None]:
        """Return the losses and the marks of the epoch, as ``Policy.learn`` receives them."""
        losses, marks, number = self._losses, self._marks, self._num_samples
        if self._policy.needs_losses and losses is None:
            losses = np.full(number, np.nan, dtype=np.float32)
        if self._policy.needs_marks and marks is None:
            marks = np.zeros(number, dtype=np.bool_)
        return losses, marks

    def state_dict(self) -> dict[str, Any]:
        """Return what was reduced of the epoch in progress."""
        losses, marks = self._losses, self._marks
        return {
            "nonfinite": self.nonfinite,
            "losses": None if losses is None else torch.from_numpy(losses.copy()),
            "marks": None if marks is None else torch.from_numpy(np.packbits(marks)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of ``state_dict``."""
        self.clear()
        self.nonfinite = state["nonfinite"]
        losses, marks = state["losses"], state["marks"]
        self._losses = None if losses is None else losses.numpy().copy()
        if marks is not None:
            bits = np.unpackbits(marks.numpy(), count=self._num_samples)
            self._marks = bits.view(np.bool_)

    def _check_ranks(self, epoch: Epoch) -> None:
        """Raise the same InputError on all ranks unless they record alike."""
        if self._replicas.size > 1:
            record = "call pruner.record(index, losses, logits, labels) on every rank or on none"
            every = "record every batch of the loader on every rank, also one without a step"
            select = "let select() draw from its argument rng only"
            self._replicas.check_equal(
                {
                    "epoch": (epoch.number, "loop over pruner.epochs() on every rank"),
                    "plan": (epoch.plan.fingerprint, select),
                    "number of batches": (self._number, every),
                    "kind of records": (self._with_logits, record),
                }
            )

    def _add_up(self, index: npt.NDArray[np.int64], losses: Losses, means: Means) -> None:
        self._losses, self._marks = self.per_sample()
        if self._losses is not None:
            self._losses[index] = np.where(np.isfinite(losses), losses, np.float32(np.inf))
        if self._marks is not None:
            self._marks[index[self._policy.exceeds(losses, means)]] = True

    def _merge(self) -> None:
        """Give every rank the values of all: the largest loss of each sample, and any mark."""
        if self._replicas.size == 1:
            return
        parts = []
        if self._losses is not None:
            parts.append(np.where(np.isnan(self._losses), np.float32(-np.inf), self._losses))
        if self._marks is not None:
            parts.append(self._marks.astype(np.float32))
        merged = list(self._replicas.maximum(np.stack(parts)))
        if self._marks is not None:
            self._marks = merged.pop() > 0
        if self._losses is not None:
            self._losses = np.where(np.isneginf(merged[0]), np.float32(np.nan), merged[0])


def _on_host(
    batches: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[npt.NDArray[np.int64], Losses, npt.NDArray[np.int64]]:
    """Return the indices and losses of batches, one after the other, and the size of each batch.

    This waits for the device.
    """
    sizes = np.array([len(losses) for _, losses in batches], dtype=np.int64)
    index, losses = (
        torch.cat([part.to(parts[0].device) for part in parts]).cpu().numpy()
        for parts in zip(*batches, strict=True)
    )
    return index, losses, sizes
