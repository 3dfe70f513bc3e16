"""Training with parameter servers: the driver's side, one recipe in, one run folder out.

The driver owns the pruner: it plans each epoch, has its batches trained by the workers, and records
the losses that come back, an update at a time. So every sample is trained by one worker an epoch,
and all workers train by one plan, whatever the strategy.
"""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fineprune.distributed.all_reduce import RankGroup
from fineprune.errors import InputError
from fineprune.runs.folder import RunFolder
from fineprune.training.checkpoint import load_checkpoint, save_checkpoint
from fineprune.training.epoch_metrics import (
    add_evaluation,
    closing_counts,
    epoch_metrics,
    write_epoch,
)
from fineprune.training.learning_rate import rate_at
from fineprune.training.optimizer import build_optimizer
from fineprune.training.random_state import seeded
from fineprune.training.recipe import Recipe
from fineprune.training.recipe_replica import RecipeReplica
from fineprune.training.train_state import Job, build_job, check_method, method, new_epoch

# Updates between two snapshots of the servers: what a server's death can cost.
_SNAPSHOT_EVERY = 50


def serve(
    recipe: Recipe,
    log: RunFolder,
    *,
    resume: bool,
    arm: str | None,
    on_epoch: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Train a recipe with parameter servers and write its run folder; see ``loop.train``.

    Raises:
        InputError: Ray is not installed, a launcher started several processes, there is no place
            for so many workers, or the checkpoint is of another recipe.
    """
    _check(recipe)
    from fineprune.distributed.parameter_servers.coordinator import Coordinator
    from fineprune.distributed.parameter_servers.ray_cluster import Places, cluster

    settings = recipe.distributed
    checkpoint = log.checkpoint_to_resume(resume)
    state = None if checkpoint is None else load_checkpoint(checkpoint)
    with seeded(recipe.run.seed, recipe.run.device):
        job = build_job(recipe, RankGroup())
        if state is None:
            log.begin()
        else:
            check_method(job, state)
            job.pruner.load_state_dict(state["pruner"])
            log.forget_from(job.pruner.plan.epoch + 1)
        places = Places(
            groups=settings.workers // settings.group,
            members=settings.group,
            servers=settings.servers,
            dedicated=settings.placement == "dedicated",
            threads=recipe.run.threads,
            gpus=1.0 if recipe.run.device.startswith("cuda") else 0.0,
        )
        with cluster(places) as place:
            server = Coordinator(
                place,
                settings,
                job.model,
                functools.partial(RecipeReplica, _anywhere(recipe)),
                functools.partial(build_optimizer, settings=recipe.training),
                log.folder.resolve() / "servers",
                snapshot_every=_SNAPSHOT_EVERY,
                state=None if state is None else _unpacked(state["server"]),
            )
            try:
                server.wait_for_workers()
                _train_epochs(job, server, log, on_epoch)
            finally:
                server.close()
    return log.finish(job, arm)


def _train_epochs(
    job: Job, server: Any, log: RunFolder, on_epoch: Callable[[dict[str, Any]], None]
) -> None:
    recipe = job.recipe
    training = recipe.training
    so_far = new_epoch(job)
    for epoch in job.pruner.epochs():
        # The clock has run since the last epoch's end: selecting the samples is part of the cost.
        so_far.bookkeeping_seconds += time.perf_counter() - so_far.started
        closing = closing_counts(job, epoch)
        order = job.pruner.sampler.order()
        batches = torch.split(order, training.batch_size * recipe.distributed.group)

        def rate(done: int, epoch: int = epoch, batches: int = len(batches)) -> float:
            return rate_at(training, epoch + done / batches)

        result = server.run_epoch(epoch, batches, rate)
        recording = time.perf_counter()
        for update in result.updates:
            job.pruner.record(update.indices, update.losses)
            so_far.loss_sum += update.losses.sum()
            so_far.samples += len(update.losses)
            so_far.batches += 1
        job.pruner.end_epoch()
        so_far.bookkeeping_seconds += time.perf_counter() - recording
        so_far.stop()
        server.load_into(job.model)
        metrics = epoch_metrics(job, epoch, so_far)
        metrics |= {"lr": rate(len(batches) - 1), "steps": len(result.updates)}
        metrics["distributed"] = _told(result)
        add_evaluation(job, epoch, metrics)
        write_epoch(job, log, metrics, closing)
        last = epoch == training.epochs - 1
        if last or (epoch + 1) % recipe.run.checkpoint_every == 0:
            save_checkpoint(
                log.checkpoint,
                {
                    "recipe": method(recipe),
                    "model": job.model.state_dict(),
                    "pruner": job.pruner.state_dict(),
                    "server": _packed(server.state()),
                },
            )
        on_epoch(metrics)
        so_far = new_epoch(job)


def _told(result: Any) -> dict[str, Any]:
    """What an epoch's metrics say of its strategy; seconds are sums over all processes."""
    staleness = np.array(result.staleness or [0])
    return {
        "staleness": np.bincount(staleness).tolist(),
        "staleness_mean": float(staleness.mean()),
        "staleness_p95": float(np.percentile(staleness, 95)),
        "staleness_max": int(staleness.max()),
        "dropped": result.dropped,
        "lost": [key.batch for key in result.lost],
        "undone": result.undone,
        "worker_deaths": result.worker_deaths,
        "server_deaths": result.server_deaths,
        "seconds": dict(result.seconds),
    }


def _anywhere(recipe: Recipe) -> Recipe:
    """The recipe for processes that a cluster started in another working directory."""
    return recipe.replaced("data", dir=str(Path(recipe.data.dir).resolve()))


def _check(recipe: Recipe) -> None:
    strategy = recipe.distributed.strategy
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"expected Ray for distributed.strategy {strategy!r}: pip install 'fineprune[cluster]'"
        ) from error
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            f"expected distributed.strategy {strategy!r} without torchrun: its workers are started "
            f"by the run itself"
        )


def _packed(state: dict[str, Any]) -> dict[str, Any]:
    """Make of a server's state what loads with ``weights_only=True``: tensors and strings."""
    return {
        "layout": state["layout"],
        "servers": [
            torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in state["servers"]
        ],
        "buffers": {name: torch.from_numpy(np.array(b)) for name, b in state["buffers"].items()},
    }


def _unpacked(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "layout": state["layout"],
        "servers": [part.numpy().tobytes() for part in state["servers"]],
        "buffers": {name: buffer.numpy() for name, buffer in state["buffers"].items()},
    }
