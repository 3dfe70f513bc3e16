"""The arms of a comparison: the baseline, the methods, and the controls of equal cost."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fineprune.errors import InputError
from fineprune.labels.class_shares import KEEP_ALL
from fineprune.runs.run import Run
from fineprune.training.forecast import cost_is_known, predicted_cost, saved_share
from fineprune.training.learning_rate import rise_of_one_cycle, shortened_milestones
from fineprune.training.policies import (
    ONLY_WITH,
    POLICY_NAMES,
    follows_schedule,
    schedule_for_saving,
    takes_save,
)
from fineprune.training.recipe import Recipe
from fineprune.training.settings import PruningSettings

# The control that repeats the numbers of a finished run. It is a policy as well as an arm.
MATCHED = "matched"

# The second training, which leaves out what the arm of the first one suspects.
SECOND, FIRST = "second", "full"

# The arms that train fewer epochs. The factors are those of the learning rate, and the multiples
# are the arms whose rate differs from that of another arm only by its factor.
_FACTORS = {"shorter": 1.0, "shorter-1.5": 1.5, "shorter-2": 2.0}
MULTIPLES = tuple(arm for arm, factor in _FACTORS.items() if factor != 1)
SHORTER = (*_FACTORS, "fewer-epochs", "fewer-epochs-late")

# The names of the trainings of a curve begin with it, and end with their epochs.
COOLDOWN = "cooldown-"

# The policies that are compared with the controls.
METHODS = tuple(name for name in POLICY_NAMES if name not in ("full", "random", MATCHED))

# The arms that a comparison of fine-pruning has unless others are named.
ARMS = ("full", "fine-pruning", "random", "fewer-epochs")

# All arms, in the order of tables.
ALL_ARMS = ("full", SECOND, *METHODS, "random", MATCHED, *SHORTER)

# Settings that are wrong with any other policy than the recipe's own.
_UNSET: dict[str, Any] = dict.fromkeys((*ONLY_WITH, "arguments"))


def is_shorter(arm: str) -> bool:
    """Return whether an arm trains on all data, with fewer epochs or a cooldown."""
    return arm in SHORTER or arm.startswith(COOLDOWN)


def changed_settings(arm: str) -> tuple[str, ...]:
    """Return the settings of the training that an arm may change."""
    if arm.startswith(COOLDOWN):
        return ("epochs", "milestones", "schedule")
    lengths = ("epochs", "milestones", "warmup") if arm in SHORTER else ()
    rates = ("lr", "schedule") if arm in _FACTORS else ()
    return (*lengths, *rates)


def default_arms(recipe: Recipe) -> tuple[str, ...]:
    """Return the arms of a comparison whose user names none."""
    policy = recipe.pruning.policy
    if policy in ("full", MATCHED) or follows_schedule(policy):
        return ARMS
    if policy == "adaptive":
        return ("full", "adaptive", "shorter")
    if getattr(recipe.policy(), "save", None) is None:  # The cost may depend on the data.
        return ("full", policy, MATCHED)
    return ("full", policy, MATCHED, "shorter")


def check_arms(recipe: Recipe, arms: Sequence[str], num_samples: int) -> None:
    """Check that a comparison of a recipe can have these arms."""
    policy = recipe.pruning.policy
    if policy == MATCHED or (policy == "full" and not {*arms} <= {FIRST, SECOND}):
        raise InputError(
            f'expected a recipe with a pruning schedule to compare, got policy = "{policy}": '
            f'set pruning.policy = "fine-pruning"'
        )
    for arm in arms:
        if arm not in (*ALL_ARMS, policy):
            raise InputError(f"expected arms out of {', '.join(ALL_ARMS)}, got {arm!r}")
        times = list(arms).count(arm)
        if times > 1:
            raise InputError(f"expected every arm once, got {arm!r} {times} times")
    if SECOND in arms:
        _check_second(recipe, arms)
    if MATCHED in arms:
        if policy not in arms:
            raise InputError(
                f"expected the arm {policy!r} beside {MATCHED!r}, which repeats its numbers of "
                f"samples, got {', '.join(arms)}: add {policy!r}, the recipe's policy"
            )
        if cost_is_known(recipe, num_samples):
            _check_saves(recipe, num_samples, MATCHED)


def arm_recipe(recipe: Recipe, arm: str, num_samples: int) -> Recipe:
    """Return the recipe of one arm. All arms have the same network, data, order and augmentation.

    Args:
        recipe: A recipe whose policy skips samples. Its cost is that of all arms but ``full``.
        arm: The name of the arm:

            - ``full`` skips no samples.
            - ``second`` skips none either, but its training set is without the suspects of the
              run of ``full`` with the same seed: ``plan_runs`` sets ``data.without``.
            - The recipe's own policy has the recipe itself.
            - Any other policy follows the recipe's schedule, or saves the same share of the steps
              if its cost is a setting (``pruning.save``). A policy whose cost depends on the losses
              has its default settings, so its cost differs.
            - ``fine-pruning`` and ``random``, which skips samples at random, follow the schedule of
              ``FinePruning.for_saving`` if the recipe has none.
            - ``matched`` keeps as many samples per epoch as the recipe's policy, chosen at random.
              Its recipe is that of the policy until this has been trained; see
              ``matched_recipe``.
            - ``fewer-epochs`` trains on all data, for the number of epochs that has the same cost.
            - ``fewer-epochs-late`` does the same, and takes the epochs from the smallest rates.
            - ``shorter`` trains on all data with the schedule of ``fp.shorter``:
              ``fewer-epochs-late`` if the rate has milestones; else ``fewer-epochs`` with a rate
              that falls as 1 - u^2. ``shorter-1.5`` and ``shorter-2`` multiply the rate: choose
              among the three by the accuracy on held-out images (``data.validation``).
        num_samples: The number of training samples, N.
    """
    beside = {MATCHED: [recipe.pruning.policy], SECOND: [FIRST]}.get(arm, [])
    check_arms(recipe, [*beside, arm], num_samples)
    if arm in ("full", SECOND):
        return recipe.replaced("pruning", policy="full")
    if arm in SHORTER:
        return _shorter(recipe, arm, num_samples)
    if arm in (recipe.pruning.policy, MATCHED):
        return recipe
    if takes_save(arm):
        _check_cost_is_known(recipe, num_samples, arm)
        # ``save`` replaces ``prune``: a policy that takes both could not follow both.
        save = saved_share(recipe, num_samples)
        return recipe.replaced("pruning", policy=arm, save=save, prune=0.0, **_UNSET)
    if not follows_schedule(arm):
        # What it saves depends on the losses, so it has the default of its paper.
        return recipe.replaced("pruning", policy=arm, prune=None, **_UNSET)
    settings, schedule = recipe.pruning, {}
    if settings.window is None and settings.windows_per_interval is None:
        _check_saves(recipe, num_samples, arm)
        training, save = recipe.training, saved_share(recipe, num_samples)
        schedule = schedule_for_saving(training.epochs, training.milestones, save)
    return recipe.replaced("pruning", policy=arm, **schedule, **_UNSET)


def check_keeps_evidence(recipe: Recipe, classes: int) -> None:
    """Raise InputError if runs of a recipe keep no evidence on the labels for a second training."""
    advice = f"leave out the arm {SECOND!r}, which needs the evidence on the labels"
    if not recipe.run.history:
        raise InputError(f"expected run.history = true, got false: set it, or {advice}")
    if recipe.distributed.served and classes > KEEP_ALL:
        raise InputError(
            f"expected at most {KEEP_ALL} classes with parameter servers, got {classes}: {advice}"
        )


class NothingSkipped(InputError):
    """A run that ``matched`` is to repeat skipped no sample."""


def matched_recipe(recipe: Recipe, method: Run) -> Recipe:
    """Return the recipe that keeps as many samples in each epoch as a run did, chosen at random.

    The recipe is complete: it contains the numbers and the mean weights of all epochs, and none of
    the settings of the method.
    """
    total = method.summary.train_samples
    numbers = tuple(total - line["skipped"] for line in method.metrics)
    if all(number == total for number in numbers):
        raise NothingSkipped(
            f"expected a run that skipped samples for the arm {MATCHED!r}, got {method.path}, "
            f"which skipped none: leave this arm out"
        )
    weights = tuple(float(line.get("mean_weight", 1.0)) for line in method.metrics)
    weighted = any(weight != 1 for weight in weights)
    pruning = PruningSettings(
        policy=MATCHED, numbers=numbers, mean_weights=weights if weighted else None
    )
    return dataclasses.replace(recipe, pruning=pruning)


def with_epochs(recipe: Recipe, epochs: int) -> Recipe:
    """Return the recipe with another number of epochs.

    The milestones and the warm-up change in proportion, so that the learning rate decays
    completely.
    """
    training = recipe.training
    scale = epochs / training.epochs
    milestones = sorted({max(1, round(milestone * scale)) for milestone in training.milestones})
    return recipe.replaced(
        "training",
        epochs=epochs,
        milestones=tuple(milestones),
        warmup=round(training.warmup * scale),
    )


def _shorter(recipe: Recipe, arm: str, num_samples: int) -> Recipe:
    """Return the recipe without pruning, with as many whole epochs as the pruned run costs.

    "No Train No Gain" (NeurIPS 2023) recommends this control, shortened in proportion. A late one
    loses little with step-wise rates, because most of the training happens at the larger ones: its
    epochs are removed from the interval with the smallest rate until one is left there, then from
    the interval before it, and so on.
    """
    _check_saves(recipe, num_samples, arm)
    training = recipe.training
    has_intervals = training.schedule == "milestones" and bool(training.milestones)
    if arm == "fewer-epochs-late" and not has_intervals:
        raise InputError(
            f"expected training.milestones for the arm 'fewer-epochs-late', got schedule "
            f"{training.schedule!r} with milestones {list(training.milestones)}: use 'fewer-epochs'"
        )
    epochs = max(1, round(predicted_cost(recipe, num_samples).samples / num_samples))
    full = recipe.replaced("pruning", policy="full")
    if has_intervals and arm != "fewer-epochs":
        milestones = shortened_milestones(training, epochs)
        shorter = full.replaced("training", epochs=epochs, milestones=milestones)
    else:
        shorter = with_epochs(full, epochs)
    if arm not in _FACTORS:
        return shorter
    if training.schedule in ("cosine", "linear", "one-cycle"):
        shorter = shorter.replaced("training", schedule="quadratic")
    if training.schedule == "one-cycle":
        warmup = round(rise_of_one_cycle(training) * epochs / training.epochs)
        shorter = shorter.replaced("training", warmup=warmup)
    return shorter.replaced("training", lr=training.lr * _FACTORS[arm])


def _check_second(recipe: Recipe, arms: Sequence[str]) -> None:
    """Raise InputError if the first training is no arm, or is a second training itself."""
    if FIRST not in arms:
        raise InputError(
            f"expected the arm {FIRST!r} beside {SECOND!r}, which leaves out its suspects, got "
            f"{', '.join(arms)}: add {FIRST!r}"
        )
    if recipe.data.without is not None:
        raise InputError(
            f"expected no data.without with the arm {SECOND!r}, which sets it, got "
            f"{recipe.data.without}: leave one of them out"
        )


def _check_cost_is_known(recipe: Recipe, num_samples: int, arm: str) -> None:
    if not cost_is_known(recipe, num_samples):
        advice = "set pruning.save, or " if takes_save(recipe.pruning.policy) else ""
        raise InputError(
            f"expected a recipe whose cost is known in advance for the arm {arm!r}, got policy = "
            f'"{recipe.pruning.policy}", whose number of samples depends on the data: '
            f"{advice}use the arm {MATCHED!r}"
        )


def _check_saves(recipe: Recipe, num_samples: int, arm: str) -> None:
    _check_cost_is_known(recipe, num_samples, arm)
    if predicted_cost(recipe, num_samples).skipped_share <= 0:
        raise InputError(
            f"expected a recipe that skips samples for the arm {arm!r}, got policy = "
            f'"{recipe.pruning.policy}" with settings that skip none: change [pruning], or leave '
            f"this arm out"
        )
