"""The training loop, which trains a recipe and writes the run's folder."""

import contextlib
import functools
import logging
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fineprune.distributed.all_reduce import joined
from fineprune.errors import Stopped, check_installed
from fineprune.runs.files import read_metrics
from fineprune.runs.folder import RunFolder
from fineprune.runs.lock import only_writer
from fineprune.runs.summary import Summary, write_summary
from fineprune.training.checkpoint import save_checkpoint
from fineprune.training.epoch_local import local_training, train_epoch_locally
from fineprune.training.epoch_metrics import end_of_epoch, epoch_metrics, write_epoch
from fineprune.training.epoch_served import (
    check_can_serve,
    load_from_servers,
    served_training,
    train_epoch_on_servers,
)
from fineprune.training.hardware import resolved, wait_for
from fineprune.training.random_state import seeded
from fineprune.training.recipe import Recipe
from fineprune.training.resume import checkpoint_of, finished_summary, recipe_of
from fineprune.training.stop import StopRequest, stop_requests
from fineprune.training.summary import summary
from fineprune.training.tensorboard import event_file
from fineprune.training.train_state import EpochTotals, TrainState, checkpoint_state, restore

_LOGGER = logging.getLogger("fineprune.training")

OnEpoch = Callable[[dict[str, Any]], None]

SaveInside = Callable[[EpochTotals], None]
# ``train_epoch_locally`` or ``train_epoch_on_servers``.
TrainEpoch = Callable[[TrainState, int, EpochTotals, SaveInside, StopRequest], bool]


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    sharing: int = 1,
    on_epoch: OnEpoch | None = None,
) -> Summary:
    """Train a recipe and write its run folder.

    Under ``torchrun``, the processes train together: ``batch_size`` is the batch size of each
    process, and rank 0 writes the folder, which all processes must be able to read.

    Args:
        recipe: The recipe to train.
        folder: The run's folder. No other process may write to it at the same time.
        resume: Whether to continue from the folder's checkpoint, which may have been written in the
            middle of an epoch. A finished run is not changed, and an empty folder starts a new run.
        sharing: The number of runs that share this machine's cores.
        on_epoch: A function that is called on rank 0 with the metrics of each epoch.

    Returns:
        The run's summary.
    """
    files = RunFolder(folder)
    recipe = resolved(recipe, frozen=recipe_of(files) if resume else None, sharing=sharing)
    if recipe.distributed.served:
        check_can_serve(recipe)
    if (stale := recipe.stale_momentum) is not None:
        _LOGGER.warning("%s", stale)
    if recipe.run.tensorboard:
        check_installed("tensorboard", "tensorboard for run.tensorboard = true", "tensorboard")
    with (
        # A signal that comes while this process waits for the other ranks ends it, because there is
        # nothing to save yet.
        joined(recipe.run.device) as ranks,
        stop_requests() as stop,
        contextlib.ExitStack() as lock,
        seeded(recipe.run.seed, recipe.run.device),
    ):
        # If rank 0 cannot lock the folder, every rank raises the error.
        ranks.from_main(lambda: lock.enter_context(only_writer(folder)))
        finished, begun = ranks.from_main(
            lambda: (finished_summary(recipe, files, resume), files.checkpoint.exists())
        )
        if finished is not None:
            return finished
        saved = checkpoint_of(files, recipe) if begun else None
        served = recipe.distributed.served
        with (
            served_training(recipe, ranks, folder, saved, stop)
            if served
            else local_training(recipe, ranks, folder, saved, stop)
        ) as state:
            totals = None
            if saved is None:
                ranks.from_main(lambda: files.begin(recipe.to_toml()))
                ranks.from_main(lambda: state.data.save(folder))
            else:
                totals = restore(state, saved)
                ranks.from_main(lambda: files.go_on(recipe.to_toml(), saved["metrics"]["epochs"]))
            train_epoch = train_epoch_on_servers if served else train_epoch_locally
            events = recipe.run.tensorboard and ranks.main
            with (
                event_file(files, state.data.num_samples) if events else contextlib.nullcontext()
            ) as write_event:
                after_epoch = [act for act in (write_event, on_epoch) if act is not None]
                _train_epochs(state, files, totals, train_epoch, stop, after_epoch)
            return ranks.from_main(lambda: _finish(state, files))


def _train_epochs(
    state: TrainState,
    files: RunFolder,
    totals: EpochTotals | None,
    train_epoch: TrainEpoch,
    stop: StopRequest,
    after_epoch: Sequence[OnEpoch],
) -> None:
    run = state.recipe.run
    # An epoch in progress whose batches were all trained still lacks its metrics.
    start = None if totals is None else state.pruner.position.epoch
    totals = totals or state.new_totals()
    for epoch in state.pruner.epochs(start):
        # The clock was started at the end of the last epoch, so that selecting samples is included.
        totals.bookkeeping_seconds += time.perf_counter() - totals.started
        finished = train_epoch(state, epoch, totals, functools.partial(_save, state, files), stop)
        if not finished:
            _save(state, files, totals)
            state.ranks.leave_together()
            number = stop.number or signal.SIGTERM  # The signal may have reached another rank only.
            counted = ("batch", "batches") if state.local else ("update", "updates")
            done = f"{totals.batches} {counted[totals.batches != 1]}"
            raise Stopped(number, f"in epoch {epoch + 1}, after {done}, and wrote a checkpoint")
        wait_for(torch.device(run.device))  # Otherwise, the last steps would count as bookkeeping.
        end = end_of_epoch(state, epoch, totals)
        with totals.bookkeeping():
            state.pruner.end_epoch()
        totals.stop_clock()
        if state.served is not None:
            load_from_servers(state, totals)
        metrics = epoch_metrics(state, epoch, totals, end.loss)
        with state.ranks.wait_for_main(f"epoch {epoch}"):
            if state.ranks.main:
                write_epoch(state, files, metrics, end)
        last = epoch == state.recipe.training.epochs - 1
        if last or (epoch + 1) % run.checkpoint_every == 0:
            _save(state, files, None)
        if state.ranks.main:
            for act in after_epoch:
                act(metrics)
        totals = state.new_totals()


def _save(state: TrainState, files: RunFolder, totals: EpochTotals | None) -> None:
    """Write a checkpoint: inside an epoch with its totals. Every rank must call it."""
    if totals is not None:
        totals.stop_clock()
    saved = checkpoint_state(state, totals)
    if state.ranks.main:
        saved["metrics"] = {"epochs": state.pruner.plan.epoch + (0 if totals else 1)}
        save_checkpoint(files.checkpoint, saved)
    if totals is not None:
        totals.started = time.perf_counter()  # Writing a checkpoint is not part of the training.


def _finish(state: TrainState, files: RunFolder) -> Summary:
    result = summary(state, read_metrics(files.metrics))
    write_summary(files.summary, result)
    return result
