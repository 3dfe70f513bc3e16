"""The arms of a comparison: the baseline, the methods, and the controls of equal cost."""

import functools
from collections.abc import Sequence

from fineprune.errors import InputError
from fineprune.labels.evidence import KEEP_ALL
from fineprune.pruning.shorter import shorter
from fineprune.runs.comparison import Arm
from fineprune.runs.run import Run
from fineprune.training.forecast import cost_is_known, predicted_cost, saved_share
from fineprune.training.learning_rate import rate_at
from fineprune.training.policies import (
    POLICY_NAMES,
    follows_schedule,
    schedule_for_saving,
    takes_save,
)
from fineprune.training.recipe import Recipe

FULL, WATCHED, SECOND = "full", "watched", "second"
RANDOM, MATCHED, SHORTER = "random", "matched", "shorter"

# The policies that are compared with the controls.
METHODS = tuple(name for name in POLICY_NAMES if name not in (FULL, RANDOM, MATCHED))

# All arms, in the order of tables.
ALL_ARMS = (FULL, WATCHED, SECOND, *METHODS, RANDOM, MATCHED, SHORTER)


def default_arms(recipe: Recipe) -> tuple[str, ...]:
    """Return the arms of a comparison whose user names none."""
    policy = recipe.pruning.policy
    if policy in (FULL, MATCHED) or follows_schedule(policy):
        return (FULL, "fine-pruning", RANDOM, SHORTER)
    if policy == "adaptive":
        return (FULL, policy, SHORTER)
    known = getattr(recipe.policy(), "save", None) is not None  # Or the cost depends on the data.
    return (FULL, policy, MATCHED, *((SHORTER,) if known else ()))


def make_arms(recipe: Recipe, names: Sequence[str], num_samples: int) -> list[Arm]:
    """Return the arms with some names, in the order of tables.

    All arms have the same network, data, order and augmentation. No arm but ``watched`` records
    more than its policy needs, so that ``full`` is the plain loop, and a method pays for its own
    monitoring and for nothing else.

    Args:
        recipe: A recipe whose policy skips samples. Its cost is that of all arms but ``full``.
        names: The names of the arms:

            - ``full`` skips no samples.
            - ``watched`` skips none either, but keeps evidence on the labels.
            - ``second`` skips none either, but its training set is without the suspects of the
              run of ``watched`` with the same seed.
            - The recipe's own policy has the recipe itself.
            - Any other policy follows the recipe's schedule, or saves the same share of the steps
              if its cost is a setting (``pruning.save``). A policy whose cost depends on the losses
              has its default settings, so its cost differs. No policy keeps other settings of the
              recipe's policy.
            - ``fine-pruning`` and ``random``, which skips samples at random, follow the schedule of
              ``FinePruning.for_saving`` if the recipe has none.
            - ``matched`` keeps as many samples per epoch as the recipe's policy, chosen at random.
            - ``shorter`` trains on all data with the rates of ``fineprune.shorter``.
        num_samples: The number of training samples, N.
    """
    for name in names:
        if (times := list(names).count(name)) > 1:
            raise InputError(f"expected every arm once, got {name!r} {times} times")
    arms = in_order([_arm(recipe, name, num_samples) for name in names])
    for arm in arms:
        if arm.needs is not None and arm.needs not in names:
            raise InputError(
                f"expected the arm {arm.needs!r} beside {arm.name!r}, whose runs follow from those "
                f"of it, got {', '.join(names)}: add {arm.needs!r}"
            )
    return arms


def in_order(arms: Sequence[Arm]) -> list[Arm]:
    """Return arms in the order of tables, with those that are not known at the end."""
    return sorted(arms, key=lambda arm: (*ALL_ARMS, arm.name).index(arm.name))


