"""Trainer: trains a recipe epoch by epoch, and writes the run's folder.

A ``Trainer`` builds what the recipe names, and goes through the epochs that its ``Pruner`` plans.
Their batches are trained by ``LocalEpochs`` or ``ServedEpochs``, which differ in who computes
gradients. After each epoch come its evaluation, its metrics and a checkpoint, and after the last
one the summary.
"""

import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fineprune.distributed.all_reduce import RankGroup, joined
from fineprune.errors import InputError, Stopped, TrainingDiverged
from fineprune.networks.weights import load_weights
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.pruning.pruner import Pruner
from fineprune.runs.files import append_metrics, epoch_file, write_array, write_json
from fineprune.runs.folder import RunFolder
from fineprune.runs.lock import check_locked, only_writer
from fineprune.runs.summary import Summary
from fineprune.training.checkpoint import (
    checkpoint_of,
    finished_summary,
    recipe_of,
    save_checkpoint,
)
from fineprune.training.data import load_data
from fineprune.training.epoch_totals import PARTS, EpochTotals
from fineprune.training.evaluate import Evaluation, evaluate
from fineprune.training.hardware import resolved, wait_for
from fineprune.training.local_epochs import LocalEpochs
from fineprune.training.moving_average import MovingAverage
from fineprune.training.network import precision, recipe_network
from fineprune.training.random_state import random_state, seeded, set_random_state
from fineprune.training.recipe import Recipe
from fineprune.training.results import detection, summary, write_evidence
from fineprune.training.served_epochs import ServedEpochs, check_can_serve
from fineprune.training.stop import StopRequest, stop_requests
from fineprune.writing import make_folder

_LOGGER = logging.getLogger("fineprune.training")

OnEpoch = Callable[[dict[str, Any]], None]


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    on_epoch: OnEpoch | None = None,
) -> Summary:
    """Train a recipe, write its run folder, and return its summary.

    Under ``torchrun``, the processes train together: ``batch_size`` is the batch size of each
    process, and rank 0 writes the folder, which all processes must be able to read.

    Args:
        recipe: The recipe to train.
        folder: The run's folder. No other process may write to it at the same time.
        resume: Whether to continue from the folder's checkpoint, which may have been written in the
            middle of an epoch. A finished run is not changed. Without a checkpoint, a run begins,
            and a warning says so.
        on_epoch: A function that is called on rank 0 with the metrics of each epoch.
    """
    files = RunFolder(folder)
    recipe = resolved(recipe, frozen=recipe_of(files) if resume else None)
    if recipe.distributed.served:
        check_can_serve(recipe)
    if (stale := recipe.stale_momentum) is not None:
        _LOGGER.warning("%s", stale)
    with (
        # A signal that comes while this process waits for the other ranks ends it, because there is
        # nothing to save yet.
        joined(recipe.run.device) as ranks,
        stop_requests() as stop,
        contextlib.ExitStack() as lock,
        seeded(recipe.run.seed, recipe.run.device),
        _threads(recipe),
    ):
        # If rank 0 cannot lock the folder, every rank raises the error.
        ranks.from_main(lambda: lock.enter_context(only_writer(folder)))
        finished, begun = ranks.from_main(
            lambda: (finished_summary(recipe, files, resume), files.checkpoint.exists())
        )
        if finished is not None:
            return finished
        if resume and ranks.main and not begun:
            _LOGGER.warning("%s holds no checkpoint to resume: the run begins anew", folder)
        with stop.at_once("before the first epoch"):  # Loading data may take minutes.
            saved = checkpoint_of(files, recipe) if begun else None
            trainer = Trainer(recipe, files, ranks, saved)
        with trainer.epochs.running(stop):
            trainer.train(stop, saved, on_epoch)
            return ranks.from_main(trainer.finish)


