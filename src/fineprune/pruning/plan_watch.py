"""PlanWatch: notices a training loop that does not do what the plan says.

These mistakes would otherwise remain unnoticed:

- The loop never records a loss, although the policy learns from losses.
- The loader does not use the sampler, so the samples that the plan skips are trained all the same.
- A framework shards batches that the sampler has already divided among the ranks, so a part of the
  kept samples is never trained.
- No framework shards the batches, although the pruner was told to leave this to one, or the process
  group was initialised after the pruner was made. Every rank then trains all kept samples.

An epoch in which the loop neither reads the plan nor records a loss gives no warning, because a
loop may leave out epochs on purpose. Therefore, with a policy that needs no losses, a loop that
never does either remains unnoticed.

The indices of the first batches of each epoch are copied, and they are compared with the plan when
the epoch ends. This is cheap, needs no synchronisation inside the epoch, and works for policies
that need no losses too.
"""

import numpy as np
import torch

from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.sampler import PruningSampler

# Number of epochs in a row that recorded nothing before a warning is given. In a loop that has not
# recorded anything before, one epoch that read the sampler is enough.
_SILENT_EPOCHS = 3

# The first batches of each epoch are compared with the plan: at least so many batches and indices.
_WATCHED_BATCHES = 8
_WATCHED_INDICES = 1024

# Number of pruning epochs in a row that trained skipped samples before a warning is given.
_IGNORED_EPOCHS = 3

# An epoch recorded far fewer samples than the plan keeps if it recorded at most this share of them.
_FEW = 2 / 3

# Consecutive batches follow each other in the epoch's order at a distance of one batch. If batches
# are sharded once more or recorded only now and then, the distance is two batches or more.
_FAR = 1.5

# With fewer batches, a framework may have given a rank all kept samples in order to fill a batch.
_ENOUGH_BATCHES = 4


