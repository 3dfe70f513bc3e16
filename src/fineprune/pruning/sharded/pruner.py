"""ShardedPruner: a pruner whose ranks each know the counts of their own samples only."""

import copy
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from fineprune.errors import InputError, check_whole_number
from fineprune.pruning.dropping_count import Counts
from fineprune.pruning.epoch_cycle import EpochCycle, Phase, Progress
from fineprune.pruning.epoch_loop import EpochLoop
from fineprune.pruning.indexed import indexed_and_length
from fineprune.pruning.plan_options import NAMES, PlanOptions
from fineprune.pruning.policies.fine_pruning import FinePruning
from fineprune.pruning.policies.full import FullData
from fineprune.pruning.policies.policy import Policy, check_is_policy
from fineprune.pruning.policies.random import RandomPruning
from fineprune.pruning.pruner_state import check_state, plain, unsynchronized
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.run_report import RunTotals
from fineprune.pruning.sharded.fine_pruning import OwnedFinePruning
from fineprune.pruning.sharded.sampler import ShardedSampler
from fineprune.pruning.sharded.selection import MOST_TIES, full_share, pruned_share
from fineprune.pruning.sharded.share import Share, owned_samples
from fineprune.pruning.step_counts import BatchShape, StepCounts

STATE_VERSION = 2

# What is the same in the states of all ranks that were saved after the same batch.
_COMMON = ("epoch", "open", "batches", "nonfinite")

# The number of samples that were loaded is a guess if some were left out of the last batch.
_KEYS = (*_COMMON, "samples", "kept", "learned", "totals")

# The ranks flush their buffers when each holds about so many losses (12 MB).
_FLUSH_AT = 1 << 20


