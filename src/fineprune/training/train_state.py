"""TrainState: what a run consists of, built from its recipe, saved and restored."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from fineprune.distributed.all_reduce import RankGroup, StopVote
from fineprune.distributed.simulated_workers import SimulatedWorkers
from fineprune.errors import InputError
from fineprune.pruning.pruner import Pruner
from fineprune.training.data import Data, load_data
from fineprune.training.network import precision, recipe_network
from fineprune.training.optimizer import build_optimizer, load_optimizer
from fineprune.training.random_state import random_state, reseed, set_random_state
from fineprune.training.recipe import Recipe
from fineprune.training.settings import RunSettings

if TYPE_CHECKING:
    from fineprune.distributed.parameter_servers.coordinator import Coordinator


@dataclass
class EpochTotals:
    """Sums over the batches of the epoch in progress on this rank; part of the checkpoint.

    Attributes:
        loss_sum: The sum of the losses; float32, shape (), on the run's device.
        samples: The number of samples trained.
        batches: The number of batches trained; with parameter servers, of updates.
        planned: The number of batches in the whole epoch, on which the learning rate depends.
        seconds: Wall-clock time of the training.
        bookkeeping_seconds: The part of it that went into choosing samples and recording losses.
        distributed: What the parameter servers reported of the epoch; empty without them.
        started: When the clock was last started, on ``time.perf_counter``.
    """

    loss_sum: torch.Tensor
    samples: int = 0
    batches: int = 0
    planned: int = 0
    seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    distributed: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def stop_clock(self) -> None:
        """Add the time since the clock was started to the seconds, and start it again."""
        now = time.perf_counter()
        self.seconds += now - self.started
        self.started = now

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Add the time that the block takes to the bookkeeping."""
        began = time.perf_counter()
        yield
        self.bookkeeping_seconds += time.perf_counter() - began


@dataclass
class LocalParts:
    """What a rank trains with if there are no parameter servers.

    Attributes:
        forward: The network as it is trained: compiled, replicated, or just itself.
        optimizer: Updates the network's parameters.
        loader: Yields the batches ``(index, (x, y))`` of an epoch.
        simulated: Simulated asynchronous workers; None if the run has none.
        stop_vote: Lets all ranks stop after the same batch.
    """

    forward: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    simulated: SimulatedWorkers | None
    stop_vote: StopVote


@dataclass
class TrainState:
    """What a run consists of on one rank.

    Attributes:
        recipe: As run, with nothing "auto" left in it.
        ranks: The processes that train together by all-reduce; one with parameter servers.
        data: Makes the training loader and the evaluation batches.
        model: The bare network, whose state is saved.
        pruner: Chooses the samples of each epoch.
        autocast: The run's precision.
        local: What this process trains with; None with parameter servers.
        coordinator: Drives the parameter servers and their workers; None without them.
    """

    recipe: Recipe
    ranks: RankGroup
    data: Data
    model: nn.Module
    pruner: Pruner
    autocast: torch.autocast
    local: LocalParts | None = None
    coordinator: "Coordinator | None" = None

    @property
    def processes(self) -> int:
        """The number of processes that compute gradients: ranks, or workers of servers."""
        strategy = self.recipe.distributed
        return strategy.workers if strategy.served else self.ranks.size

    def new_totals(self) -> EpochTotals:
        """Return sums of nothing, with the clock started."""
        return EpochTotals(torch.zeros((), device=self.recipe.run.device))


def build_state(recipe: Recipe, ranks: RankGroup) -> TrainState:
    """Load the data and build network and pruner, from torch's current random state."""
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
    return TrainState(recipe, ranks, data, model, pruner, precision(recipe.run))


