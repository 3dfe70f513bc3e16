"""The arms of a comparison: the baseline, the method, and the controls of equal cost."""

import itertools

from fineprune.errors import InputError
from fineprune.training.cost import predicted_cost
from fineprune.training.recipe import Recipe

# The arms that a comparison has unless others are named.
ARMS = ("full", "fine-pruning", "random", "fewer-epochs")
# The arms that train fewer epochs.
SHORTER = ("fewer-epochs", "fewer-epochs-late")
ALL_ARMS = ("full", "adaptive", "fine-pruning", "random", *SHORTER)


def default_arms(recipe: Recipe) -> tuple[str, ...]:
    """Return the arms of a comparison whose user names none."""
    if recipe.pruning.policy == "adaptive":
        return ("full", "adaptive", "fewer-epochs", "fewer-epochs-late")
    return ARMS


def arm_recipe(recipe: Recipe, arm: str, num_samples: int) -> Recipe:
    """Return the recipe of one arm. All arms have the same network, data, order and augmentation.

    Args:
        recipe: A recipe whose policy skips samples. Its cost is that of all arms but ``full``.
        arm: The name of the arm. ``full`` skips no samples. ``fine-pruning`` follows the recipe's
            schedule. ``random`` skips the same number of samples in the same epochs, chosen at
            random. ``adaptive`` saves the same share of the steps. ``fewer-epochs`` trains on all
            data, for the number of epochs that has the same cost. ``fewer-epochs-late`` does the
            same, and takes these epochs from the smallest learning rates.
        num_samples: The number of training samples, N.

    Raises:
        InputError: The arm is unknown or does not fit the recipe, or the recipe skips no samples.
    """
    if arm not in ALL_ARMS:
        raise InputError(f"expected arms out of {', '.join(ALL_ARMS)}, got {arm!r}")
    policy = recipe.pruning.policy
    if policy == "full":
        raise InputError(
            'expected a recipe with a pruning schedule to compare, got policy = "full": '
            'set pruning.policy = "fine-pruning"'
        )
    if arm == "full":
        return recipe.replaced("pruning", policy="full")
    if arm == "fewer-epochs":
        return fewer_epochs(recipe, num_samples)
    if arm == "fewer-epochs-late":
        return fewer_epochs_late(recipe, num_samples)
    if arm == policy:
        return recipe
    if arm == "adaptive":
        save = predicted_cost(recipe, num_samples).skipped_share
        return recipe.replaced("pruning", policy="adaptive", save=save)
    if policy == "adaptive" and recipe.pruning.window == recipe.pruning.windows_per_interval:
        raise InputError(
            f"expected a recipe with a pruning schedule for the arm {arm!r}, got "
            f'policy = "adaptive" without one: set pruning.window'
        )
    return recipe.replaced("pruning", policy=arm)


def fewer_epochs(recipe: Recipe, num_samples: int) -> Recipe:
    """Return the recipe without pruning, shortened to the cost of the pruned run.

    The sample-steps of the pruned run are rounded to whole epochs. The milestones and the warm-up
    are shortened in proportion, so that the learning rate decays completely. "No Train No Gain"
    (NeurIPS 2023) recommends this control.

    Args:
        recipe: A recipe whose policy skips samples.
        num_samples: The number of training samples, N.
    """
    training = recipe.training
    epochs = _affordable_epochs(recipe, num_samples)
    scale = epochs / training.epochs
    milestones = sorted({max(1, round(milestone * scale)) for milestone in training.milestones})
    return recipe.replaced("pruning", policy="full").replaced(
        "training",
        epochs=epochs,
        milestones=tuple(milestones),
        warmup=round(training.warmup * scale),
    )


def fewer_epochs_late(recipe: Recipe, num_samples: int) -> Recipe:
    """Return the recipe without pruning, at the cost of the pruned run, with its last rates short.

    As ``fewer_epochs``, but the epochs are removed from the interval with the smallest learning
    rate until one is left there, then from the interval before it, and so on. With step-wise rates,
    this control loses little, because most of the training happens at the larger rates.

    Args:
        recipe: A recipe whose policy skips samples.
        num_samples: The number of training samples, N.

    Raises:
        InputError: The learning rate has no milestones, or there are more intervals than epochs.
    """
    training = recipe.training
    if training.schedule != "milestones" or not training.milestones:
        raise InputError(
            f"expected training.milestones for the arm 'fewer-epochs-late', got schedule "
            f"{training.schedule!r} with milestones {list(training.milestones)}: use 'fewer-epochs'"
        )
    epochs = _affordable_epochs(recipe, num_samples)
    ends = [milestone for milestone in training.milestones if milestone < training.epochs]
    lengths = [end - start for start, end in itertools.pairwise([0, *ends, training.epochs])]
    surplus = training.epochs - epochs
    for interval in reversed(range(len(lengths))):
        removed = min(surplus, lengths[interval] - 1)
        lengths[interval] -= removed
        surplus -= removed
    if surplus:
        raise InputError(
            f"expected at least one epoch for each of {len(lengths)} learning rates in the arm "
            f"'fewer-epochs-late', got {epochs} epochs: save less"
        )
    milestones = tuple(itertools.accumulate(lengths[:-1]))
    return recipe.replaced("pruning", policy="full").replaced(
        "training", epochs=epochs, milestones=milestones
    )


def _affordable_epochs(recipe: Recipe, num_samples: int) -> int:
    """Return the number of full epochs that cost as much as the recipe's training."""
    return max(1, round(predicted_cost(recipe, num_samples).samples / num_samples))
