"""One epoch trained in this process, alone or as one of several ranks that train by all-reduce."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fineprune.distributed.all_reduce import RankGroup
from fineprune.training.learning_rate import rate_at
from fineprune.training.network import training_losses
from fineprune.training.optimizer import set_rate
from fineprune.training.recipe import Recipe
from fineprune.training.stop import StopRequest
from fineprune.training.train_state import EpochTotals, TrainState, build_local_parts, build_state


@contextlib.contextmanager
def local_training(
    recipe: Recipe, ranks: RankGroup, folder: Path, saved: dict[str, Any] | None
) -> Iterator[TrainState]:
    """Build a run that is trained by this process and the other ranks, with torch's threads set.

    Args:
        recipe: As run.
        ranks: The processes that train together.
        folder: The run's folder; not used.
        saved: The checkpoint that the run goes on from; not used, since it is restored later.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(recipe.run.threads)
    try:
        state = build_state(recipe, ranks)
        state.local = build_local_parts(state)
        yield state
    finally:
        torch.set_num_threads(before)


def train_epoch_locally(
    state: TrainState,
    epoch: int,
    totals: EpochTotals,
    save: Callable[[EpochTotals], None],
    stop: StopRequest,
) -> bool:
    """Train the batches of an epoch, or the rest of them after a resume.

    Args:
        state: The run.
        epoch: The epoch, from 0; the pruner is at it.
        totals: What is known of the epoch so far; added to.
        save: Saves a checkpoint inside the epoch.
        stop: Whether this process was asked to stop.

    Returns:
        True after the last batch; False if the ranks stopped before, after an optimizer step.
    """
    training, run, local = state.recipe.training, state.recipe.run, state.local
    assert local is not None
    optimizer, pruner = local.optimizer, state.pruner
    batches = totals.planned = len(local.loader)
    rate = -1.0
    state.model.train()
    if local.simulated and not totals.batches:
        local.simulated.begin_epoch()
    for index, (x, y) in local.loader:
        x = _to_device(x, run.device)
        y = y.to(run.device, non_blocking=True)
        wanted = rate_at(training, epoch + totals.batches / batches)
        if wanted != rate:
            rate = wanted
            set_rate(optimizer, rate)
        ends_window = (totals.batches + 1) % training.accumulation == 0
        steps = ends_window or totals.batches + 1 == batches
        with state.autocast, _averaging(state, steps):
            logits = local.forward(x)
        losses = training_losses(logits, y, training)
        with totals.bookkeeping():
            loss = pruner.record(index, losses)
        totals.loss_sum += losses.detach().sum()
        totals.samples += len(y)
        totals.batches += 1
        # The last window of an epoch may be shorter; its gradient is the mean of what it has.
        window = min(training.accumulation, batches - _window_start(totals.batches, training))
        (loss / window if window > 1 else loss).backward()  # type: ignore[no-untyped-call]
        if not steps:
            continue
        if local.simulated:
            local.simulated.step(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad()
        if local.stop_vote.says_stop(bool(stop)):
            return False
        if run.checkpoint_steps and totals.batches % run.checkpoint_steps == 0:
            save(totals)
    if local.simulated:
        local.simulated.end_epoch()
    return True


def _averaging(state: TrainState, steps: bool) -> contextlib.AbstractContextManager[None]:
    """Let replicas average gradients only in the backward pass that a step follows."""
    assert state.local is not None
    if state.ranks.size == 1 or steps:
        return contextlib.nullcontext()
    return state.local.forward.no_sync()  # type: ignore[no-any-return, operator]


def _to_device(x: torch.Tensor, device: str) -> torch.Tensor:
    layout = torch.channels_last if x.ndim == 4 else torch.preserve_format
    return x.to(device, memory_format=layout, non_blocking=True)


def _window_start(batches: int, training: Any) -> int:
    start: int = (batches - 1) // training.accumulation * training.accumulation
    return start
