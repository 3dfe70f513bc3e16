"""ServedEpochs: trains with parameter servers and workers, which this process drives.

The pruner runs in this process, which plans each epoch, sends the batches to the workers, and
records the losses that they return, one update at a time. So each kept sample is trained by one
worker per epoch, with every strategy.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fineprune.distributed.parameter_servers.epoch import Epoch
from fineprune.distributed.parameter_servers.start import parameter_servers
from fineprune.errors import RayLost, check_installed
from fineprune.launcher import check_not_launched
from fineprune.training.epoch_totals import EpochTotals
from fineprune.training.learning_rate import rate_at
from fineprune.training.optimizer import build_optimizer
from fineprune.training.recipe import Recipe
from fineprune.training.recipe_replica import RecipeReplica
from fineprune.training.stop import StopRequest

if TYPE_CHECKING:
    from fineprune.distributed.parameter_servers.training import Training
    from fineprune.training.trainer import Trainer


class ServedEpochs:
    """Trains the batches of an epoch on workers and parameter servers.

    Args:
        trainer: The training, whose data, network and pruner are built.
        saved: The state of the servers that the run continues from; None for a new run.
    """

    counted = "update"

    def __init__(self, trainer: "Trainer", saved: dict[str, Any] | None) -> None:
        self._recipe, self._model, self._pruner = trainer.recipe, trainer.model, trainer.pruner
        self._saved = saved
        self._build = functools.partial(
            RecipeReplica,
            with_absolute_paths(trainer.recipe),
            digests=trainer.data.digests,
            folder=trainer.files.path.resolve(),
            records_logits=trainer.records_logits,
        )
        self._served: Training

    @contextlib.contextmanager
    def running(self, stop: StopRequest) -> Iterator[None]:
        """Start the workers and servers, which end with the block."""
        run = self._recipe.run
        try:
            with parameter_servers(
                self._recipe.distributed,
                self._model,
                self._build,
                functools.partial(build_optimizer, settings=self._recipe.training),
                threads=run.threads,
                gpus=1.0 if run.device.startswith("cuda") else 0.0,
                state=self._saved,
                stop=lambda: bool(stop),
            ) as self._served:
                self._served.wait_for_workers()
                stop.check("before the first epoch")
                yield
        except RayLost:
            # What asked this process to stop has perhaps stopped Ray, too.
            stop.check("together with its Ray, without another checkpoint")
            raise

    def train(
        self,
        epoch: int,
        totals: EpochTotals,
        save: Callable[[EpochTotals], None],
        stop: StopRequest,
    ) -> bool:
        """Train the batches of an epoch, or the rest of them after a resume.

        The arguments are those of ``LocalEpochs.train``; ``save`` is not used.

        Returns:
            True after the last batch; False if the epoch was stopped before.
        """
        training, strategy = self._recipe.training, self._recipe.distributed
        pruner = self._pruner
        before = totals.distributed  # the report of the part that was trained before a stop
        applied = before.get("applied", 0)
        rest = torch.split(pruner.sampler.order(), training.batch_size * strategy.group)
        batches = [torch.empty(0, dtype=torch.int64)] * applied + list(rest)
        updates = totals.planned = -(-len(batches) // strategy.quorum)
        result = self._served.run_epoch(
            epoch,
            batches,
            # Like one process, whose batches are as large as the updates.
            lambda done: rate_at(training, epoch + -(-done // strategy.quorum) / updates),
            weights=pruner.plan.weights,
            applied=applied,
            stop=lambda: bool(stop),
        )
        totals.started += result.snapshot_seconds  # like a checkpoint, no part of the training
        with totals.bookkeeping():
            for update in result.updates:
                pruner.observe(update.indices, update.losses, **update.watched)
                totals.add(update.indices, update.losses, updates)
                totals.steps += 1
        totals.distributed = _report(result, before)
        if not result.finished:
            self.load_into_model(totals)
        return result.finished

    def load_into_model(self, totals: EpochTotals) -> None:
        """Load the servers' parameters into the model, after the training of an epoch.

        The deaths of processes are added to the totals here, because they may also be noticed
        between two epochs.
        """
        self._served.load_into(self._model)
        for kind, deaths in self._served.take_deaths().items():
            totals.distributed[f"{kind.value}_deaths"] += deaths

    def state_dict(self, *, inside: bool) -> dict[str, Any]:
        """Return the state of the servers, which is the same inside an epoch and after it."""
        return {"servers": self._served.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the servers began with their state."""


def _report(result: Epoch, before: dict[str, Any]) -> dict[str, Any]:
    """Return the ``distributed`` entry of an epoch's metrics.

    ``staleness`` is the number of updates with a staleness of 0, 1, 2 and so on. ``seconds`` are
    sums over all processes; ``workers`` and ``servers`` have those of each process. ``before`` is
    the entry of the part of the epoch that was trained before a stop.
    """
    workers = [
        {
            "samples": worker.samples,
            "staleness": _histogram(worker.staleness),
            "seconds": worker.seconds,
        }
        for worker in result.workers
    ]
    part: dict[str, Any] = {
        "staleness": _histogram(result.staleness),
        "dropped": result.dropped,
        "undone": result.undone,
        "worker_deaths": 0,
        "server_deaths": 0,
        "seconds": result.seconds,
        "workers": workers,
        "servers": result.servers,
    }
    whole = {name: added(value, before[name]) if before else value for name, value in part.items()}
    return {**whole, **staleness_figures(whole["staleness"]), "applied": result.applied}


def _histogram(staleness: Sequence[int]) -> list[int]:
    counted: list[int] = np.bincount(np.array(staleness, dtype=np.int64)).tolist()
    return counted


def added(one: Any, other: Any) -> Any:
    """Add numbers, or those in lists and dicts, of which the shorter one is filled with zeros."""
    if isinstance(one, dict):
        names = {**other, **one}
        return {name: added(one.get(name, 0), other.get(name, 0)) for name in names}
    if isinstance(one, list):
        return list(itertools.starmap(added, itertools.zip_longest(one, other, fillvalue=0)))
    return one + other


def staleness_figures(histogram: Sequence[int]) -> dict[str, Any]:
    """Return the mean, 95th percentile and maximum of the staleness; None without updates."""
    values = np.repeat(np.arange(len(histogram)), histogram)
    known = len(values) > 0
    return {
        "staleness_mean": float(values.mean()) if known else None,
        "staleness_p95": float(np.percentile(values, 95)) if known else None,
        "staleness_max": int(values.max()) if known else None,
    }


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Make the paths of the data absolute, because workers have another working directory."""
    data = recipe.data
    paths = {name: getattr(data, name) for name in ("dir", "train", "test", "labels", "without")}
    absolute = {name: path and str(Path(path).resolve()) for name, path in paths.items()}
    return recipe.replaced("data", **absolute)


def check_can_serve(recipe: Recipe) -> None:
    """Check that this process can start parameter servers."""
    strategy = recipe.distributed.strategy
    check_installed("ray", f"Ray for distributed.strategy {strategy!r}", "cluster")
    check_not_launched(f"distributed.strategy {strategy!r}", "the workers")
