"""A run's parts: built from its recipe, saved in a checkpoint, and taken up again."""

import time
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from fineprune.distributed.all_reduce import RankGroup
from fineprune.distributed.simulated_workers import SimulatedWorkers
from fineprune.errors import InputError
from fineprune.pruning.pruner import Pruner
from fineprune.training.data import Data, load_data
from fineprune.training.network import precision, recipe_network
from fineprune.training.optimizer import build_optimizer, load_optimizer
from fineprune.training.random_state import random_state, reseed, set_random_state
from fineprune.training.recipe import Recipe
from fineprune.training.settings import RunSettings


@dataclass
class Job:
    """What a run is made of on one rank.

    Attributes:
        recipe: as run, nothing "auto" left in it.
        ranks: the processes that train it together.
        data: training loader and evaluation batches.
        model: the bare network, whose state is saved.
        forward: the network as it is trained: compiled, replicated, or just itself.
        optimizer, pruner, loader: as their names say; no loader with parameter servers, whose
            workers have their own.
        autocast: the run's precision.
        workers: simulated ones; None where the run has none.
    """

    recipe: Recipe
    ranks: RankGroup
    data: Data
    model: nn.Module
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    pruner: Pruner
    loader: Any
    autocast: torch.autocast
    workers: SimulatedWorkers | None

    @property
    def processes(self) -> int:
        """How many train it: ranks, or workers of parameter servers."""
        settings = self.recipe.distributed
        return settings.workers if settings.served else self.ranks.size


@dataclass
class EpochSoFar:
    """Sums over an epoch's batches on this rank; part of the checkpoint."""

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


def build_job(recipe: Recipe, ranks: RankGroup) -> Job:
    """Load the data and build network, optimizer and pruner, from torch's current random state.

    Raises:
        InputError: simulated workers are asked for on several ranks.
    """
    simulate = recipe.distributed.simulate
    if simulate and ranks.size > 1:
        raise InputError(
            f"expected distributed.simulate in one process, got {simulate} on {ranks.size} ranks: "
            f"start it without torchrun"
        )
    data = load_data(recipe)
    model = recipe_network(recipe, data)
    pruner = Pruner(
        data.train,
        recipe.policy(),
        seed=recipe.run.seed,
        batch_size=recipe.training.batch_size * recipe.distributed.batches_per_update,
        accumulation=recipe.training.accumulation,
        drop_last=recipe.training.drop_last,
    )
    forward = _compiled(model, recipe.run) if recipe.run.compile == "on" else model
    if ranks.rank:
        # The weights are drawn alike on all ranks; what is drawn while training must not be.
        reseed(recipe.run.seed, ranks.rank, recipe.run.device)
    return Job(
        recipe=recipe,
        ranks=ranks,
        data=data,
        model=model,
        forward=ranks.replicate(model, forward),
        optimizer=build_optimizer(model.parameters(), recipe.training),
        pruner=pruner,
        loader=None if recipe.distributed.served else data.make_loader(pruner),
        autocast=precision(recipe.run),
        workers=SimulatedWorkers(model, simulate) if simulate else None,
    )


def new_epoch(job: Job) -> EpochSoFar:
    """Return sums of nothing, with the clock started."""
    return EpochSoFar(torch.zeros((), device=job.recipe.run.device))


def job_state(job: Job, so_far: EpochSoFar | None) -> dict[str, Any]:
    """Return what a checkpoint holds. With several ranks all must call it: they exchange theirs.

    Args:
        job: the run.
        so_far: the epoch in progress; None at an epoch's end.
    """
    epoch = None
    if so_far is not None:
        if job.ranks.size > 1:
            job.pruner.synchronize()
        epoch = {
            "loss_sum": job.ranks.sum(so_far.loss_sum),
            "samples": so_far.samples * job.ranks.size,
            "batches": so_far.batches,
            "seconds": so_far.seconds,
            "bookkeeping_seconds": so_far.bookkeeping_seconds,
        }
    return {
        "recipe": method(job.recipe),
        "model": job.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "pruner": job.pruner.state_dict(),
        "random": job.ranks.gather(random_state(job.recipe.run.device)),
        "epoch_so_far": epoch,
        "workers": job.workers.state_dict() if job.workers and so_far else None,
    }


def restore_job(job: Job, state: dict[str, Any]) -> EpochSoFar | None:
    """Take up a checkpoint, from any number of ranks; returns the epoch in progress, if any.

    Raises:
        InputError: the checkpoint is of another recipe.
    """
    check_method(job, state)
    job.model.load_state_dict(state["model"])
    load_optimizer(job.optimizer, state["optimizer"])
    job.pruner.load_state_dict(state["pruner"])
    if job.ranks.rank < len(state["random"]):
        set_random_state(state["random"][job.ranks.rank], job.recipe.run.device)
    saved = state["epoch_so_far"]
    if saved is None:
        return None
    if job.workers:
        job.workers.load_state_dict(state["workers"])
    ranks = len(state["random"])
    saved["loss_sum"] = saved["loss_sum"].to(job.recipe.run.device)
    so_far = EpochSoFar(**saved)
    so_far.samples = saved["samples"] // job.ranks.size
    # As many of today's batches as hold the samples that were trained.
    so_far.batches = saved["batches"] * ranks // job.ranks.size
    if not job.ranks.main:
        so_far.loss_sum.zero_()
    return so_far


def _compiled(model: nn.Module, run: RunSettings) -> nn.Module:
    # On a GPU with CUDA graphs: a small network waits for launches, not for arithmetic. Shapes are
    # compiled as they come, since there are two at most: whole batches, and a full epoch's last.
    mode = "reduce-overhead" if run.device.startswith("cuda") else "default"
    return cast(nn.Module, torch.compile(model, dynamic=False, mode=mode))


def check_method(job: Job, state: dict[str, Any]) -> None:
    """Raise InputError where a checkpoint is of another recipe."""
    if state["recipe"] != method(job.recipe):
        raise InputError(
            "expected a checkpoint of this recipe, got one of another: resume with the settings "
            "in the folder's recipe.toml, or train into a new folder"
        )


def method(recipe: Recipe) -> dict[str, Any]:
    """What a checkpoint must agree with: all but where and how the run is carried out."""
    sections = recipe.as_dict()
    sections["data"] = {k: v for k, v in sections["data"].items() if k not in ("dir", "workers")}
    sections["run"] = {"seed": recipe.run.seed}
    return sections
