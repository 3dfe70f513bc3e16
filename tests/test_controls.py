"""Controls and predicted costs, which count the batches that are actually trained."""

import functools
import math
import tomllib

import msgspec
import pytest

import fineprune as fp
from fineprune.errors import InputError
from fineprune.experiments.controls import ALL_ARMS, check_keeps_evidence, default_arms, make_arms
from fineprune.pruning.policies.fine_pruning import FinePruning
from fineprune.runs.comparison import Arm
from fineprune.training.forecast import predicted_cost
from fineprune.training.learning_rate import rate_at
from fineprune.training.policies import follows_schedule, takes_save
from fineprune.training.recipe import make_recipe

RECIPE = {
    "data": {"name": "digits", "train_size": 1024},
    "training": {"epochs": 200, "batch_size": 32, "milestones": [60, 120, 160]},
    "pruning": {"policy": "fine-pruning", "window": 60, "start": 30, "attenuation": 2.0,
                "prune": 563},
}  # fmt: skip
SERVED = ("distributed.strategy=sync", "distributed.workers=4")


def made_arm(recipe, name, num_samples):
    needed = {"second": ["watched"]}.get(name, [])
    return next(a for a in make_arms(recipe, [*needed, name], num_samples) if a.name == name)


def arm_recipe(recipe, name, num_samples):
    return recipe.changed(made_arm(recipe, name, num_samples).changes)


def test_the_control_of_equal_cost_counts_the_batches_of_all_workers():
    """Four workers average batches of 32, so a pruned epoch keeps 512 samples instead of 480."""
    alone, served = make_recipe(RECIPE), make_recipe(RECIPE, SERVED)
    pruned = alone.schedule().pruned_epochs()
    costs = predicted_cost(alone, 1024), predicted_cost(served, 1024)
    assert [cost.samples for cost in costs] == [
        1024 * (200 - pruned) + kept * pruned for kept in (480, 512)
    ]
    assert [cost.steps for cost in costs] == [32 * 200 - 17 * pruned, 8 * 200 - 4 * pruned]
    for recipe, cost in ((alone, costs[0]), (served, costs[1])):
        epochs = arm_recipe(recipe, "shorter", 1024).training.epochs
        assert epochs == round(cost.samples / 1024)


def test_arms_differ_from_the_recipe_in_the_policy_only():
    recipe = make_recipe(RECIPE)
    assert arm_recipe(recipe, "fine-pruning", 1024) == recipe
    for arm in ("full", "random"):
        assert set(made_arm(recipe, arm, 1024).changes) == {"pruning"}
    same = {"policy": "random", "prune": 563, "window": 60, "start": 30, "attenuation": 2.0}
    random = made_arm(recipe, "random", 1024).changes["pruning"]
    assert {name: random[name] for name in same} == same
    assert made_arm(recipe, "full", 1024).changes == {"pruning": {"policy": "full"}}


@pytest.mark.parametrize(
    "training", [{"milestones": [12, 24, 32], "warmup": 3}, {"schedule": "cosine", "warmup": 4}]
)
def test_the_shorter_arm_has_the_rates_of_shorter(training):
    recipe = make_recipe(
        {
            "training": {"epochs": 40, "batch_size": 128, **training},
            "pruning": {"policy": "adaptive", "save": 0.35},
        }
    )
    short = arm_recipe(recipe, "shorter", 1280)
    rates = functools.partial(rate_at, recipe.training)
    expected = fp.shorter(rates, 0.35, epochs=40)
    assert short.training.epochs == len(expected) == 26
    found = [rate_at(short.training, epoch + 0.5) for epoch in range(26)]
    assert found == pytest.approx(expected)
    assert short.pruning.policy == "full"


def test_the_rates_of_a_shorter_schedule():
    steps = [0.1] * 12 + [0.02] * 12 + [0.004] * 8 + [0.0008] * 8
    assert fp.shorter(steps, 0.35) == [0.1] * 12 + [0.02] * 12 + [0.004] + [0.0008]
    # A rise keeps its epochs, and the steps after it stay steps.
    rise = [0.02, 0.06]
    assert fp.shorter(rise + steps, 14 / 42) == rise + fp.shorter(steps, 0.35)
    assert fp.shorter(rise + [0.1] * 18, 0.5) == rise + [0.1] * 8
    cosine = [0.1 * (1 + math.cos(math.pi * epoch / 20)) / 2 for epoch in range(20)]
    assert fp.shorter(cosine, 0.5) == pytest.approx([0.1 * (1 - (u / 10) ** 2) for u in range(10)])
    warm = fp.shorter(lambda progress: min(progress / 5, 1) * (1 - progress / 21), 0.5, epochs=20)
    assert len(warm) == 10
    assert warm[0] < warm[1] < max(warm)
    assert warm[-1] < 0.4 * max(warm)
    assert fp.shorter(steps, 0.0) == steps
    assert fp.shorter(cosine, 0.01) == cosine  # No whole epoch is saved.


@pytest.mark.parametrize(
    ("rates", "options", "message"),
    [
        ([0.1] * 4, {"save": 1.0}, "expected save as a share"),
        (lambda progress: 0.1, {}, "expected epochs=... with rates of the type function"),
        ([0.1, 0.1, 0.02, 0.02, 0.01, 0.01], {"save": 0.6}, "at least one epoch for each of 3"),
    ],
)
def test_wrong_arguments_of_shorter_are_refused(rates, options, message):
    with pytest.raises(InputError, match=message):
        fp.shorter(rates, **options)


