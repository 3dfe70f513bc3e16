"""The training loop: one recipe in, one run folder out."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fineprune.networks.registry import build_network
from fineprune.pruning.pruner import Pruner
from fineprune.training.checkpoint import load_checkpoint, save_checkpoint
from fineprune.training.data import Data, load_data
from fineprune.training.evaluate import evaluate, sample_losses
from fineprune.training.hardware import resolved
from fineprune.training.learning_rate import rate_at
from fineprune.training.optimizer import build_optimizer, load_optimizer, set_rate
from fineprune.training.random_state import random_state, seeded, set_random_state
from fineprune.training.recipe import Recipe, RunSettings
from fineprune.training.run_folder import RunFolder

OnEpoch = Callable[[dict[str, Any]], None]


@dataclass
class _Job:
    """What a run is made of, built from its recipe."""

    recipe: Recipe
    data: Data
    model: nn.Module
    forward: Callable[[torch.Tensor], torch.Tensor]  # the model as trained, compiled or not
    optimizer: torch.optim.Optimizer
    pruner: Pruner
    loader: Any
    autocast: torch.autocast


@dataclass
class _EpochSoFar:
    """Sums over an epoch's batches; part of the checkpoint, so that a resume goes on with them."""

    loss_sum: torch.Tensor
    samples: int = 0
    batches: int = 0
    seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def stop(self) -> None:
        """Add the time since the start to the epoch's seconds."""
        now = time.perf_counter()
        self.seconds += now - self.started
        self.started = now


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
        on_epoch: called with each epoch's metrics.

    Returns:
        The run's summary, as in ``summary.json``.

    Raises:
        ValueError: a setting is wrong, the folder already holds a run, or the checkpoint is of
            another recipe.
    """
    recipe = resolved(recipe)
    arm = arm or recipe.pruning.policy
    log = RunFolder(folder, recipe)
    checkpoint = log.checkpoint_to_resume(resume)
    with seeded(recipe.run.seed, recipe.run.device), _threads(recipe.run.threads):
        job = _build(recipe)
        so_far = None
        if checkpoint is None:
            log.begin()
        else:
            so_far = _restore(job, load_checkpoint(checkpoint))
            log.forget_from(job.pruner.plan.epoch + (0 if so_far else 1))
        _train_epochs(job, log, so_far, on_epoch or (lambda metrics: None))
    return log.finish(
        arm=arm,
        parameters=sum(p.numel() for p in job.model.parameters()),
        num_samples=job.data.num_samples,
        evaluated_on=job.data.evaluated_on,
    )


def _build(recipe: Recipe) -> _Job:
    data = load_data(recipe)
    model = build_network(recipe.network.name, data.classes, data.channels)
    model = model.to(recipe.run.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pruner = Pruner(
        data.train,
        recipe.policy(),
        seed=recipe.run.seed,
        batch_size=recipe.training.batch_size,
        accumulation=recipe.training.accumulation,
        drop_last=recipe.training.drop_last,
    )
    autocast = torch.autocast(
        recipe.run.device.partition(":")[0],
        dtype=torch.bfloat16,
        enabled=recipe.run.precision == "bfloat16",
    )
    optimizer = build_optimizer(model, recipe.training)
    loader = data.make_loader(pruner)
    forward = _compiled(model, recipe.run) if recipe.run.compile == "on" else model
    return _Job(recipe, data, model, forward, optimizer, pruner, loader, autocast)


def _compiled(model: nn.Module, run: RunSettings) -> Callable[[torch.Tensor], torch.Tensor]:
    # On a GPU with CUDA graphs: a small network waits for launches, not for arithmetic. Shapes are
    # compiled as they come, since there are two at most: whole batches, and a full epoch's last.
    mode = "reduce-overhead" if run.device.startswith("cuda") else "default"
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(
        model, dynamic=False, mode=mode
    )
    return compiled


def _train_epochs(job: _Job, log: RunFolder, so_far: _EpochSoFar | None, on_epoch: OnEpoch) -> None:
    recipe = job.recipe
    schedule = None if job.pruner.counts is None else recipe.schedule()
    so_far = so_far or _fresh(job)
    for epoch in job.pruner.epochs():
        # The clock has run since the last epoch's end: selecting the samples is part of the cost.
        so_far.bookkeeping_seconds += time.perf_counter() - so_far.started
        _train_epoch(job, log, epoch, so_far)
        closes = schedule is not None and schedule.clears(epoch)
        counts = job.pruner.counts if closes else None
        ending = time.perf_counter()
        _wait_for(recipe.run.device)  # else the wait for the last steps would pass as bookkeeping
        waited = time.perf_counter() - ending
        job.pruner.end_epoch()
        so_far.bookkeeping_seconds += time.perf_counter() - ending - waited
        so_far.stop()
        metrics = _epoch_metrics(job, epoch, so_far)
        last = epoch == recipe.training.epochs - 1
        if last and not closes:
            counts = job.pruner.counts
        if counts is not None:
            log.write_counts(epoch, counts)
        log.append(metrics)
        if last or (epoch + 1) % recipe.run.checkpoint_every == 0:
            save_checkpoint(log.checkpoint, _state(job, None))
        on_epoch(metrics)
        so_far = _fresh(job)


def _train_epoch(job: _Job, log: RunFolder, epoch: int, so_far: _EpochSoFar) -> None:
    """Train the epoch's batches, or the rest of them after a resume."""
    training, run = job.recipe.training, job.recipe.run
    optimizer, pruner = job.optimizer, job.pruner
    batches = len(job.loader)
    rate = -1.0
    job.model.train()
    for index, (x, y) in job.loader:
        x = _to_device(x, run.device)
        y = y.to(run.device, non_blocking=True)
        wanted = rate_at(training, epoch + so_far.batches / batches)
        if wanted != rate:
            rate = wanted
            set_rate(optimizer, rate)
        with job.autocast:
            logits = job.forward(x)
        losses = F.cross_entropy(
            logits.float(), y, reduction="none", label_smoothing=training.label_smoothing
        )
        recording = time.perf_counter()
        loss = pruner.record(index, losses)
        so_far.bookkeeping_seconds += time.perf_counter() - recording
        so_far.loss_sum += losses.detach().sum()
        so_far.samples += len(y)
        so_far.batches += 1
        # The last window of an epoch may be shorter; its gradient is the mean of what it has.
        window = min(training.accumulation, batches - _window_start(so_far.batches, training))
        (loss / window if window > 1 else loss).backward()  # type: ignore[no-untyped-call]
        if so_far.batches % training.accumulation == 0 or so_far.batches == batches:
            optimizer.step()
            optimizer.zero_grad()
            if run.checkpoint_steps and so_far.batches % run.checkpoint_steps == 0:
                so_far.stop()
                save_checkpoint(log.checkpoint, _state(job, so_far))
                so_far.started = time.perf_counter()


