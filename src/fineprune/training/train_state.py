"""TrainState: the parts of a run, which are built from its recipe, saved and restored."""

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from fineprune.distributed.all_reduce import RankGroup, StopVote
from fineprune.distributed.parameter_servers.flat_layout import trained_parameters
from fineprune.distributed.simulated_workers import SimulatedWorkers
from fineprune.errors import InputError
from fineprune.networks.weights import load_weights
from fineprune.pruning.pruner import Pruner
from fineprune.training.data import Data, EpochLoader, load_data
from fineprune.training.left_out import check_left_out
from fineprune.training.moving_average import MovingAverage
from fineprune.training.network import precision, recipe_network
from fineprune.training.optimizer import build_optimizer, load_optimizer
from fineprune.training.random_state import random_state, reseed, set_random_state
from fineprune.training.recipe import Recipe
from fineprune.training.sample_history import SampleHistory
from fineprune.training.settings import RunSettings

if TYPE_CHECKING:
    from fineprune.distributed.parameter_servers.training import Training

_LOGGER = logging.getLogger("fineprune.training")


# The totals of an epoch that are the same on all ranks, or taken from the main one.
_SAVED = ("batches", "first", "steps", "seconds", "bookkeeping_seconds", "distributed")


@dataclass
class EpochTotals:
    """Sums over the batches of the epoch in progress on this rank; part of the checkpoint.

    Attributes:
        loss_sum: The sum of the losses; float32, shape (), on the run's device.
        samples: The number of samples trained. After a resume, those of before are on rank 0.
        batches: The number of batches trained; with parameter servers, the number of updates.
        first: The number of batches after which the windows of accumulation begin: 0, unless the
            number of ranks has changed within the epoch.
        steps: The number of optimizer steps before that.
        broken: The number of samples that replaced one whose file is broken; None if the data are
            not files, or with parameter servers.
        planned: The number of batches in the whole epoch, on which the learning rate depends.
        seconds: The wall-clock time of the training, in seconds.
        bookkeeping_seconds: The part of ``seconds`` that was spent on choosing samples and on
            recording losses.
        distributed: The report of the parameter servers; empty without them.
        history: The losses and predictions of the samples; None if the run does not keep them.
        started: The time at which the clock was last started, as ``time.perf_counter`` gives it.
    """

    loss_sum: torch.Tensor
    samples: int = 0
    batches: int = 0
    first: int = 0
    steps: int = 0
    broken: int | None = None
    planned: int = 0
    seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    distributed: dict[str, Any] = field(default_factory=dict)
    history: SampleHistory | None = None
    started: float = field(default_factory=time.perf_counter)

    def steps_so_far(self, accumulation: int) -> int:
        """Return the number of optimizer steps, that of an incomplete window included."""
        return self.steps - (self.first - self.batches) // accumulation

    def stop_clock(self) -> None:
        """Add the time since the clock was started to ``seconds``, and start the clock again."""
        now = time.perf_counter()
        self.seconds += now - self.started
        self.started = now

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Add the time that the block takes to ``bookkeeping_seconds``."""
        began = time.perf_counter()
        yield
        self.bookkeeping_seconds += time.perf_counter() - began


@dataclass
class LocalParts:
    """The parts that a rank needs to train without parameter servers.

    Attributes:
        forward: The network that is called in training: compiled, replicated, or the bare network.
        optimizer: Updates the network's parameters.
        loader: Yields the batches ``(index, (x, y))`` of an epoch.
        simulated: The simulated workers; None if the run has none.
        stop_vote: Makes all ranks stop after the same batch.
    """

    forward: nn.Module
    optimizer: torch.optim.Optimizer
    loader: EpochLoader
    simulated: SimulatedWorkers | None
    stop_vote: StopVote


@dataclass
class TrainState:
    """The parts of a run on one rank.

    Attributes:
        recipe: The recipe, without "auto" settings.
        ranks: The processes that train together by all-reduce; with parameter servers, only this
            process.
        data: The training data and the evaluation batches.
        model: The bare network, whose state is saved.
        pruner: Chooses the samples of each epoch.
        autocast: The context in which the network is called, which sets the precision.
        average: The moving average of the weights, which is evaluated in their place; None on all
            ranks but the main one, and if the recipe asks for none.
        weights_digest: The SHA-256 digest of the file with the pretrained weights from which the
            run began; None if it began from the initialisation.
        local: The parts for training in this process; None with parameter servers.
        served: The training on parameter servers and workers; None without them.
    """

    recipe: Recipe
    ranks: RankGroup
    data: Data
    model: nn.Module
    pruner: Pruner
    autocast: torch.autocast
    average: MovingAverage | None = None
    weights_digest: str | None = None
    local: LocalParts | None = None
    served: "Training | None" = None

    @property
    def evaluated(self) -> nn.Module:
        """The network to evaluate: the moving average of the weights if there is one."""
        return self.model if self.average is None else self.average.network

    @property
    def records_logits(self) -> bool:
        """Whether the logits are recorded: for the history, or because the policy uses them."""
        return self.recipe.run.history or self.pruner.policy.needs_ranking

    def of_all_ranks(self, number: int) -> int:
        """Return the sum of a number over all ranks. A collective."""
        return int(self.ranks.sum(torch.tensor(number, device=self.recipe.run.device)))

    def new_totals(self) -> EpochTotals:
        """Return the totals of an epoch that starts now, with all sums at 0."""
        run = self.recipe.run
        history = SampleHistory(self.data.num_samples, run.device) if run.history else None
        return EpochTotals(torch.zeros((), device=run.device), history=history)


def build_state(
    recipe: Recipe, ranks: RankGroup, saved: dict[str, Any] | None, folder: Path
) -> TrainState:
    """Load the data, and build the network and the pruner.

    The initial weights are drawn from torch's current random state. This is the only place that
    reads pretrained weights: other ranks read the same file, and workers of parameter servers
    receive the weights from here.

    Args:
        recipe: The recipe, without "auto" settings.
        ranks: The processes that train together.
        saved: The checkpoint that the run continues from, with all weights; None for a new run.
        folder: The folder of the run.
    """
    before = random_state(recipe.run.device)
    data = load_data(recipe) if saved is None else load_data(recipe, saved["data"], folder)
    set_random_state(before, recipe.run.device)  # A user's function may seed that of the GPU.
    if len(set(ranks.gather((data.fingerprint, data.left_out_digest)))) > 1:
        raise InputError(
            f"expected the same data from {recipe.data.name} on all ranks, got different data: "
            f"return the same data on every call (seed the split)"
        )
    model = recipe_network(recipe, data)
    digest = _load_pretrained(model, recipe, data, warn=ranks.main) if saved is None else None
    pruner = Pruner(
        data.num_samples,
        recipe.policy(),
        seed=recipe.run.order_seed,
        batch_size=recipe.training.batch_size * recipe.distributed.batches_per_update,
        accumulation=recipe.accumulation,
        drop_last=recipe.training.drop_last,
    )
    decay = recipe.training.ema
    average = MovingAverage(model, decay) if decay is not None and ranks.main else None
    return TrainState(recipe, ranks, data, model, pruner, precision(recipe.run), average, digest)


def _load_pretrained(model: nn.Module, recipe: Recipe, data: Data, *, warn: bool) -> str | None:
    """Load the pretrained weights that a recipe names, and return the digest of their file."""
    if recipe.network.weights is None:
        return None
    loaded = load_weights(model, Path(recipe.network.weights), data.classes)
    if loaded.new_head is not None and warn:
        _LOGGER.warning(
            "%s has %d classes, the network has %d: its last layer, %s, starts as initialised",
            recipe.network.weights,
            loaded.classes,
            data.classes,
            loaded.new_head,
        )
    return loaded.digest


def build_local_parts(state: TrainState) -> LocalParts:
    """Build the parts that a rank needs to train without parameter servers."""
    recipe, ranks, model = state.recipe, state.ranks, state.model
    strategy, simulated = recipe.distributed, None
    samples, size = len(state.pruner.sampler), recipe.training.batch_size
    if recipe.training.drop_last and samples < size:
        raise InputError(
            f"expected training.batch_size of at most {samples}, the samples of each process, with "
            f"training.drop_last, got {size}: every batch would be dropped"
        )
    if strategy.simulate:
        if ranks.size > 1:
            raise InputError(
                f"expected distributed.simulate in one process, got {strategy.simulate} on "
                f"{ranks.size} ranks: start it without torchrun"
            )
        simulated = SimulatedWorkers(
            model,
            strategy.simulated_groups,
            strategy.step_seconds,
            strategy.step_spread,
            strategy.staleness_bound,
            recipe.run.seed,
        )
    forward = _compiled(model, recipe.run) if recipe.run.compile == "on" else model
    if ranks.rank:
        # All ranks draw the same initial weights, but must draw different numbers in training.
        reseed(recipe.run.seed, ranks.rank, recipe.run.device)
    return LocalParts(
        forward=ranks.replicate(model, forward),
        optimizer=build_optimizer(trained_parameters(model), recipe.training),
        loader=EpochLoader(
            state.data.train,
            state.pruner.sampler,
            recipe.training.batch_size,
            drop_last=recipe.training.drop_last,
        ),
        simulated=simulated,
        stop_vote=StopVote(ranks),
    )


def checkpoint_state(state: TrainState, totals: EpochTotals | None) -> dict[str, Any]:
    """Return the content of a checkpoint. Every rank must call it, because it communicates.

    The totals are those of the epoch in progress; None at the end of an epoch.
    """
    epoch = None
    if state.ranks.size > 1:
        state.pruner.synchronize()
    if totals is not None:
        epoch = {
            "loss_sum": state.ranks.sum(totals.loss_sum),
            "samples": state.of_all_ranks(totals.samples),
            **{name: getattr(totals, name) for name in _SAVED},
        }
        if totals.broken is not None:
            epoch["broken"] = state.of_all_ranks(totals.broken)
        if totals.history is not None:
            epoch["history"] = totals.history.merged(state.ranks)
    saved = {
        "recipe": state.recipe.method(),
        "model": state.model.state_dict(),
        "pruner": state.pruner.state_dict(),
        "random": state.ranks.gather(random_state(state.recipe.run.device)),
        "epoch_so_far": epoch,
        "labels": state.data.labels_digest,
        "data": state.data.fingerprint,
        "left_out": state.data.left_out_digest,
        "weights": state.weights_digest,
    }
    if state.average is not None:
        saved["average"] = state.average.state_dict()
    if state.local is not None:
        simulated = state.local.simulated
        saved["optimizer"] = state.local.optimizer.state_dict()
        saved["simulated"] = simulated.state_dict() if simulated and totals else None
    if state.served is not None:
        saved["servers"] = state.served.state()
    return saved


def check_labels(recipe: Recipe, data: Data, begun: str | None) -> None:
    """Check that data have the labels with which a run began."""
    if data.labels_digest == begun:
        return
    raise InputError(
        f"expected in {recipe.data.labels} the labels with which the run began, got others: "
        f"restore the file, or train into a new folder"
    )


def restore(state: TrainState, saved: dict[str, Any]) -> EpochTotals | None:
    """Restore a run from the content of a checkpoint, which may come from another number of ranks.

    Returns:
        The sums of the epoch in progress; None if the checkpoint is from the end of an epoch.
    """
    recipe, ranks = state.recipe, state.ranks
    check_labels(recipe, state.data, saved["labels"])
    check_left_out(recipe.data.without, state.data.left_out_digest, saved["left_out"])
    state.weights_digest = saved["weights"]
    state.model.load_state_dict(saved["model"])
    if state.average is not None:
        state.average.load_state_dict(saved["average"])
    state.pruner.load_state_dict(saved["pruner"])
    if ranks.rank < len(saved["random"]):
        set_random_state(saved["random"][ranks.rank], recipe.run.device)
    before, samples = len(saved["random"]), state.pruner.shape.multiple
    if before != ranks.size and ranks.main:
        _LOGGER.warning(
            "continues with %d processes after %d, so a step has %d samples after %d, and the "
            "learning rate stays as it is",
            ranks.size,
            before,
            samples,
            samples // ranks.size * before,
        )
    if state.local is not None:
        load_optimizer(state.local.optimizer, saved["optimizer"])
    epoch = saved["epoch_so_far"]
    if epoch is None:
        return None
    if state.local is not None and state.local.simulated is not None:
        state.local.simulated.load_state_dict(saved["simulated"])
    history = epoch.pop("history", None)
    totals = dataclasses.replace(state.new_totals(), **epoch)
    if history is not None and totals.history is not None:
        totals.history.load(*history)
    totals.loss_sum = totals.loss_sum.to(recipe.run.device)
    if before != ranks.size:
        totals.steps = totals.steps_so_far(recipe.accumulation)
        # What is left fills the other batches on the current number of ranks.
        totals.first = totals.batches = state.pruner.position.batches
    if not ranks.main:
        totals.loss_sum.zero_()
        totals.samples = 0
        totals.broken = None if totals.broken is None else 0
    return totals


def _compiled(model: nn.Module, run: RunSettings) -> nn.Module:
    # On a GPU, CUDA graphs are used, because kernel launches limit the speed of small networks.
    # There are at most two batch shapes (whole batches, and the last batch of a full epoch), and
    # the network is compiled for each of them.
    mode = "reduce-overhead" if run.device.startswith("cuda") else "default"
    return cast(nn.Module, torch.compile(model, dynamic=False, mode=mode))
