"""EpochTotals: the sums over the batches of the epoch in progress on this rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fineprune.distributed.all_reduce import RankGroup
from fineprune.pruning.pruner import Pruner
from fineprune.training.learning_rate import rate_at
from fineprune.training.recipe import Recipe
from fineprune.training.sample_history import SampleHistory

# The loss is noted in so many parts of an epoch.
PARTS = 4

# What is the same on all ranks, or taken from the main one.
_SHARED = ("batches", "first", "steps", "seconds", "bookkeeping_seconds", "distributed")


@dataclass
class EpochTotals:
    """Sums over the batches of the epoch in progress on this rank; part of the checkpoint.

    Attributes:
        loss_sum: The sum of the losses in each part of the epoch; float32, shape (PARTS,), on the
            run's device.
        part_samples: The number of samples trained in each part. After a resume, those of before
            are on rank 0.
        batches: The number of batches trained; with parameter servers, the number of updates.
        first: The number of batches after which the windows of accumulation begin: 0, unless the
            number of ranks has changed within the epoch.
        steps: The number of optimizer steps before that.
        broken: The number of samples that replaced one whose file is broken; None if the data are
            not files, or with parameter servers.
        planned: The number of batches in the whole epoch, on which the learning rate depends.
        seconds: The wall-clock time of the training, in seconds.
        bookkeeping_seconds: The part of ``seconds`` that was spent on choosing samples and on
            recording losses.
        distributed: The report of the parameter servers; empty without them.
        history: The losses of the samples; None if the run does not keep them.
        started: The time at which the clock was last started, as ``time.perf_counter`` gives it.
    """

    loss_sum: torch.Tensor
    part_samples: list[int] = field(default_factory=lambda: [0] * PARTS)
    batches: int = 0
    first: int = 0
    steps: int = 0
    broken: int | None = None
    planned: int = 0
    seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    distributed: dict[str, Any] = field(default_factory=dict)
    history: SampleHistory | None = None
    started: float = field(default_factory=time.perf_counter)

    @property
    def samples(self) -> int:
        """The number of samples trained."""
        return sum(self.part_samples)

    def add(self, losses: torch.Tensor, batches: int) -> None:
        """Add the losses of a batch, shape (B,), of an epoch with so many batches."""
        part = min(self.batches * PARTS // batches, PARTS - 1)
        self.loss_sum[part] += losses.detach().sum()
        self.part_samples[part] += len(losses)
        self.batches += 1

    def mean_losses(self, ranks: RankGroup) -> tuple[float | None, list[float]]:
        """Return the mean loss of all ranks, and that of each part. A collective.

        They are None and empty if all batches were lost because a server failed.
        """
        sums = ranks.sum(self.loss_sum).tolist()
        counts = self._of_all_ranks(self.part_samples, ranks)
        parts = [loss / count for loss, count in zip(sums, counts, strict=True) if count]
        return (sum(sums) / sum(counts) if parts else None), parts

    def steps_so_far(self, accumulation: int) -> int:
        """Return the number of optimizer steps, that of an incomplete window included."""
        return self.steps - (self.first - self.batches) // accumulation

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
        state = {name: getattr(self, name) for name in _SHARED}
        state["loss_sum"] = ranks.sum(self.loss_sum)
        state["part_samples"] = self._of_all_ranks(self.part_samples, ranks)
        if self.broken is not None:
            state["broken"] = self.of_all_ranks(self.broken, ranks)
        if self.history is not None:
            state["history"] = self.history.merged(ranks)
        return state

    def load_state_dict(self, state: dict[str, Any], ranks: RankGroup) -> None:
        """Continue from the sums of all ranks, which rank 0 takes."""
        history = state.pop("history", None)
        if history is not None and self.history is not None:
            self.history.load(history)
        if not ranks.main:
            state |= {"loss_sum": self.loss_sum, "part_samples": [0] * PARTS}
            state |= {"broken": 0} if "broken" in state else {}
        device = self.loss_sum.device
        for name, value in state.items():
            setattr(self, name, value)
        self.loss_sum = self.loss_sum.to(device)

    def of_all_ranks(self, number: int, ranks: RankGroup) -> int:
        """Return the sum of a number over all ranks. A collective."""
        return self._of_all_ranks([number], ranks)[0]

    def metrics(
        self, recipe: Recipe, pruner: Pruner, ranks: RankGroup, epoch: int, loss: float | None
    ) -> dict[str, Any]:
        """Return the line of ``metrics.jsonl``, with no evaluation yet. Every rank must call it.

        If the policy weights the losses, ``mean_weight`` is the mean over the kept samples. With
        image files, ``broken`` is the number of samples that replaced one whose file is broken.
        ``loss`` is the mean loss in nats; None without a trained sample.
        """
        plan, number = pruner.plan, pruner.num_samples
        kept = plan.kept
        metrics: dict[str, Any] = {
            "epoch": epoch,
            "lr": rate_at(recipe.training, epoch + max(self.planned - 1, 0) / max(self.planned, 1)),
            "pruned": len(kept) < number,
            "samples": self.of_all_ranks(self.samples, ranks),
            "skipped": number - len(kept),
            "steps": self.steps_so_far(recipe.accumulation),
            "train_loss": loss,
            "nonfinite": pruner.nonfinite,
            "seconds": self.seconds,
            "bookkeeping_seconds": self.bookkeeping_seconds,
            "evaluate_seconds": 0.0,
        }
        names = [
            f"{kind}_{what}" for kind in ("test", "validation") for what in ("loss", "accuracy")
        ]
        metrics |= dict.fromkeys(names)
        if plan.weights is not None:
            metrics["mean_weight"] = plan.weights[kept].double().mean().item()
        if self.broken is not None:
            metrics["broken"] = self.of_all_ranks(self.broken, ranks)
        if self.distributed:
            metrics["distributed"] = self.distributed
        return metrics

    def _of_all_ranks(self, numbers: list[int], ranks: RankGroup) -> list[int]:
        added: list[int] = ranks.sum(torch.tensor(numbers, device=self.loss_sum.device)).tolist()
        return added
