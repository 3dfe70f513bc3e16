"""EpochTotals: the sums over the batches of the epoch in progress on this rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fineprune.distributed.all_reduce import RankGroup
from fineprune.pruning.pruner import Pruner
from fineprune.training.learning_rate import rate_at
from fineprune.training.recipe import Recipe

# The loss is noted in so many parts of an epoch.
PARTS = 4

# What is the same on all ranks, or taken from the main one.
_SHARED = ("batches", "steps", "seconds", "bookkeeping_seconds", "distributed")


@dataclass
class EpochTotals:
    """Sums over the batches of the epoch in progress on this rank; part of the checkpoint.

    Attributes:
        loss_sum: The sum of the losses in each part of the epoch; float32, shape (PARTS,), on the
            run's device.
        history: The loss of each sample in the epoch; float16, shape (N,), on the run's device,
            -inf for a sample that was not trained. None if the run does not keep them.
        part_samples: The number of samples trained in each part; after a resume, those of before on
            rank 0.
        batches: The number of batches trained; with parameter servers, the number of updates.
        steps: The number of optimizer steps taken.
        broken: How many samples replaced one whose file is broken; None if no files are read here.
        planned: The number of batches in the whole epoch, on which the learning rate depends.
        seconds: The wall-clock time of the training, in seconds.
        bookkeeping_seconds: The part of it that choosing samples and recording losses took.
        distributed: The report of the parameter servers; empty without them.
        started: When the clock was last started, as ``time.perf_counter`` gives it.
    """

    loss_sum: Tensor
    history: Tensor | None = None
    part_samples: list[int] = field(default_factory=lambda: [0] * PARTS)
    batches: int = 0
    steps: int = 0
    broken: int | None = None
    planned: int = 0
    seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    distributed: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    _waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, index: Tensor, losses: Tensor, batches: int) -> None:
        """Add a batch of an epoch with so many batches, whose tensors must not change afterwards.

        Args:
            index: The indices of the samples; int64, shape (B,).
            losses: Their losses; float32, shape (B,).
            batches: The number of batches of the epoch.
        """
        losses, part = losses.detach(), min(self.batches * PARTS // batches, PARTS - 1)
        self.loss_sum[part] += losses.sum()
        self.part_samples[part] += len(losses)
        self.batches += 1
        if self.history is not None:
            self._waiting.append((index, losses))

    def mean_losses(self, ranks: RankGroup) -> tuple[float, list[float]]:
        """Return the mean loss of all ranks, and that of each part. A collective."""
        sums = ranks.sum(self.loss_sum).tolist()
        counts = self._of_all_ranks(self.part_samples, ranks)
        parts = [loss / count for loss, count in zip(sums, counts, strict=True) if count]
        return sum(sums) / sum(counts), parts

    def merged_history(self, ranks: RankGroup) -> Tensor | None:
        """Return the history of all ranks on the CPU. A collective.

        A sample that is trained twice has the loss of its last visit. A loss that is not finite, or
        too large for half precision, is infinity.
        """
        if self.history is None:
            return None
        if self._waiting:  # Each store has a fixed cost, so batches are stored together.
            index, losses = (
                torch.cat(parts).to(self.history.device)
                for parts in zip(*self._waiting, strict=True)
            )
            half = losses.half()
            self.history[index] = half.where(half.isfinite(), torch.inf)
            self._waiting = []
        return ranks.maximum(self.history).cpu()

    def stop_clock(self) -> None:
        """Add the time since the clock was started to ``seconds``, and start the clock again."""
        now = time.perf_counter()
        self.seconds += now - self.started
        self.started = now

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Add the time that the block takes to ``bookkeeping_seconds``."""
        began = time.perf_counter()
        yield
        self.bookkeeping_seconds += time.perf_counter() - began

    def state_dict(self, ranks: RankGroup) -> dict[str, Any]:
        """Return the sums of all ranks. A collective."""
        broken = None if self.broken is None else self._of_all_ranks([self.broken], ranks)[0]
        return {
            **{name: getattr(self, name) for name in _SHARED},
            "loss_sum": ranks.sum(self.loss_sum),
            "part_samples": self._of_all_ranks(self.part_samples, ranks),
            "broken": broken,
            "history": self.merged_history(ranks),
        }

    def load_state_dict(self, state: dict[str, Any], ranks: RankGroup) -> None:
        """Continue from the sums of all ranks, which rank 0 takes."""
        for name in _SHARED:
            setattr(self, name, state[name])
        if ranks.main:
            self.loss_sum.copy_(state["loss_sum"])
            self.part_samples, self.broken = state["part_samples"], state["broken"]
        if self.history is not None:
            self.history.copy_(state["history"])

    def metrics(
        self, recipe: Recipe, pruner: Pruner, ranks: RankGroup, epoch: int, loss: float
    ) -> dict[str, Any]:
        """Return the line of ``metrics.jsonl``, with no evaluation yet. Every rank must call it.

        ``loss`` is the mean loss in nats, and ``mean_weight`` that of the kept samples if the
        policy weights them.
        """
        plan, number = pruner.plan, pruner.num_samples
        kept, planned = plan.kept, max(self.planned, 1)
        samples, broken = self._of_all_ranks([sum(self.part_samples), self.broken or 0], ranks)
        metrics: dict[str, Any] = {
            "epoch": epoch,
            "lr": rate_at(recipe.training, epoch + (planned - 1) / planned),
            "pruned": len(kept) < number,
            "samples": samples,
            "skipped": number - len(kept),
            "steps": self.steps,
            "train_loss": loss,
            "nonfinite": pruner.nonfinite,
            "seconds": self.seconds,
            "bookkeeping_seconds": self.bookkeeping_seconds,
            "evaluate_seconds": 0.0,
            "test_loss": None,
            "test_accuracy": None,
            "validation_loss": None,
            "validation_accuracy": None,
        }
        if plan.weights is not None:
            metrics["mean_weight"] = plan.weights[kept].double().mean().item()
        if self.broken is not None:
            metrics["broken"] = broken
        if self.distributed:
            metrics["distributed"] = self.distributed
        return metrics

    def _of_all_ranks(self, numbers: list[int], ranks: RankGroup) -> list[int]:
        added: list[int] = ranks.sum(torch.tensor(numbers, device=self.loss_sum.device)).tolist()
        return added