def test_the_adaptive_arm_saves_as_much_as_the_recipes_schedule():
    pruning = {"policy": "fine-pruning", "window": 4, "start": 2, "prune": 0.5}
    recipe = make_recipe({"training": {"epochs": 40, "batch_size": 128}, "pruning": pruning})
    adaptive = arm_recipe(recipe, "adaptive", 1280)
    assert adaptive.pruning.policy == "adaptive"
    assert adaptive.pruning.arguments["save"] == predicted_cost(recipe, 1280).skipped_share == 0.25
    assert predicted_cost(adaptive, 1280).steps == predicted_cost(recipe, 1280).steps
    assert default_arms(adaptive) == ("full", "adaptive", "shorter")


def test_a_matched_control_needs_the_arm_that_it_matches():
    with pytest.raises(InputError, match=r"the arm 'adaptive' beside 'matched', .* add 'ad"):
        make_arms(adaptive_recipe(0.35), ["full", "matched"], 1280)
    make_arms(adaptive_recipe(0.35), ["matched", "adaptive"], 1280)


def test_a_second_training_needs_the_first_one_and_its_evidence():
    recipe = adaptive_recipe(0.35)
    assert arm_recipe(recipe, "second", 1280) == arm_recipe(recipe, "full", 1280)
    with pytest.raises(InputError, match=r"arm 'watched' beside 'second', .*: add 'watched'"):
        make_arms(recipe, ["adaptive", "full", "second"], 1280)
    second = made_arm(recipe, "second", 1280)
    assert second.needs == "watched"
    third = recipe.replaced("data", without="runs/first")
    with pytest.raises(InputError, match=r"expected no data.without with the arm 'second', whi"):
        make_arms(third, ["watched", "second"], 1280)
    check_keeps_evidence(recipe, 65)
    served = recipe.replaced("distributed", strategy="sync", workers=1, servers=1)
    with pytest.raises(InputError, match="at most 64 classes with parameter servers, got 65"):
        check_keeps_evidence(served, 65)
    # A recipe that skips nothing is enough for it.
    full = recipe.replaced("pruning", policy="full")
    make_arms(full, ["full", "watched", "second"], 1280)
    assert arm_recipe(full, "second", 1280) == full


@pytest.mark.parametrize("arm", ["matched", "shorter"])
def test_a_control_of_a_recipe_that_skips_nothing_is_refused(arm):
    nothing = make_recipe(RECIPE, ["pruning.prune=0"])
    with pytest.raises(InputError, match=f"a recipe that skips samples for the arm '{arm}"):
        arm_recipe(nothing, arm, 1024)
    full = make_recipe(RECIPE, ["pruning.policy=full"])
    with pytest.raises(InputError, match="expected a recipe with a pruning schedule to compare"):
        arm_recipe(full, arm, 1024)


@pytest.mark.parametrize("arm", ["fine-pruning", "random"])
def test_a_schedule_is_found_for_an_adaptive_recipe(arm):
    recipe = adaptive_recipe(0.35)
    found = arm_recipe(recipe, arm, 12_800)
    method = FinePruning.for_saving(40, 0.35, [12, 24, 32])
    assert found.schedule() == method.schedule
    assert found.pruning.arguments["prune"] == method.prune
    assert make_recipe(tomllib.loads(found.to_toml())) == found
    assert predicted_cost(found, 12_800).skipped_share == pytest.approx(0.35, abs=0.01)
    late = recipe.replaced("training", milestones=(12, 40))
    assert arm_recipe(late, arm, 12_800).schedule().boundaries == (12, 40)


def test_one_adaptive_recipe_gives_every_arm_about_the_same_cost():
    recipe = adaptive_recipe(0.35)
    saving = [arm for arm in ALL_ARMS if takes_save(arm) or follows_schedule(arm)]
    for arm in (*saving, "shorter"):
        made = arm_recipe(recipe, arm, 12_800)
        share = predicted_cost(made, 12_800).samples / (40 * 12_800)
        assert share == pytest.approx(0.65, abs=0.01), arm


def test_no_arm_keeps_a_setting_of_another_policy():
    """A weighted InfoBatch recipe has options that would make other methods of its controls."""
    recipe = adaptive_recipe(0.35).replaced("pruning", policy="infobatch", save=0.35)
    assert recipe.pruning.arguments["rescale"]
    for name, policy in (("rs2", fp.RS2(40)), ("repb", fp.RePB(40)), ("adaptive", None)):
        made = arm_recipe(recipe, name, 12_800)
        assert made.pruning.arguments["save"] == 0.35
        if policy is not None:
            assert made.policy().settings() == policy.settings()
    scheduled = arm_recipe(recipe, "random", 12_800)
    assert not {"anneal", "rescale"} & scheduled.pruning.arguments.keys()


def test_the_changes_of_an_arm_are_data_that_make_its_recipe():
    recipe = adaptive_recipe(0.35)
    for arm in make_arms(recipe, ("full", "rs2", "random", "shorter"), 12_800):
        as_json = msgspec.json.decode(msgspec.json.encode(arm), type=Arm)
        assert as_json == arm
        made = recipe.changed(as_json.changes)
        assert recipe.changes_to(made) == arm.changes
        assert set(arm.changes) <= {"pruning", "training"}


def adaptive_recipe(save):
    training = {"epochs": 40, "milestones": [12, 24, 32], "gamma": 0.2, "batch_size": 128}
    return make_recipe({"training": training, "pruning": {"policy": "adaptive", "save": save}})