class PlanWatch:
    """Compares the indices that one rank trains with the plans of the epochs.

    Args:
        policy: The policy that makes the plans.
        num_samples: Number of samples N in the data set.
        num_ranks: Number of ranks that train the samples of an epoch together.
        replicas: The ranks that merge what they learn.

    Attributes:
        watching: Whether ``see`` needs the next batch of the epoch.
    """

    def __init__(
        self, policy: Policy, num_samples: int, num_ranks: int, replicas: Replicas
    ) -> None:
        self._policy = policy
        self._replicas = replicas
        self._num_samples = num_samples
        self._num_ranks = num_ranks
        self._batches: list[torch.Tensor] = []
        self._watched = 0
        self.watching = True
        self._has_recorded = False
        self._silent_in_a_row = 0
        self._warned_of_silence = not policy.needs_losses
        self._ignored_in_a_row = 0
        self._warned_of_gaps = False
        self._warned_of_repeats = False

    def see(self, index: torch.Tensor) -> None:
        """Copy the indices of a batch, shape (B,), which is one of the first of its epoch."""
        self._batches.append(index.clone())
        self._watched += len(index)
        enough = self._watched >= _WATCHED_INDICES
        self.watching = not enough or len(self._batches) < _WATCHED_BATCHES

    def end_epoch(
        self,
        plan: EpochPlan,
        recorded: int,
        batches: int,
        sampler: PruningSampler,
        plan_was_read: bool,
    ) -> list[str]:
        """Return the warnings that the epoch gives rise to.

        Args:
            plan: The plan of the epoch.
            recorded: Number of samples that all ranks together recorded in the epoch.
            batches: Number of batches that this rank recorded in the epoch.
            sampler: The sampler of this rank, which follows the plan.
            plan_was_read: Whether the training loop has read the plan.
        """
        watched = self._batches
        self.forget()
        if not recorded:
            return self._check_silence(plan, sampler.was_read, plan_was_read)
        self._has_recorded = True
        self._silent_in_a_row = 0
        messages = self._check_repeats(plan, recorded, batches, sampler)
        skips = len(plan.kept) < self._num_samples
        few = recorded <= _FEW * len(plan.kept) and not self._warned_of_gaps
        if not watched or not (skips or few):
            return messages
        seen = [index.cpu() for index in watched]  # This waits for the device.
        indices = torch.cat(seen)
        unplanned = num_unplanned(plan, indices)
        if skips and self._is_ignored(plan, unplanned / len(indices)):
            messages.append(
                f"in {_IGNORED_EPOCHS} pruning epochs up to epoch {plan.epoch}, the samples to "
                f"skip were trained all the same: give the loader sampler=pruner.sampler"
            )
        if few and not unplanned:
            usual = len(indices) / len(seen) * self._num_ranks
            distance = batch_distance(seen, sampler.shuffled(), self._num_samples)
            if distance > _FAR * usual:
                self._warned_of_gaps = True
                messages.append(
                    f"epoch {plan.epoch} recorded {recorded} samples, but its plan keeps "
                    f"{len(plan.kept)}, and there are gaps between the recorded batches: if a "
                    f"framework shards the batches itself, make the Pruner with "
                    f"sharded_by_loader=True (or num_replicas=1 and the batch size of all ranks "
                    f"together); otherwise, record every batch"
                )
        return messages

    def forget(self) -> None:
        """Forget the batches of the epoch in progress."""
        self._batches = []
        self._watched = 0
        self.watching = True

    def _check_repeats(
        self, plan: EpochPlan, recorded: int, batches: int, sampler: PruningSampler
    ) -> list[str]:
        if self._warned_of_repeats:
            return []
        world = self._replicas.outgrown()
        all_of_them = recorded >= self._num_ranks * len(plan.kept) and batches >= _ENOUGH_BATCHES
        if world is not None:
            problem = (
                f"this Pruner was made before the process group of {world} ranks, so every rank "
                f"trains all samples and learns alone: make it after init_process_group()"
            )
        elif all_of_them and sampler.num_replicas < self._num_ranks:
            problem = (
                f"epoch {plan.epoch} keeps {len(plan.kept)} samples, and each of "
                f"{self._num_ranks} ranks trained all of them: leave out num_replicas and "
                f"sharded_by_loader, which are for frameworks that shard the batches"
            )
        else:
            return []
        self._warned_of_repeats = True
        return [problem]

    def _check_silence(
        self, plan: EpochPlan, sampler_was_read: bool, plan_was_read: bool
    ) -> list[str]:
        self._silent_in_a_row += sampler_was_read or plan_was_read
        never = sampler_was_read and not self._has_recorded
        if self._warned_of_silence or not (never or self._silent_in_a_row == _SILENT_EPOCHS):
            return []
        self._warned_of_silence = True
        return [
            f"epoch {plan.epoch} recorded no losses, so policy {self._policy.name!r} learns "
            f"nothing: pass the losses of each batch to pruner.record(index, losses)"
        ]

    def _is_ignored(self, plan: EpochPlan, unplanned_share: float) -> bool:
        """Return whether the plan was ignored, in so many epochs that it is time for a warning."""
        # A loader without the sampler trains skipped samples as often as all others.
        expected = 1 - len(plan.kept) / self._num_samples
        ignored = unplanned_share >= expected / 2
        self._ignored_in_a_row = self._ignored_in_a_row + 1 if ignored else 0
        return self._ignored_in_a_row == _IGNORED_EPOCHS


def num_unplanned(plan: EpochPlan, index: torch.Tensor) -> int:
    """Return how many of the indices, shape (n,), the plan skips."""
    kept, indices = plan.kept.numpy(), index.numpy()
    places = np.searchsorted(kept, indices)
    return int(np.count_nonzero(kept[np.minimum(places, len(kept) - 1)] != indices))


def batch_distance(batches: list[torch.Tensor], order: torch.Tensor, num_samples: int) -> float:
    """Return the distance in the order at which the batches follow each other.

    It is the median, so that a few missing batches do not matter. Each batch counts from its first
    place in the order. Fewer than three batches have the distance 0.

    Args:
        batches: The indices of some batches, all of them in the order, shape (B,) each.
        order: The samples of all ranks together in their order, int64, shape (number kept,).
        num_samples: Number of samples N in the data set.
    """
    if len(batches) < 3:
        return 0.0
    places = np.empty(num_samples, dtype=np.int64)
    places[order.numpy()] = np.arange(len(order))
    starts = np.sort([places[batch.numpy()].min() for batch in batches])
    return float(np.median(np.diff(starts)))
