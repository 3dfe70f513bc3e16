"""LocalEpochs: trains in this process, alone or together with other ranks by all-reduce."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from fineprune.distributed.all_reduce import StopVote
from fineprune.distributed.optimizer_rate import set_rate
from fineprune.distributed.parameter_servers.flat_layout import trained_parameters
from fineprune.distributed.simulated_workers import SimulatedWorkers
from fineprune.errors import InputError
from fineprune.training.data import EpochLoader
from fineprune.training.epoch_totals import EpochTotals
from fineprune.training.learning_rate import rate_at
from fineprune.training.network import precision, training_losses, training_mode
from fineprune.training.optimizer import build_optimizer, load_optimizer
from fineprune.training.random_state import reseed
from fineprune.training.stop import StopRequest

if TYPE_CHECKING:
    from fineprune.training.trainer import Trainer


class LocalEpochs:
    """Trains the batches of an epoch on this rank's replica of the network.

    Args:
        trainer: The training, whose data, network and pruner are built.

    Raises:
        InputError: Every batch would be dropped, or there are several ranks to simulate workers.
    """

    counted = "batch"

    def __init__(self, trainer: "Trainer") -> None:
        recipe, ranks, model = trainer.recipe, trainer.ranks, trainer.model
        run, training = recipe.run, recipe.training
        # Not the trainer, whose loader processes would then not end with it.
        self._recipe, self._ranks, self._model, self._pruner = recipe, ranks, model, trainer.pruner
        self._average, self._records_logits = trainer.average, trainer.records_logits
        samples, size = len(trainer.pruner.sampler), training.batch_size
        if training.drop_last and samples < size:
            raise InputError(
                f"expected training.batch_size of at most {samples}, the samples of each process, "
                f"with training.drop_last, got {size}: every batch would be dropped"
            )
        self._simulated = self._simulated_workers() if recipe.distributed.simulate else None
        forward = model
        if run.compile == "on":
            # On a GPU, CUDA graphs are used, because kernel launches limit the speed of small
            # networks. There are at most two batch shapes (whole batches, and the last batch of a
            # full epoch), and the network is compiled for each of them.
            mode = "reduce-overhead" if run.device.startswith("cuda") else "default"
            forward = cast(nn.Module, torch.compile(model, dynamic=False, mode=mode))
        if ranks.rank:
            # All ranks draw the same initial weights, but must draw different numbers in training.
            reseed(run.seed, ranks.rank, run.device)
        self._forward: Any = ranks.replicate(model, forward)
        self._optimizer = build_optimizer(trained_parameters(model), training)
        self._loader = EpochLoader(
            trainer.data.train, trainer.pruner.sampler, size, drop_last=training.drop_last
        )
        self._vote = StopVote(ranks)

    @contextlib.contextmanager
    def running(self, stop: StopRequest) -> Iterator[None]:
        """Do nothing: this process is all that trains."""
        yield

    def train(
        self,
        epoch: int,
        totals: EpochTotals,
        save: Callable[[EpochTotals], None],
        stop: StopRequest,
    ) -> bool:
        """Train the batches of an epoch, or the remaining ones after a resume.

        Args:
            epoch: The epoch, from 0.
            totals: The sums over the batches trained so far, to which this method adds.
            save: Saves a checkpoint in the middle of the epoch.
            stop: Says when to stop.

        Returns:
            Whether the last batch was trained. If not, all ranks stopped after the same step.
        """
        recipe, ranks, pruner = self._recipe, self._ranks, self._pruner
        optimizer, simulated = self._optimizer, self._simulated
        training, run, broken = recipe.training, recipe.run, self._loader.broken
        batches, accumulation = len(self._loader), recipe.accumulation
        autocast, rate = precision(run), -1.0
        # The rate of simulated workers follows the updates, like that of real ones.
        each = recipe.distributed.simulated_batches
        updates = totals.planned = -(-batches // each)
        first = totals.batches  # Optimizer steps begin here, also on another number of ranks.
        training_mode(self._model, recipe.network.freeze)
        if simulated and not first:
            simulated.begin_epoch(epoch)
        for index, (x, y) in self._loader:
            layout = torch.channels_last if x.ndim == 4 else torch.preserve_format
            x = x.to(run.device, memory_format=layout, non_blocking=True)
            y = y.to(run.device, non_blocking=True)
            new_rate = rate_at(training, epoch + totals.batches // each / updates)
            if new_rate != rate:
                rate = new_rate
                set_rate(optimizer, rate)
            # The last accumulation window of an epoch may have fewer batches. Its gradient is the
            # mean over the batches that it has.
            begin = totals.batches - (totals.batches - first) % accumulation
            end = min(begin + accumulation, batches)
            window, step_follows = end - begin, totals.batches + 1 == end
            # The ranks average gradients only in the backward pass before an optimizer step.
            waits = ranks.size > 1 and not step_follows
            with autocast, self._forward.no_sync() if waits else contextlib.nullcontext():
                logits = self._forward(x)
            losses = training_losses(logits, y, training)
            with totals.bookkeeping():
                # User-defined data may have probabilities in place of labels.
                watched = (logits, y) if self._records_logits and y.ndim == 1 else ()
                loss = pruner.record(index, losses, *watched)
            totals.add(index, losses, batches)
            if broken is not None:
                totals.broken = (totals.broken or 0) + broken.take_replaced()
            (loss / window if window > 1 else loss).backward()
            if not step_follows:
                continue
            if simulated:
                simulated.step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()
            totals.steps += 1
            if self._average is not None:
                self._average.update(self._model)
            if self._vote.says_stop(bool(stop)):
                return False
            every = run.checkpoint_steps
            if every and end // every > begin // every:
                save(totals)
        if simulated:
            simulated.end_epoch()
        if broken is not None:
            broken.share(ranks.gather)
        return True

    def load_into_model(self, totals: EpochTotals) -> None:
        """Do nothing: the network is in this process."""

    def state_dict(self, *, inside: bool) -> dict[str, Any]:
        """Return the state: ``inside`` an epoch, with that of the simulated workers."""
        simulated = self._simulated.state_dict() if self._simulated and inside else None
        return {"optimizer": self._optimizer.state_dict(), "simulated": simulated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, after that of the network."""
        load_optimizer(self._optimizer, state["optimizer"])
        if self._simulated is not None and state["simulated"] is not None:
            self._simulated.load_state_dict(state["simulated"])

    def _simulated_workers(self) -> SimulatedWorkers:
        strategy, ranks = self._recipe.distributed, self._ranks
        if ranks.size > 1:
            raise InputError(
                f"expected distributed.simulate in one process, got {strategy.simulate} on "
                f"{ranks.size} ranks: start it without torchrun"
            )
        return SimulatedWorkers(
            self._model,
            strategy.simulated_groups,
            strategy.step_seconds,
            strategy.step_spread,
            strategy.staleness_bound,
            self._recipe.run.seed,
        )
