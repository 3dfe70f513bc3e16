"""The arms of a comparison: the baseline, the method, and the controls of equal cost."""

from fineprune.errors import InputError
from fineprune.training.cost import predicted_cost
from fineprune.training.recipe import Recipe

ARMS = ("full", "fine-pruning", "random", "fewer-epochs")


def arm_recipe(recipe: Recipe, arm: str, num_samples: int) -> Recipe:
    """Return the recipe of one arm. All arms have the same network, data, order and augmentation.

    Args:
        recipe: A recipe with a pruning schedule.
        arm: The name of the arm. ``full`` skips no samples. ``fine-pruning`` follows the recipe.
            ``random`` skips the same number of samples in the same epochs, chosen at random.
            ``fewer-epochs`` trains on all data, for the number of epochs that has the same cost.
        num_samples: The number of training samples, N.

    Raises:
        InputError: The arm is unknown, or the recipe has no pruning schedule.
    """
    if arm not in ARMS:
        raise InputError(f"expected arms out of {', '.join(ARMS)}, got {arm!r}")
    if recipe.pruning.policy == "full":
        raise InputError(
            'expected a recipe with a pruning schedule to compare, got policy = "full": '
            'set pruning.policy = "fine-pruning"'
        )
    if arm == "full":
        return recipe.replaced("pruning", policy="full")
    if arm == "fewer-epochs":
        return fewer_epochs(recipe, num_samples)
    return recipe.replaced("pruning", policy=arm)


def fewer_epochs(recipe: Recipe, num_samples: int) -> Recipe:
    """Return the recipe without pruning, shortened to the cost of the pruned run.

    The sample-steps of the pruned run are rounded to whole epochs. The milestones and the warm-up
    are shortened in proportion, so that the learning rate decays completely. "No Train No Gain"
    (NeurIPS 2023) recommends this control.

    Args:
        recipe: A recipe with a pruning schedule.
        num_samples: The number of training samples, N.
    """
    training = recipe.training
    cost = predicted_cost(recipe, num_samples)
    epochs = max(1, round(cost.samples / num_samples))
    scale = epochs / training.epochs
    milestones = sorted({max(1, round(milestone * scale)) for milestone in training.milestones})
    return recipe.replaced("pruning", policy="full").replaced(
        "training",
        epochs=epochs,
        milestones=tuple(milestones),
        warmup=round(training.warmup * scale),
    )