class ShardedPruner(EpochLoop[Share]):
    """A pruner for more samples than one process should count: each rank counts its own samples.

    Rank r of R owns the samples from ``r * N // R`` to ``(r + 1) * N // R - 1``, and holds only
    their counts and marks (two bytes per sample, plus four bytes per sample that an epoch keeps).
    As in ``FinePruning``, the samples with the smallest counts of all ranks are kept, and ties are
    broken uniformly at random. Each rank trains its own samples in a random order. Ranks that keep
    more samples than others hand some over, so that all ranks train equally many.

    The training loop is that of ``Pruner``. The following calls exchange data, so all ranks must
    make them at the same time: the constructor, ``set_epoch``, ``start_epoch``, each pass of the
    loop over ``epochs()``, ``end_epoch``, ``synchronize``, ``load_state_dict`` and, once per
    million losses, ``record``. Epochs may be left out, but not repeated.

    Args:
        dataset_or_length: The map-style data set of all ranks together, or its number of samples N,
            at least one per rank. Sample indices refer to this data set.
        policy: The policy: ``FinePruning``, ``RandomPruning`` or ``FullData``, without options.
        seed: The seed of the order of the samples and of the random choice among ties.
        batch_size: Number of samples per batch and rank.
        accumulation: Number of batches per optimizer step.
        drop_last: Whether an incomplete last batch is dropped.
        process_group: The group whose ranks share the samples. By default,
            ``torch.distributed.group.WORLD``.

    Attributes:
        sampler: The sampler of this rank.
        owned: The samples that this rank owns, as a range.
        nonfinite: Number of NaN or infinite losses that all ranks together recorded in the last
            epoch that ended; 0 if the policy needs no losses.

    Raises:
        InputError: A value is out of range or differs between the ranks; the policy is another one
            or has options; rounding to whole batches leaves nothing to skip; or this process does
            not belong to ``process_group``.
        TypeError: The data set is not map-style, or the policy is not a ``Policy``.
        RuntimeError: ``WORLD_SIZE`` is above 1, but no process group is initialised.
    """

    sampler: ShardedSampler

    def __init__(
        self,
        dataset_or_length: Any,
        policy: Policy,
        *,
        seed: int = 0,
        batch_size: int,
        accumulation: int = 1,
        drop_last: bool = False,
        process_group: Any = None,
    ) -> None:
        _check_policy(policy)
        dataset, num_samples = indexed_and_length(dataset_or_length)
        replicas = Replicas(process_group)
        check_whole_number("the number of samples", num_samples, replicas.size)
        seed = check_whole_number("seed", seed, 0)
        batch_size = check_whole_number("batch_size", batch_size, 1)
        shape = BatchShape(batch_size, accumulation, replicas.size, drop_last)
        self.owned = owned_samples(num_samples, replicas.size, replicas.rank)
        if len(self.owned) >= MOST_TIES:
            raise InputError(
                f"expected fewer than {MOST_TIES} samples per rank, got {len(self.owned)}: use "
                f"more ranks"
            )
        replicas.check_equal(
            {
                "number of samples": (num_samples, "it is that of all ranks together"),
                "seed": (seed, "give the pruner the same one"),
                "policy": (policy.settings(), "give it the same settings"),
                "batch_size, accumulation and drop_last": (shape, "give the same ones"),
            }
        )
        if isinstance(policy, FinePruning):
            policy = OwnedFinePruning(policy, self.owned)
        cycle: EpochCycle[Share] = EpochCycle()
        super().__init__(
            policy,
            dataset,
            num_samples,
            shape,
            replicas,
            seed,
            cycle=cycle,
            sampler=ShardedSampler(cycle, self.set_epoch, replicas.size),
            flush_every=max(1, _FLUSH_AT // batch_size),
            batch_size=batch_size,
        )

    @property
    def counts(self) -> torch.Tensor | None:
        """DroppingCounts of the samples in ``owned``, as of the last epoch that ended, a copy.

        The shape is ``(len(owned),)``. None if the policy does not count.
        """
        return self._policy.counts

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` (counted from 0) current, and choose its samples from the counts.

        A second call with the same epoch does nothing. If losses of an earlier epoch have been
        recorded, that epoch is ended first.

        Raises:
            InputError: The epoch is not one of the training or has ended, or ``epochs`` has another
                one in progress.
        """
        first = self._cycle.next_epoch
        if 0 <= epoch < first:
            raise InputError(
                f"expected an epoch of at least {first}, since all earlier ones have ended, got "
                f"{epoch}: loop over pruner.epochs()"
            )
        super().set_epoch(epoch)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that this rank needs to resume: its own part, without communication.

        Each rank must save its own state. It loads with ``weights_only=True``.

        Raises:
            InputError: There are several ranks, and ``synchronize()`` was not called after the last
                batch.
        """
        if self._replicas.size == 1:
            self.synchronize()
        cycle = self._cycle
        if not self._recorder.flushed:
            raise InputError(unsynchronized(cycle.epoch))
        unfinished = cycle.unfinished
        loaded = 0 if unfinished is None else self._last_batch.samples_loaded(unfinished)
        packed = {
            **self._identity(),
            "epoch": cycle.epoch,
            "open": cycle.is_open,
            "batches": self.position.batches,
            "samples": loaded // self._replicas.size,
            "nonfinite": self._recorder.nonfinite,
            "kept": self.num_kept(cycle.epoch),
            "learned": self._policy.state_dict(),
            "totals": asdict(self._report.totals),
        }
        state: dict[str, Any] = plain(packed, "the state")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of this rank. All ranks must call it.

        Raises:
            InputError: The state has another version; it comes from another rank, or from a run
                with another N, seed, policy or number of ranks; it was saved in the middle of an
                epoch that kept a different number of samples, because the batch size was different;
                the ranks saved their states after different batches; or this is called inside the
                loop over the epochs.
        """
        self._checks.check_may_load()
        remedy = (
            "each rank loads the state that it saved itself (in a distributed checkpoint, give "
            "each rank a key of its own)"
        )
        check_state(state, plain(self._identity(), "the settings"), _KEYS, {"rank": remedy})
        state = plain(state, "the state")  # ``map_location`` may have moved tensors from the CPU.
        numbers = copy.copy(self._policy)
        numbers.load_state_dict(state["learned"])  # Its windows say how many samples are kept.
        kept = StepCounts(numbers, self._num_samples, self._shape).num_kept(state["epoch"])
        if state["batches"] and kept != state["kept"]:
            raise InputError(
                f"expected a pruner state of an epoch that keeps {kept} samples, got one that "
                f"keeps {state['kept']}: resume inside an epoch with the same batch_size "
                f"and accumulation"
            )
        self._replicas.check_equal(
            {
                "batch, after which states are saved,": (
                    [state[key] for key in _COMMON],
                    "load the states of one checkpoint",
                )
            }
        )
        self._policy.load_state_dict(state["learned"])
        self._recorder.clear()
        self._recorder.nonfinite = state["nonfinite"]
        self._report.totals = RunTotals(**state["totals"])
        epoch, batches = state["epoch"], state["batches"]
        if not state["open"]:
            self._restore(self._all(epoch), Phase.ENDED)
        elif batches:
            loaded = self._replicas.maximum(np.array([state["samples"]]))
            samples = int(loaded[0]) * self._replicas.size
            self._restore(self._choose(epoch), Phase.RESTORED, batches=batches, samples=samples)
        else:
            self._restore(self._choose(epoch), Phase.PLANNED)

    # -- internals ----------------------------------------------------------------------------

    def _group_for_logits(self) -> Any:
        raise InputError(
            "expected record() of ShardedPruner without logits, since its ranks hold only the "
            "state of their own samples, but evidence on labels needs all samples: record the "
            "logits with a LabelWatch of your own on each rank, and merge() it at the end"
        )

    def _choose(self, epoch: int) -> Share:
        kept = self._number_in(epoch)
        if kept == self._num_samples:
            return self._all(epoch)
        # Without counts, all samples tie.
        counts: Counts = np.broadcast_to(np.uint8(0), len(self.owned))
        if isinstance(self._policy, OwnedFinePruning):
            counts = self._policy.owned_counts
        return pruned_share(epoch, self._num_samples, kept, counts, self._replicas, self._seed)

    def _all(self, epoch: int) -> Share:
        return full_share(
            epoch, self._num_samples, self._replicas, self._seed, self._shape.drop_last
        )

    def _follow(self, plan: Share, start: int = 0) -> int:
        self.sampler.follow(plan, start // self._replicas.size)
        return plan.number * self._replicas.size

    def _learn(self, plan: Share) -> None:
        self._policy.end_epoch(plan.epoch)

    def _end(self, progress: Progress[Share]) -> None:
        super()._end(progress)
        progress.plan = self._all(progress.plan.epoch)  # This frees the kept indices.
        self._follow(progress.plan)

    def _number(self, plan: Share) -> int:
        return self._number_in(plan.epoch)

    def _number_in(self, epoch: int) -> int:
        kept = self.num_kept(epoch)
        assert kept is not None  # The accepted policies know it in advance.
        return kept

    def _identity(self) -> dict[str, Any]:
        """Return what a saved state must agree with."""
        return {
            "version": STATE_VERSION,
            "num_samples": self._num_samples,
            "seed": self._seed,
            "settings": self._policy.settings(),
            "num_replicas": self._replicas.size,
            "rank": self._replicas.rank,
        }


def _check_policy(policy: Policy) -> None:
    """Raise an error unless the policy can choose samples by a sum over the ranks."""
    check_is_policy(policy)
    if type(policy) not in (FinePruning, RandomPruning, FullData):
        raise InputError(
            f"expected FinePruning, RandomPruning or FullData, since each rank knows only what it "
            f"has learned of its own samples, got {type(policy).__name__}: use Pruner"
        )
    options, defaults = policy.plan_options, PlanOptions()
    for name in NAMES:
        if getattr(options, name) != getattr(defaults, name):
            raise InputError(
                f"expected a policy without options, since they need the plan of all samples, got "
                f"{name}={getattr(options, name)}: leave it out, or use Pruner"
            )
