"""Predicts the cost of a recipe before it is trained."""

from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.savings import Savings, planned_numbers, predict_savings
from fineprune.pruning.step_counts import BatchShape, bind
from fineprune.training.recipe import Recipe


def predicted_cost(
    recipe: Recipe,
    num_samples: int,
    *,
    ranks: int = 1,
    step_time: float | None = None,
    overhead: float = 0.0,
) -> Savings:
    """Predict the cost of a recipe, and that of training on all data ([P] section 4.4).

    Args:
        recipe: The recipe.
        num_samples: The number of training samples, N.
        ranks: The number of processes that ``torchrun`` starts; 1 with parameter servers.
        step_time: The time per optimizer step in seconds (the paper's T); None if it is not known.
        overhead: The bookkeeping time per pruned epoch in seconds (the paper's t0).

    Raises:
        InputError: A value is out of range, or the number of kept samples depends on the data.
    """
    shape = _shape(recipe, ranks)
    assert shape.batch_size is not None
    return predict_savings(
        recipe.policy(),
        num_samples,
        shape.batch_size,
        step_time=step_time,
        overhead=overhead,
        drop_last=shape.drop_last,
        accumulation=shape.accumulation,
        num_replicas=shape.num_replicas,
    )


def samples_per_step(recipe: Recipe, *, ranks: int = 1) -> int:
    """Return the number of samples of an optimizer step, over all ranks or workers.

    Args:
        recipe: The recipe.
        ranks: The number of processes that ``torchrun`` starts; 1 with parameter servers.
    """
    return _shape(recipe, ranks).multiple


def cost_is_known(recipe: Recipe, num_samples: int) -> bool:
    """Return whether the number of sample-steps of a recipe is known before it is trained.

    Args:
        recipe: The recipe.
        num_samples: The number of training samples, N.
    """
    policy, _ = _bound_policy(recipe, num_samples, ranks=1)
    numbers = (policy.num_kept(epoch) for epoch in range(policy.epochs))
    return policy.total_steps is not None or all(number is not None for number in numbers)


def saved_share(recipe: Recipe, num_samples: int) -> float:
    """Return the share of the training that a recipe saves.

    Args:
        recipe: The recipe.
        num_samples: The number of training samples, N.

    Returns:
        The argument ``save`` of the recipe's policy, if it has one; otherwise, the share of the
        sample-steps that it will skip.

    Raises:
        InputError: The number of kept samples depends on the data.
    """
    save: float | None = getattr(recipe.policy(), "save", None)
    return predicted_cost(recipe, num_samples).skipped_share if save is None else save


def planned_samples(recipe: Recipe, num_samples: int, *, ranks: int = 1) -> list[int]:
    """Return how many samples each epoch of a recipe keeps, as far as this is known in advance.

    Args:
        recipe: The recipe.
        num_samples: The number of training samples, N.
        ranks: The number of processes that ``torchrun`` starts; 1 with parameter servers.

    Returns:
        The numbers of all ranks together. With ``adaptive``, they are those of a training in which
        no sample contradicts the others.
    """
    policy, shape = _bound_policy(recipe, num_samples, ranks)
    return planned_numbers(policy, num_samples, shape)


def _bound_policy(recipe: Recipe, num_samples: int, ranks: int) -> tuple[Policy, BatchShape]:
    """Return the policy of a recipe, bound to the samples and the steps, and how they are grouped.

    What rounding to whole steps costs is not checked; ``predicted_cost`` does this.

    The arguments are those of ``planned_samples``.
    """
    policy, shape = recipe.policy(), _shape(recipe, ranks)
    bind(policy, num_samples, shape)
    return policy, shape


def _shape(recipe: Recipe, ranks: int) -> BatchShape:
    training = recipe.training
    # The number of samples per update and rank; kept sets are rounded up to a multiple of it.
    size = training.batch_size * recipe.distributed.batches_per_update
    return BatchShape(size, training.accumulation, ranks, training.drop_last)
