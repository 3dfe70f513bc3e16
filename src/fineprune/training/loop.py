"""The training loop: one recipe in, one run folder out."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fineprune.distributed.all_reduce import joined
from fineprune.runs.folder import RunFolder
from fineprune.training.checkpoint import load_checkpoint, save_checkpoint
from fineprune.training.epoch_metrics import (
    add_evaluation,
    closing_counts,
    epoch_metrics,
    write_epoch,
)
from fineprune.training.epoch_served import serve
from fineprune.training.hardware import resolved
from fineprune.training.learning_rate import rate_at
from fineprune.training.network import training_losses
from fineprune.training.optimizer import set_rate
from fineprune.training.random_state import seeded
from fineprune.training.recipe import Recipe
from fineprune.training.train_state import (
    EpochSoFar,
    Job,
    build_job,
    job_state,
    new_epoch,
    restore_job,
)

OnEpoch = Callable[[dict[str, Any]], None]


def train(
    recipe: Recipe,
    folder: Path,
    *,
    arm: str | None = None,
    resume: bool = False,
    on_epoch: OnEpoch | None = None,
) -> dict[str, Any]:
    """Train a recipe and write its run folder.

    Args:
        recipe: what to train.
        folder: where the run is written.
        arm: the run's name in a comparison; by default the policy's.
        resume: go on from the folder's checkpoint, also in the middle of an epoch.
        on_epoch: called with each epoch's metrics, on rank 0.

    Under ``torchrun`` the processes train together; ``batch_size`` is then each one's, and
    rank 0 writes the folder, which all must be able to read.

    Returns:
        The run's summary, as in ``summary.json``.

    Raises:
        InputError: a setting is wrong, the folder already holds a run, or the checkpoint is of
            another recipe.
    """
    recipe = resolved(recipe)
    log = RunFolder(folder, recipe)
    on_epoch = on_epoch or (lambda metrics: None)
    if recipe.distributed.served:
        return serve(recipe, log, resume=resume, arm=arm, on_epoch=on_epoch)
    with (
        joined(recipe.run.device) as ranks,
        seeded(recipe.run.seed, recipe.run.device),
        _threads(recipe.run.threads),
    ):
        checkpoint = ranks.from_main(lambda: log.checkpoint_to_resume(resume))
        job = build_job(recipe, ranks)
        so_far = None
        if checkpoint is not None:
            so_far = restore_job(job, load_checkpoint(checkpoint))
        if ranks.main and checkpoint is None:
            log.begin()
        elif ranks.main:
            log.forget_from(job.pruner.plan.epoch + (0 if so_far else 1))
        _train_epochs(job, log, so_far, on_epoch)
        return ranks.from_main(lambda: log.finish(job, arm))


def _train_epochs(job: Job, log: RunFolder, so_far: EpochSoFar | None, on_epoch: OnEpoch) -> None:
    recipe = job.recipe
    so_far = so_far or new_epoch(job)
    for epoch in job.pruner.epochs():
        # The clock has run since the last epoch's end: selecting the samples is part of the cost.
        so_far.bookkeeping_seconds += time.perf_counter() - so_far.started
        _train_epoch(job, log, epoch, so_far)
        closing = closing_counts(job, epoch)
        ending = time.perf_counter()
        _wait_for(recipe.run.device)  # else the wait for the last steps would pass as bookkeeping
        waited = time.perf_counter() - ending
        job.pruner.end_epoch()
        so_far.bookkeeping_seconds += time.perf_counter() - ending - waited
        so_far.stop()
        metrics = epoch_metrics(job, epoch, so_far)
        if job.ranks.main:
            add_evaluation(job, epoch, metrics)
            write_epoch(job, log, metrics, closing)
        last = epoch == recipe.training.epochs - 1
        if last or (epoch + 1) % recipe.run.checkpoint_every == 0:
            _save(job, log, None)
        if job.ranks.main:
            on_epoch(metrics)
        so_far = new_epoch(job)


def _train_epoch(job: Job, log: RunFolder, epoch: int, so_far: EpochSoFar) -> None:
    """Train the epoch's batches, or the rest of them after a resume."""
    training, run = job.recipe.training, job.recipe.run
    optimizer, pruner = job.optimizer, job.pruner
    batches = len(job.loader)
    rate = -1.0
    job.model.train()
    if job.workers and not so_far.batches:
        job.workers.begin_epoch()
    for index, (x, y) in job.loader:
        x = _to_device(x, run.device)
        y = y.to(run.device, non_blocking=True)
        wanted = rate_at(training, epoch + so_far.batches / batches)
        if wanted != rate:
            rate = wanted
            set_rate(optimizer, rate)
        ends_window = (so_far.batches + 1) % training.accumulation == 0
        steps = ends_window or so_far.batches + 1 == batches
        with job.autocast, _averaging(job, steps):
            logits = job.forward(x)
        losses = training_losses(logits, y, training)
        recording = time.perf_counter()
        loss = pruner.record(index, losses)
        so_far.bookkeeping_seconds += time.perf_counter() - recording
        so_far.loss_sum += losses.detach().sum()
        so_far.samples += len(y)
        so_far.batches += 1
        # The last window of an epoch may be shorter; its gradient is the mean of what it has.
        window = min(training.accumulation, batches - _window_start(so_far.batches, training))
        (loss / window if window > 1 else loss).backward()  # type: ignore[no-untyped-call]
        if steps:
            if job.workers:
                job.workers.step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()
            if run.checkpoint_steps and so_far.batches % run.checkpoint_steps == 0:
                so_far.stop()
                _save(job, log, so_far)
                so_far.started = time.perf_counter()
    if job.workers:
        job.workers.end_epoch()


def _averaging(job: Job, steps: bool) -> contextlib.AbstractContextManager[None]:
    """Let replicas average gradients only in the backward pass that a step follows."""
    if job.ranks.size == 1 or steps:
        return contextlib.nullcontext()
    return job.forward.no_sync()  # type: ignore[no-any-return, operator]


def _save(job: Job, log: RunFolder, so_far: EpochSoFar | None) -> None:
    state = job_state(job, so_far)
    if job.ranks.main:
        save_checkpoint(log.checkpoint, state)


def _to_device(x: torch.Tensor, device: str) -> torch.Tensor:
    layout = torch.channels_last if x.ndim == 4 else torch.preserve_format
    return x.to(device, memory_format=layout, non_blocking=True)


def _window_start(batches: int, training: Any) -> int:
    start: int = (batches - 1) // training.accumulation * training.accumulation
    return start


def _wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