def build_local_parts(state: TrainState) -> LocalParts:
    """Build what a rank trains with if there are no parameter servers.

    Raises:
        InputError: Simulated workers are asked for on several ranks.
    """
    recipe, ranks, model = state.recipe, state.ranks, state.model
    simulate = recipe.distributed.simulate
    if simulate and ranks.size > 1:
        raise InputError(
            f"expected distributed.simulate in one process, got {simulate} on {ranks.size} ranks: "
            f"start it without torchrun"
        )
    forward = _compiled(model, recipe.run) if recipe.run.compile == "on" else model
    if ranks.rank:
        # The weights are drawn alike on all ranks; what is drawn while training must not be.
        reseed(recipe.run.seed, ranks.rank, recipe.run.device)
    return LocalParts(
        forward=ranks.replicate(model, forward),
        optimizer=build_optimizer(model.parameters(), recipe.training),
        loader=state.data.make_loader(state.pruner),
        simulated=SimulatedWorkers(model, simulate) if simulate else None,
        stop_vote=StopVote(ranks),
    )


def checkpoint_state(state: TrainState, totals: EpochTotals | None) -> dict[str, Any]:
    """Return what a checkpoint holds. With several ranks, all must call it: they exchange theirs.

    Args:
        state: The run.
        totals: The sums of the epoch in progress; None at the end of an epoch.
    """
    epoch = None
    if totals is not None:
        if state.ranks.size > 1:
            state.pruner.synchronize()
        epoch = {
            "loss_sum": state.ranks.sum(totals.loss_sum),
            "samples": totals.samples * state.ranks.size,
            "batches": totals.batches,
            "seconds": totals.seconds,
            "bookkeeping_seconds": totals.bookkeeping_seconds,
            "distributed": totals.distributed,
        }
    saved = {
        "recipe": state.recipe.method(),
        "model": state.model.state_dict(),
        "pruner": state.pruner.state_dict(),
        "random": state.ranks.gather(random_state(state.recipe.run.device)),
        "epoch_so_far": epoch,
    }
    if state.local is not None:
        simulated = state.local.simulated
        saved["optimizer"] = state.local.optimizer.state_dict()
        saved["simulated"] = simulated.state_dict() if simulated and totals else None
    if state.coordinator is not None:
        saved["servers"] = _packed_servers(state.coordinator.state())
    return saved


def restore(state: TrainState, saved: dict[str, Any]) -> EpochTotals | None:
    """Restore a run from a checkpoint that any number of ranks made.

    Returns:
        The sums of the epoch in progress; None if the checkpoint is from the end of an epoch.
    """
    recipe, ranks = state.recipe, state.ranks
    state.model.load_state_dict(saved["model"])
    state.pruner.load_state_dict(saved["pruner"])
    if ranks.rank < len(saved["random"]):
        set_random_state(saved["random"][ranks.rank], recipe.run.device)
    if state.local is not None:
        load_optimizer(state.local.optimizer, saved["optimizer"])
    epoch = saved["epoch_so_far"]
    if epoch is None:
        return None
    if state.local is not None and state.local.simulated is not None:
        state.local.simulated.load_state_dict(saved["simulated"])
    totals = EpochTotals(**epoch)
    totals.loss_sum = totals.loss_sum.to(recipe.run.device)
    totals.samples //= ranks.size
    # As many of today's batches as hold the samples that were trained.
    totals.batches = totals.batches * len(saved["random"]) // ranks.size
    if not ranks.main:
        totals.loss_sum.zero_()
    return totals


def _packed_servers(servers: dict[str, Any]) -> dict[str, Any]:
    """Make of the coordinator's state what loads with ``weights_only=True``."""
    return {
        "layout": servers["layout"],
        "servers": [
            torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in servers["servers"]
        ],
        "buffers": {name: torch.from_numpy(np.array(b)) for name, b in servers["buffers"].items()},
    }


def unpacked_servers(packed: dict[str, Any]) -> dict[str, Any]:
    """Return the coordinator's state from a checkpoint's ``servers``."""
    return {
        "layout": packed["layout"],
        "servers": [part.numpy().tobytes() for part in packed["servers"]],
        "buffers": {name: buffer.numpy() for name, buffer in packed["buffers"].items()},
    }


def _compiled(model: nn.Module, run: RunSettings) -> nn.Module:
    # On a GPU with CUDA graphs: a small network waits for launches, not for arithmetic. There are
    # two shapes at most, whole batches and a full epoch's last one, and each is compiled.
    mode = "reduce-overhead" if run.device.startswith("cuda") else "default"
    return cast(nn.Module, torch.compile(model, dynamic=False, mode=mode))