class Trainer:
    """The training of a recipe on one rank.

    The initial weights are drawn from torch's current random state, or read from a file, which all
    ranks do; workers of parameter servers receive them from here.

    Args:
        recipe: The recipe, without "auto" settings.
        files: The folder of the run.
        ranks: The processes that train together by all-reduce; with parameter servers, only this
            process.
        saved: The checkpoint that the run continues from; None for a new run.

    Attributes:
        data: The training data and the evaluation batches.
        model: The bare network, whose state is saved.
        pruner: Chooses the samples of each epoch.
        average: The moving average of the weights, which rank 0 evaluates in their place; None
            without one.
        records_logits: Whether logits are recorded: for the history, or as the policy needs them.
        epochs: What trains the batches of an epoch.
        digests: The digests of the data and of the pretrained weights with which the run began.
    """

    def __init__(
        self, recipe: Recipe, files: RunFolder, ranks: RankGroup, saved: dict[str, Any] | None
    ) -> None:
        training, policy = recipe.training, recipe.policy()
        self.recipe, self.files, self.ranks = recipe, files, ranks
        before = random_state(recipe.run.device)
        begun = None if saved is None else saved["digests"]
        self.data = load_data(recipe, begun, None if saved is None else files.path)
        set_random_state(before, recipe.run.device)  # A user's function may seed that of the GPU.
        if any(digests != self.data.digests for digests in ranks.gather(self.data.digests)):
            raise InputError(
                f"expected the same data from {recipe.data.name} on all ranks, got different data: "
                f"return the same data on every call (seed the split)"
            )
        self.model = recipe_network(recipe, self.data)
        self.digests = begun or {**self.data.digests, "weights": self._load_pretrained()}
        self.pruner = Pruner(
            self.data.num_samples,
            policy,
            seed=recipe.run.order_seed,
            batch_size=training.batch_size * recipe.distributed.batches_per_update,
            accumulation=recipe.accumulation,
            drop_last=training.drop_last,
        )
        self.average = None
        if training.ema is not None and ranks.main:
            self.average = MovingAverage(self.model, training.ema)
        self.records_logits = recipe.run.history or policy.needs_ranking
        self.epochs: LocalEpochs | ServedEpochs
        if recipe.distributed.served:
            self.epochs = ServedEpochs(self, None if saved is None else saved["servers"])
        else:
            self.epochs = LocalEpochs(self)

    def train(
        self, stop: StopRequest, saved: dict[str, Any] | None, on_epoch: OnEpoch | None = None
    ) -> None:
        """Train all epochs, or those that a checkpoint leaves.

        Raises:
            Stopped: This rank or another was asked to stop, and a checkpoint was written.
        """
        ranks, pruner, start = self.ranks, self.pruner, None
        totals = self._new_totals()
        if saved is None:
            ranks.from_main(lambda: self.files.begin(self.recipe.to_toml()))
            ranks.from_main(lambda: self.data.save(self.files.path))
        else:
            if self.load_state_dict(saved, totals):
                # An epoch whose batches were all trained still lacks its metrics.
                start = pruner.position.epoch
            ended = saved["metrics"]
            ranks.from_main(lambda: self.files.go_on(self.recipe.to_toml(), **ended))
        totals.started = time.perf_counter()
        for epoch in pruner.epochs(start):
            # The clock was started at the end of the last epoch, so that selecting samples is
            # included.
            totals.bookkeeping_seconds += time.perf_counter() - totals.started
            if not self.epochs.train(epoch, totals, self.save, stop):
                self.save(totals)
                ranks.leave_together()
                number = stop.number or signal.SIGTERM  # Perhaps another rank received it.
                place = f"in epoch {epoch + 1}, after {self.epochs.counted} {totals.batches}"
                raise Stopped(number, f"{place}, and wrote a checkpoint")
            metrics = self._end_epoch(epoch, totals)
            if self._is_last(epoch) or (epoch + 1) % self.recipe.run.checkpoint_every == 0:
                self.save(None)
            if ranks.main and on_epoch is not None:
                on_epoch(metrics)
            totals = self._new_totals()

    def save(self, totals: EpochTotals | None) -> None:
        """Write a checkpoint, inside an epoch with its totals. Every rank must call it."""
        if totals is not None:
            totals.stop_clock()
        saved = self.state_dict(totals)
        if self.ranks.main:
            ended = self.pruner.plan.epoch + (0 if totals else 1)
            saved["metrics"] = {"epochs": ended, "digest": self.files.metrics_digest(ended)}
            check_locked(self.files.path)
            save_checkpoint(self.files.checkpoint, saved)
        if totals is not None:
            totals.started = time.perf_counter()  # Writing is not part of the training.

    def state_dict(self, totals: EpochTotals | None) -> dict[str, Any]:
        """Return the content of a checkpoint. Every rank must call it, because it communicates."""
        if self.ranks.size > 1:
            self.pruner.synchronize()
        saved = {
            "recipe": self.recipe.method(),
            "digests": self.digests,
            "model": self.model.state_dict(),
            "pruner": self.pruner.state_dict(),
            "random": self.ranks.gather(random_state(self.recipe.run.device)),
            "epoch_so_far": None if totals is None else totals.state_dict(self.ranks),
            **self.epochs.state_dict(inside=totals is not None),
        }
        if self.average is not None:
            saved["average"] = self.average.state_dict()
        return saved

    def load_state_dict(self, saved: dict[str, Any], totals: EpochTotals) -> bool:
        """Load the content of a checkpoint, which may come from another number of ranks.

        Returns:
            Whether it was written inside an epoch, whose sums are then put into the totals.
        """
        self.model.load_state_dict(saved["model"])
        if self.average is not None:
            self.average.load_state_dict(saved["average"])
        self.pruner.load_state_dict(saved["pruner"])
        ranks, before = self.ranks, len(saved["random"])
        if ranks.rank < before:
            set_random_state(saved["random"][ranks.rank], self.recipe.run.device)
        self.epochs.load_state_dict(saved)
        if saved["epoch_so_far"] is not None:
            totals.load_state_dict(saved["epoch_so_far"], ranks)
        if before != ranks.size:
            samples = self.pruner.shape.multiple
            if ranks.main:
                _LOGGER.warning(
                    "continues with %d processes after %d, so a step has %d samples after %d, and "
                    "the learning rate stays as it is",
                    *(ranks.size, before, samples, samples // ranks.size * before),
                )
            # What is left fills the other batches on the current number of ranks.
            totals.batches = self.pruner.position.batches
        return saved["epoch_so_far"] is not None

    def finish(self) -> Summary:
        """Write and return the summary of the run, whose epochs are all trained."""
        result = summary(self)
        write_json(self.files.summary, result)
        return result

    def _end_epoch(self, epoch: int, totals: EpochTotals) -> dict[str, Any]:
        """End an epoch whose batches are trained, write its results, and return its metrics."""
        recipe, ranks, pruner, files = self.recipe, self.ranks, self.pruner, self.files
        # Otherwise, the last steps would count as bookkeeping.
        wait_for(torch.device(recipe.run.device))
        loss, losses = totals.mean_losses(ranks)
        if not math.isfinite(loss):
            data = recipe.data
            own = f", or check that all samples of {data.name} are finite" if data.own else ""
            raise TrainingDiverged(
                f"the mean loss of epoch {epoch + 1} is {loss}: the training diverged, so try a "
                f"smaller training.lr than {recipe.training.lr:g}{own}"
            )
        policy, counts = pruner.policy, None
        with totals.bookkeeping():
            if pruner.watch is not None and (self.data.wrong is not None or self._is_last(epoch)):
                pruner.synchronize()
            seen = totals.merged_history(ranks)
            if isinstance(policy, ScheduledPolicy) and policy.schedule.clears(epoch):
                counts = pruner.counts  # Those of the window that ends.
            pruner.end_epoch()
        totals.stop_clock()
        self.epochs.load_into_model(totals)
        metrics = totals.metrics(recipe, pruner, ranks, epoch, loss)
        metrics["losses"] = losses
        with ranks.wait_for_main(f"epoch {epoch}"):
            if ranks.main:
                check_locked(files.path)
                if counts is None and self._is_last(epoch):
                    counts = pruner.counts
                if counts is not None:
                    write_array(epoch_file(files.counts, epoch), counts.numpy())
                self._write_results(metrics, seen)
        return metrics

    def _write_results(self, metrics: dict[str, Any], seen: torch.Tensor | None) -> None:
        """Evaluate if the recipe asks for it, and write metrics and the epoch's history."""
        epoch, data, files, watch = metrics["epoch"], self.data, self.files, self.pruner.watch
        training, evaluation = self.recipe.training, None
        left = training.epochs - 1 - epoch
        if (epoch + 1) % training.evaluate_every == 0 or left < training.evaluate_last:
            evaluation = self._evaluate(metrics)
        if data.wrong is not None and watch is not None:
            ranking = watch.ranking()
            found = detection(ranking.scores.cpu().numpy(), ranking.num_suspects, data.wrong)
            metrics["suspicion"] = asdict(found)
        if seen is not None:
            losses = torch.where(seen.isneginf(), torch.nan, seen)
            write_array(epoch_file(files.history, epoch), losses.numpy())
        if self._is_last(epoch) and (seen is not None or watch is not None):
            assert evaluation is not None
            make_folder(files.history)
            write_evidence(files.history, data, watch, evaluation)
        append_metrics(files.metrics, metrics)

    def _evaluate(self, metrics: dict[str, Any]) -> Evaluation:
        """Evaluate the network, or the moving average of its weights, and add this to metrics."""
        started, data = time.perf_counter(), self.data
        network = self.model if self.average is None else self.average.network
        run, which = self.recipe.run, data.evaluated_on
        batches = (batch for _, batch in data.evaluation)
        found = evaluate(network, batches, run.device, precision(run), data.classes)
        metrics |= {f"{which}_loss": found.loss, f"{which}_accuracy": found.accuracy}
        if found.top5 is not None:
            metrics[f"{which}_top5"] = found.top5
        metrics["evaluate_seconds"] = time.perf_counter() - started
        unknown = int((found.predictions < 0).sum())
        if unknown:
            _LOGGER.warning(
                "epoch %d: the network returns NaN for %d of %d samples of the %s set, which count "
                "as wrong, and its mean loss is not known: check that these samples are finite",
                *(metrics["epoch"] + 1, unknown, len(found.predictions), which),
            )
        return found

    def _new_totals(self) -> EpochTotals:
        """Return the totals of an epoch that starts now, with all sums at 0."""
        run, number = self.recipe.run, self.data.num_samples
        history = None
        if run.history:
            history = torch.full((number,), -torch.inf, dtype=torch.float16, device=run.device)
        return EpochTotals(torch.zeros(PARTS, device=run.device), history)

    def _is_last(self, epoch: int) -> bool:
        return epoch == self.recipe.training.epochs - 1

    def _load_pretrained(self) -> str | None:
        """Load the weights that the recipe names, if any, and return the digest of their file."""
        weights, classes = self.recipe.network.weights, self.data.classes
        if weights is None:
            return None
        loaded = load_weights(self.model, Path(weights), classes)
        if loaded.new_head is not None and self.ranks.main:
            _LOGGER.warning(
                "%s has %d classes, the network has %d: its last layer, %s, starts as initialised",
                *(weights, loaded.classes, classes, loaded.new_head),
            )
        return loaded.digest


@contextlib.contextmanager
def _threads(recipe: Recipe) -> Iterator[None]:
    """Let torch use the recipe's number of threads, unless workers compute."""
    before = torch.get_num_threads()
    if not recipe.distributed.served:
        torch.set_num_threads(recipe.run.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
