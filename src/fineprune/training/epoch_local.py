"""Trains one epoch in this process, alone or together with other ranks by all-reduce."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fineprune.distributed.all_reduce import RankGroup
from fineprune.distributed.optimizer_rate import set_rate
from fineprune.training.learning_rate import rate_at
from fineprune.training.network import training_losses
from fineprune.training.parameter_prefixes import training_mode
from fineprune.training.recipe import Recipe
from fineprune.training.stop import StopRequest
from fineprune.training.train_state import EpochTotals, TrainState, build_local_parts, build_state


@contextlib.contextmanager
def local_training(
    recipe: Recipe,
    ranks: RankGroup,
    folder: Path,
    saved: dict[str, Any] | None,
    stop: StopRequest,
) -> Iterator[TrainState]:
    """Build a run that this process trains, alone or together with other ranks.

    Inside the block, torch uses the recipe's number of threads. The arguments are those of
    ``build_state``. Loading data may take minutes, so a signal ends it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(recipe.run.threads)
    try:
        with stop.at_once("before the first batch"):
            state = build_state(recipe, ranks, saved, folder)
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
    """Train the batches of an epoch, or the remaining ones after a resume.

    The totals are those of the batches trained so far, to which this function adds. ``save`` saves
    a checkpoint in the middle of the epoch.

    Returns:
        True after the last batch; False if the ranks stopped earlier, after an optimizer step.
    """
    training, run, local = state.recipe.training, state.recipe.run, state.local
    assert local is not None
    optimizer, pruner = local.optimizer, state.pruner
    records_logits = state.records_logits
    batches = len(local.loader)
    rate = -1.0
    training_mode(state.model, state.recipe.network.freeze)
    accumulation = state.recipe.accumulation
    # The rate of simulated workers follows the updates, like that of real ones.
    each = state.recipe.distributed.simulated_batches
    updates = totals.planned = -(-batches // each)
    if local.simulated and not totals.batches:
        local.simulated.begin_epoch(epoch)
    for index, (x, y) in local.loader:
        layout = torch.channels_last if x.ndim == 4 else torch.preserve_format
        x = x.to(run.device, memory_format=layout, non_blocking=True)
        y = y.to(run.device, non_blocking=True)
        new_rate = rate_at(training, epoch + totals.batches // each / updates)
        if new_rate != rate:
            rate = new_rate
            set_rate(optimizer, rate)
        # The last accumulation window of an epoch may have fewer batches. Its gradient is the mean
        # over the batches that it has.
        begin = totals.batches - (totals.batches - totals.first) % accumulation
        end = min(begin + accumulation, batches)
        window, step_follows = end - begin, totals.batches + 1 == end
        # The ranks average gradients only in the backward pass before an optimizer step.
        unsynchronised = state.ranks.size > 1 and not step_follows
        no_sync: Any = local.forward.no_sync if unsynchronised else contextlib.nullcontext
        with state.autocast, no_sync():
            logits = local.forward(x)
        losses = training_losses(logits, y, training)
        with totals.bookkeeping():
            if totals.history is not None:
                totals.history.add(index, losses, logits)
            # User-defined data may have probabilities in place of labels.
            watched = records_logits and y.ndim == 1
            loss = pruner.record(index, losses, *((logits, y) if watched else ()))
        totals.loss_sum += losses.detach().sum()
        totals.samples += len(y)
        totals.batches += 1
        if local.loader.broken is not None:
            totals.broken = (totals.broken or 0) + local.loader.broken.take_replaced()
        (loss / window if window > 1 else loss).backward()
        if not step_follows:
            continue
        if local.simulated:
            local.simulated.step(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad()
        if state.average is not None:
            state.average.update(state.model)
        if local.stop_vote.says_stop(bool(stop)):
            return False
        every = run.checkpoint_steps
        if every and end // every > begin // every:
            save(totals)
    if local.simulated:
        local.simulated.end_epoch()
    if local.loader.broken is not None:
        local.loader.broken.share(state.ranks.gather)
    return True