def _to_device(x: torch.Tensor, device: str) -> torch.Tensor:
    layout = torch.channels_last if x.ndim == 4 else torch.preserve_format
    return x.to(device, memory_format=layout, non_blocking=True)


def _window_start(batches: int, training: Any) -> int:
    start: int = (batches - 1) // training.accumulation * training.accumulation
    return start


def _epoch_metrics(job: _Job, epoch: int, so_far: _EpochSoFar) -> dict[str, Any]:
    training = job.recipe.training
    kept = job.pruner.plan.kept
    metrics: dict[str, Any] = {
        "epoch": epoch,
        "lr": float(job.optimizer.param_groups[0]["lr"]),
        "pruned": len(kept) < job.data.num_samples,
        "samples": so_far.samples,
        "skipped": job.data.num_samples - len(kept),
        "steps": -(-so_far.batches // training.accumulation),
        "train_loss": so_far.loss_sum.item() / so_far.samples,
        "nonfinite": job.pruner.nonfinite,
        "seconds": so_far.seconds,
        "bookkeeping_seconds": so_far.bookkeeping_seconds,
        "evaluate_seconds": 0.0,
    }
    names = [f"{kind}_{what}" for kind in ("test", "validation") for what in ("loss", "accuracy")]
    metrics |= dict.fromkeys([*names, "watched"])
    left = training.epochs - 1 - epoch
    if (epoch + 1) % training.evaluate_every == 0 or left < training.evaluate_last:
        started = time.perf_counter()
        device = job.recipe.run.device
        loss, accuracy = evaluate(job.model, job.data.evaluation, device, job.autocast)
        metrics[f"{job.data.evaluated_on}_loss"] = loss
        metrics[f"{job.data.evaluated_on}_accuracy"] = accuracy
        indices, batches = job.data.watched
        losses = sample_losses(job.model, batches, device, job.autocast)
        metrics["watched"] = {str(i): loss for i, loss in zip(indices, losses, strict=True)}
        metrics["evaluate_seconds"] = time.perf_counter() - started
    return metrics


def _fresh(job: _Job) -> _EpochSoFar:
    return _EpochSoFar(torch.zeros((), device=job.recipe.run.device))


def _state(job: _Job, so_far: _EpochSoFar | None) -> dict[str, Any]:
    return {
        "recipe": _method(job.recipe),
        "model": job.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "pruner": job.pruner.state_dict(),
        "random": random_state(job.recipe.run.device),
        "epoch_so_far": None
        if so_far is None
        else {
            "loss_sum": so_far.loss_sum,
            "samples": so_far.samples,
            "batches": so_far.batches,
            "seconds": so_far.seconds,
            "bookkeeping_seconds": so_far.bookkeeping_seconds,
        },
    }


def _restore(job: _Job, state: dict[str, Any]) -> _EpochSoFar | None:
    if state["recipe"] != _method(job.recipe):
        raise ValueError(
            "expected a checkpoint of this recipe, got one of another: resume with the settings "
            "in the folder's recipe.toml, or train into a new folder"
        )
    job.model.load_state_dict(state["model"])
    load_optimizer(job.optimizer, state["optimizer"])
    job.pruner.load_state_dict(state["pruner"])
    set_random_state(state["random"], job.recipe.run.device)
    saved = state["epoch_so_far"]
    if saved is None:
        return None
    saved["loss_sum"] = saved["loss_sum"].to(job.recipe.run.device)
    return _EpochSoFar(**saved)


def _method(recipe: Recipe) -> dict[str, Any]:
    """What a checkpoint must agree with: all but where and how the run is carried out."""
    sections = recipe.as_dict()
    sections["data"] = {k: v for k, v in sections["data"].items() if k not in ("dir", "workers")}
    sections["run"] = {"seed": recipe.run.seed}
    return sections


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
