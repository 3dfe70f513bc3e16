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
                self._served.wait_for_workers(lambda: bool(stop))
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
        totals.distributed = added(result.report(), before) | {"applied": result.applied}
        if not result.finished:
            self.load_into_model(totals)
        return result.finished

    def load_into_model(self, totals: EpochTotals) -> None:
        """Load the servers' parameters into the model, after the training of an epoch.

        The deaths of processes are added to the totals here, because they may also be noticed
        between two epochs.
        """
        self._served.load_into(self._model)
        totals.distributed = added(totals.distributed, self._served.take_deaths())

    def state_dict(self, *, inside: bool) -> dict[str, Any]:
        """Return the state of the servers, which is the same inside an epoch and after it."""
        return {"servers": self._served.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the servers began with their state."""


def added(one: Any, other: Any) -> Any:
    """Add numbers, or those in lists and dicts; what only one of them has is taken from there."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict):
        return {name: added(one.get(name), other.get(name)) for name in {**one, **other}}
    if isinstance(one, list):
        return list(itertools.starmap(added, itertools.zip_longest(one, other)))
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
