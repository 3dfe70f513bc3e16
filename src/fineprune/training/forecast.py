"""What a recipe will train and cost, as far as this is known before the training."""

import dataclasses
from dataclasses import dataclass

from fineprune.errors import InputError
from fineprune.pruning.policies.full import FullData
from fineprune.pruning.policies.matched import Matched
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.pruning.savings import (
    Savings,
    closed_form_pruned_epochs,
    planned_numbers,
    predict_savings,
)
from fineprune.pruning.schedule import Schedule
from fineprune.pruning.step_counts import BatchShape, StepCounts
from fineprune.training.policies import takes_save
from fineprune.training.recipe import Recipe

# The sizes of training sets that are known without their files.
_TRAINING_IMAGES = {"cifar10": 50_000, "cifar100": 50_000}


@dataclass(frozen=True, eq=False)
class Forecast:
    """What a recipe will train.

    Attributes:
        policy: The policy of the recipe, bound to the samples.
        num_samples: The number of training samples, N.
        kept: How many samples each epoch keeps. With ``adaptive``, they are those of a training in
            which no sample is suspected.
        batch_size: The number of samples per batch, on each rank or worker.
        samples_per_step: The number of samples of an optimizer step, over all ranks and workers.
        savings: The predicted cost; None for the control ``matched``, whose numbers of samples are
            those of a finished run.
    """

    policy: Policy
    num_samples: int
    kept: list[int]
    batch_size: int
    samples_per_step: int
    savings: Savings | None

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that the policy follows; None without one."""
        return self.policy.schedule if isinstance(self.policy, ScheduledPolicy) else None

    @property
    def prunes(self) -> list[bool]:
        """Whether each epoch skips samples."""
        if self.schedule is None:
            return [number < self.num_samples for number in self.kept]
        return [self.schedule.prunes(epoch) for epoch in range(self.schedule.epochs)]

    @property
    def closed_form(self) -> int | None:
        """The paper's formula 3 or 4 for the pruned epochs; None without windows of one length."""
        if self.schedule is None or isinstance(self.schedule.window, tuple):
            return None
        return closed_form_pruned_epochs(self.schedule)

    @property
    def skipped_share(self) -> float:
        """The share of all sample-steps that are skipped."""
        full = self.num_samples * len(self.kept)
        return (full - sum(self.kept)) / full


def forecast(
    recipe: Recipe,
    num_samples: int,
    *,
    ranks: int = 1,
    step_time: float | None = None,
    overhead: float = 0.0,
) -> Forecast:
    """Return what a recipe will train.

    Args:
        recipe: The recipe.
        num_samples: The number of training samples, N.
        ranks: The number of processes that ``torchrun`` starts; 1 with parameter servers.
        step_time: The time per optimizer step in seconds (the paper's T); None if it is not known.
        overhead: The bookkeeping time per pruned epoch in seconds (the paper's t0).

    Raises:
        InputError: The recipe skips nothing, or its cost cannot be known.
    """
    strategy = recipe.distributed
    if recipe.pruning.own:
        raise InputError(
            f"expected a policy of fineprune, got {recipe.pruning.policy!r}, whose code planning "
            f"does not run: use fineprune.predict_savings"
        )
    if step_time is not None and strategy.served and not strategy.synchronous:
        raise InputError(
            f"expected no --step-time with distributed.strategy = {strategy.strategy!r}, whose "
            f"workers compute steps at the same time: use fineprune scale --predict"
        )
    counts, savings = _bound(recipe, num_samples, ranks), None
    policy = counts.policy
    if isinstance(policy, FullData):
        raise InputError(
            f"expected a policy with a schedule, got policy = {recipe.pruning.policy!r}: "
            f'set pruning.policy to another one, such as "adaptive"'
        )
    if not isinstance(policy, Matched):
        if counts.steps_before(recipe.training.epochs) is None:
            advice = "set pruning.save" if takes_save(policy.name) else "a run's metrics show them"
            raise InputError(
                f"expected a policy whose number of samples per epoch is known before the "
                f"training, got policy = {policy.name!r}, whose number depends on the losses: "
                f"{advice}"
            )
        savings = predicted_cost(recipe, num_samples, ranks, step_time, overhead)
    # Stepping through the epochs takes a policy of its own.
    kept = planned_numbers(_bound(recipe, num_samples, ranks))
    size, per_step = recipe.training.batch_size, counts.shape.multiple
    return Forecast(policy, num_samples, kept, size, per_step, savings)


def predicted_cost(
    recipe: Recipe,
    num_samples: int,
    ranks: int = 1,
    step_time: float | None = None,
    overhead: float = 0.0,
) -> Savings:
    """Predict the cost of a recipe, and that of training on all data ([P] section 4.4).

    The arguments are those of ``forecast``.
    """
    shape = dataclasses.asdict(_shape(recipe, ranks))
    return predict_savings(
        recipe.policy(), num_samples, **shape, step_time=step_time, overhead=overhead
    )


def cost_is_known(recipe: Recipe, num_samples: int) -> bool:
    """Return whether the number of sample-steps of a recipe is known before it is trained."""
    return _bound(recipe, num_samples).steps_before(recipe.training.epochs) is not None


def check_rounds(recipe: Recipe, num_samples: int) -> None:
    """Raise InputError if rounding to whole steps leaves nothing to skip."""
    _bound(recipe, num_samples).check_rounding()


def saved_share(recipe: Recipe, num_samples: int) -> float:
    """Return the argument ``save`` of a recipe's policy, or else the share that it will skip."""
    save: float | None = getattr(recipe.policy(), "save", None)
    return predicted_cost(recipe, num_samples).skipped_share if save is None else save


def known_training_samples(recipe: Recipe) -> int:
    """Return the number of training samples of a recipe, without reading any data."""
    data = recipe.data
    total = _TRAINING_IMAGES.get(data.name, data.train_size)
    unread = next((name for name in ("labels", "without") if getattr(data, name)), None)
    if total is None or unread is not None or data.name == "images":
        raise InputError(
            f"expected --samples with data.{unread or 'name'} = "
            f"{getattr(data, unread or 'name')!r}, got none: give the number of training samples, "
            f"which planning does not read"
        )
    if data.validation >= total:
        raise InputError(
            f"expected data.validation to leave some of {total} samples, got {data.validation}: "
            f"hold out fewer"
        )
    return data.limited(total - data.validation)


def _bound(recipe: Recipe, num_samples: int, ranks: int = 1) -> StepCounts:
    """Return the counts of a recipe, whose policy is bound to the samples and the steps."""
    return StepCounts(recipe.policy(), num_samples, _shape(recipe, ranks))


def _shape(recipe: Recipe, ranks: int) -> BatchShape:
    training, strategy = recipe.training, recipe.distributed
    if ranks > 1 and (strategy.served or strategy.simulate):
        raise InputError(
            f"expected one process of torchrun with distributed.strategy or distributed.simulate, "
            f"got {ranks}: leave out --ranks, or set distributed.strategy=none"
        )
    # The number of samples per update and rank; kept sets are rounded up to a multiple of it.
    size = training.batch_size * strategy.batches_per_update
    return BatchShape(size, recipe.accumulation, ranks, training.drop_last)
