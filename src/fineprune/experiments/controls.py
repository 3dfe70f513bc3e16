"""The arms of a comparison: the method, the baseline, and the controls that it has to beat."""

from fineprune.errors import InputError
from fineprune.training.cost import predicted_cost
from fineprune.training.recipe import Recipe

ARMS = ("full", "fine-pruning", "random", "fewer-epochs")


def arm_recipe(recipe: Recipe, arm: str, num_samples: int) -> Recipe:
    """Return the recipe of one arm; network, data, order and augmentation stay the same.

    Args:
        recipe: one whose pruning section describes a schedule.
        arm: ``full`` skips nothing; ``fine-pruning`` is the recipe; ``random`` skips as many in
            the same epochs at random; ``fewer-epochs`` trains on all data for as many epochs as
            cost the same.
        num_samples: N, the training samples.

    Raises:
        InputError: the arm is not known, or the recipe has no schedule to compare.
    """
    if arm not in ARMS:
        raise InputError(f"expected arms of {', '.join(ARMS)}, got {arm!r}")
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
    """Return the recipe on all data, shortened to what the pruned one costs.

    The whole number of epochs nearest to the pruned run's sample-steps; milestones and warm-up are
    compressed in proportion, so that the rate decays fully (the control that "No Train No Gain",
    NeurIPS 2023, asks for).
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
