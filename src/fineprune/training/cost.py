"""What a recipe will cost, predicted from its own batches, ranks and workers."""

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
    """Predict the cost of a recipe beside that of training on all data ([P] section 4.4).

    Args:
        recipe: The recipe.
        num_samples: N, the number of training samples.
        ranks: The number of processes that ``torchrun`` starts; 1 with parameter servers.
        step_time: Seconds per optimizer step, the paper's T; None if not known.
        overhead: Seconds of bookkeeping per pruned epoch, the paper's t0.

    Raises:
        InputError: A value is out of range, or the number of samples depends on data.
    """
    return predict_savings(
        recipe.policy(),
        num_samples,
        # An update averages this many samples on each rank, and kept sets are rounded up to it.
        recipe.training.batch_size * recipe.distributed.batches_per_update,
        step_time=step_time,
        overhead=overhead,
        drop_last=recipe.training.drop_last,
        accumulation=recipe.training.accumulation,
        num_replicas=ranks,
    )
