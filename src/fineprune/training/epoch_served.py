"""Trains one epoch with parameter servers and workers, which this process coordinates.

The pruner runs in the coordinator's process, which plans each epoch, sends the batches to the
workers, and records the losses that they return, one update at a time. Therefore, with every
strategy, each kept sample is trained by one worker per epoch, and all workers follow the same plan.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fineprune.distributed.all_reduce import RankGroup, check_not_launched
from fineprune.distributed.parameter_servers.epoch_state import EpochResult
from fineprune.errors import InputError
from fineprune.training.learning_rate import rate_at
from fineprune.training.optimizer import build_optimizer
from fineprune.training.recipe import Recipe
from fineprune.training.recipe_replica import RecipeReplica
from fineprune.training.stop import StopRequest
from fineprune.training.train_state import (
    EpochTotals,
    TrainState,
    build_state,
    unpacked_servers,
)


@contextlib.contextmanager
def served_training(
    recipe: Recipe, ranks: RankGroup, folder: Path, saved: dict[str, Any] | None
) -> Iterator[TrainState]:
    """Build a run that is trained with parameter servers, and start their processes.

    Args:
        recipe: The recipe, without "auto" settings.
        ranks: The group that consists of this process only.
        folder: The run's folder, in which the servers keep their snapshots.
        saved: The checkpoint that the run continues from; None for a new run.

    Raises:
        InputError: The data or the pretrained weights cannot be loaded, or the cluster is too small
            for the workers.
    """
    # Imported here because Ray is an optional dependency.
    from fineprune.distributed.parameter_servers.coordinator import Coordinator
    from fineprune.distributed.parameter_servers.placement import Places
    from fineprune.distributed.parameter_servers.processes import cluster

    strategy = recipe.distributed
    state = build_state(recipe, ranks, saved)
    places = Places(
        groups=strategy.groups,
        members=strategy.group,
        servers=strategy.servers,
        dedicated=strategy.placement == "dedicated",
        threads=recipe.run.threads,
        gpus=1.0 if recipe.run.device.startswith("cuda") else 0.0,
    )
    with cluster(places) as place:
        state.coordinator = Coordinator(
            place,
            strategy,
            state.model,
            functools.partial(
                RecipeReplica,
                _with_absolute_paths(recipe),
                images_digest=state.data.images_digest,
            ),
            functools.partial(build_optimizer, settings=recipe.training),
            folder.resolve() / "servers",
            state=None if saved is None else unpacked_servers(saved["servers"]),
        )
        try:
            state.coordinator.wait_for_workers()
            yield state
        finally:
            state.coordinator.close()


def train_epoch_on_servers(
    state: TrainState,
    epoch: int,
    totals: EpochTotals,
    save: Callable[[EpochTotals], None],
    stop: StopRequest,
) -> bool:
    """Train the batches of an epoch, or the rest of them after a resume.

    The arguments are those of ``train_epoch_locally``; ``save`` is not used.

    Returns:
        True after the last batch; False if the epoch was stopped before.
    """
    training, strategy = state.recipe.training, state.recipe.distributed
    assert state.coordinator is not None
    before = totals.distributed  # the report of the part that was trained before a stop
    applied = before.get("applied", 0)
    rest = torch.split(state.pruner.sampler.order(), training.batch_size * strategy.group)
    # The pruner has no losses of the batches that were lost, so it would train them again.
    rest = rest[len(before.get("lost", ())) :]
    batches = [torch.empty(0, dtype=torch.int64)] * applied + list(rest)
    totals.planned = len(batches)
    result = state.coordinator.run_epoch(
        epoch,
        batches,
        lambda applied: rate_at(training, epoch + applied / len(batches)),
        weights=state.pruner.plan.weights,
        applied=applied,
        stop=lambda: bool(stop),
    )
    with totals.bookkeeping():
        for update in result.updates:
            state.pruner.record(update.indices, update.losses)
            if totals.history is not None:
                totals.history.add(update.indices, update.losses)
            totals.loss_sum += update.losses.sum()
            totals.samples += len(update.losses)
            totals.batches += 1
    totals.distributed = _report(result, before)
    if not result.finished:
        load_from_servers(state, totals)
    return result.finished


def load_from_servers(state: TrainState, totals: EpochTotals) -> None:
    """Load the servers' parameters into the model, after the training of an epoch.

    The deaths of processes are added to the totals here, because they may also be noticed between
    two epochs: while the previous epoch's checkpoint was written, or while parameters are loaded.

    Args:
        state: The state of the run.
        totals: The sums of the epoch.
    """
    assert state.coordinator is not None
    state.coordinator.load_into(state.model)
    for kind, deaths in state.coordinator.take_deaths().items():
        totals.distributed[f"{kind.value}_deaths"] += deaths


def _report(result: EpochResult, before: dict[str, Any]) -> dict[str, Any]:
    """Return the ``distributed`` entry of an epoch's metrics; seconds are sums over processes.

    ``load_from_servers`` adds the deaths since the last epoch's metrics.

    Args:
        result: The result of the coordinator.
        before: The entry of the part of the epoch that was trained before a stop.
    """
    counts = np.array(before.get("staleness", ()), dtype=np.int64)
    earlier = np.repeat(np.arange(len(counts)), counts)
    staleness = np.concatenate([earlier, np.array(result.staleness, dtype=np.int64)])
    if not len(staleness):
        staleness = np.zeros(1, dtype=np.int64)
    seconds = dict(before.get("seconds", {}))
    for phase, value in result.seconds.items():
        seconds[phase] = seconds.get(phase, 0.0) + value
    sums = ("dropped", "undone")
    deaths = ("worker_deaths", "server_deaths")
    return {
        "staleness": np.bincount(staleness).tolist(),
        "staleness_mean": float(staleness.mean()),
        "staleness_p95": float(np.percentile(staleness, 95)),
        "staleness_max": int(staleness.max()),
        "applied": result.applied,
        "lost": [*before.get("lost", ()), *(key.batch for key in result.lost)],
        **{name: before.get(name, 0) + getattr(result, name) for name in sums},
        **{name: before.get(name, 0) for name in deaths},
        "seconds": seconds,
    }


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    """Make the paths of the data absolute, because workers have another working directory."""
    data = recipe.data
    paths = {name: getattr(data, name) for name in ("dir", "train", "test", "labels")}
    absolute = {name: path and str(Path(path).resolve()) for name, path in paths.items()}
    return recipe.replaced("data", **absolute)


def check_can_serve(recipe: Recipe) -> None:
    """Check that this process can start parameter servers.

    Raises:
        InputError: Ray is not installed, or a launcher such as ``torchrun`` started the process.
    """
    strategy = recipe.distributed.strategy
    if importlib.util.find_spec("ray") is None:
        raise InputError(
            f"expected Ray to be installed for distributed.strategy {strategy!r}, found none: "
            f"pip install 'fineprune[cluster]'"
        )
    check_not_launched(f"distributed.strategy {strategy!r}", "the workers")
