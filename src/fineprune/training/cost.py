"""Predicts the cost of a recipe before it is trained."""

from fineprune.pruning.savings import Savings, predict_savings
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
    return predict_savings(
        recipe.policy(),
        num_samples,
        # The number of samples per update and rank; kept sets are rounded up to a multiple of it.
        recipe.training.batch_size * recipe.distributed.batches_per_update,
        step_time=step_time,
        overhead=overhead,
        drop_last=recipe.training.drop_last,
        accumulation=recipe.training.accumulation,
        num_replicas=ranks,
    )