def _arm(recipe: Recipe, name: str, num_samples: int) -> Arm:
    policy = recipe.pruning.policy
    if policy == MATCHED or (policy == FULL and name not in (FULL, WATCHED, SECOND)):
        raise InputError(
            f'expected a recipe with a pruning schedule to compare, got policy = "{policy}": '
            f"set pruning.policy to another one, such as adaptive"
        )
    if name not in (*ALL_ARMS, policy):
        raise InputError(f"expected arms out of {', '.join(ALL_ARMS)}, got {name!r}")
    if name == SECOND and recipe.data.without is not None:
        raise InputError(
            f"expected no data.without with the arm {SECOND!r}, which sets it, got "
            f"{recipe.data.without}: leave one of them out"
        )
    if name == MATCHED:
        if cost_is_known(recipe, num_samples):
            _check_saves(recipe, num_samples, name)
        return Arm(name=name, changes={"pruning": {"policy": MATCHED}}, needs=policy)
    full = recipe.replaced("pruning", policy=FULL)
    if name == SHORTER:
        made = _shorter(recipe, full, num_samples)
    elif name in (FULL, WATCHED, SECOND):
        made = full
    else:
        made = recipe if name == policy else _other_policy(recipe, name, num_samples)
    changes = recipe.changes_to(made)
    if name == WATCHED:  # Also if the recipe itself says so; see ``plan_runs``.
        changes["run"] = {"history": True}
    return Arm(name=name, changes=changes, needs=WATCHED if name == SECOND else None)


def _other_policy(recipe: Recipe, name: str, num_samples: int) -> Recipe:
    """Return the recipe with another policy that saves as much, if this can be set."""
    if takes_save(name):
        _check_cost_is_known(recipe, num_samples, name)
        return recipe.replaced("pruning", policy=name, save=saved_share(recipe, num_samples))
    if not follows_schedule(name) or follows_schedule(recipe.pruning.policy):
        return recipe.replaced("pruning", policy=name)
    _check_saves(recipe, num_samples, name)
    training, saved = recipe.training, saved_share(recipe, num_samples)
    schedule = schedule_for_saving(training.epochs, training.milestones, saved)
    return recipe.replaced("pruning", policy=name, **schedule)


def _shorter(recipe: Recipe, full: Recipe, num_samples: int) -> Recipe:
    """Return full training with the rates of ``fineprune.shorter``, at the cost of a recipe."""
    _check_saves(recipe, num_samples, SHORTER)
    training = full.training
    epochs = max(1, round(predicted_cost(recipe, num_samples).samples / num_samples))
    rates = shorter(
        functools.partial(rate_at, training), 1 - epochs / training.epochs, epochs=training.epochs
    )
    return full.replaced(
        "training",
        epochs=len(rates),
        schedule="rates",
        rates=tuple(rate / training.lr for rate in rates),
        milestones=(),
        gamma=None,
        warmup=0,
    )


def check_keeps_evidence(recipe: Recipe, classes: int) -> None:
    """Raise InputError if runs of a recipe can keep no evidence for a second training."""
    if recipe.distributed.served and classes > KEEP_ALL:
        raise InputError(
            f"expected at most {KEEP_ALL} classes with parameter servers, got {classes}: leave out "
            f"the arm {SECOND!r}, which needs the evidence on the labels"
        )


def matched_recipe(recipe: Recipe, method: Run) -> Recipe:
    """Return the recipe that keeps as many samples in each epoch as a run did, chosen at random.

    It contains the numbers and the mean weights of all epochs, and none of the settings of the
    method.
    """
    total = method.summary.train_samples
    numbers = [total - line["skipped"] for line in method.metrics]
    if all(number == total for number in numbers):
        raise InputError(
            f"expected a run that skipped samples for the arm {MATCHED!r}, got {method.path}, "
            f"which skipped none: leave this arm out"
        )
    weights = [float(line.get("mean_weight", 1.0)) for line in method.metrics]
    weighted = {"mean_weights": weights} if any(weight != 1 for weight in weights) else {}
    return recipe.replaced("pruning", policy=MATCHED, numbers=numbers, **weighted)


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
