"""Policies and their options in recipes, including a policy of the user's own."""

import inspect
import sys
from typing import Any

import pytest

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.policies.registry import POLICIES
from fineprune.training.data import load_data
from fineprune.training.policies import follows_schedule
from fineprune.training.recipe import make_recipe, read_recipe
from fineprune.training.trainer import train

OWN = """
import numpy as np
import torch
import fineprune as fp

class Half(fp.Policy):
    name = "half"

    def __init__(self, epochs, start=0, names=(), **more):
        self._epochs, self.start, self.more = epochs, start, more

    @property
    def epochs(self):
        return self._epochs

    def begin(self, training):
        self.total = training.num_samples

    def lengths(self):
        start = min(self.start, self.epochs)
        return [self.total] * start + [self.total // 2] * (self.epochs - start)

    def select(self, epoch, number, rng):
        kept = np.sort(rng.choice(self.total, number, replace=False))
        return fp.EpochPlan(epoch, torch.from_numpy(kept))

def other_length(epochs):
    return Half(epochs + 1)

def no_policy(epochs):
    return epochs

number = 3

class WithoutMethods(fp.Policy):
    name = "without-methods"

def unlabelled():
    x, y = torch.rand(64, 3, 32, 32), torch.arange(64) % 4
    return list(zip(x, y)), torch.utils.data.TensorDataset(x, y)
"""


@pytest.fixture
def own_policies(tmp_path, monkeypatch):
    """Put a module with policies into the current folder."""
    (tmp_path / "own_policies.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_policies", None)


def recipe_of(pruning):
    return make_recipe({"training": {"epochs": 8}, "pruning": pruning})


WINDOWS: dict[str, Any] = {"window": 4, "prune": 0.3}
ADAPTIVE: dict[str, Any] = {"save": 0.3, "threshold": 1.5, "first_epoch": 3}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, fp.InfoBatch(8)),
        ({"prune": 0.3}, fp.InfoBatch(8, 0.3)),
        ({"save": 0.2}, fp.InfoBatch(8, save=0.2)),
        ({"anneal": 0.0, "rescale": False}, fp.InfoBatch(8, anneal=0.0, rescale=False)),
        ({}, fp.RePB(8)),
        ({"save": 0.2, "rescale": False}, fp.RePB(8, 0.2, rescale=False)),
        ({"trajectory": 3}, fp.AlignPrune(8, trajectory=3)),
        (
            {"save": 0.2, "trajectory": 2, "reference": [4, 1]},
            fp.AlignPrune(8, 0.2, trajectory=2, reference=[1, 4]),
        ),
        ({}, fp.RS2(8)),
        ({"save": 0.5, "replacement": True}, fp.RS2(8, 0.5, replacement=True)),
        ({}, fp.FullData(8)),
        (ADAPTIVE, fp.Adaptive(8, rates=[0.1] * 8, **ADAPTIVE)),
        (WINDOWS, fp.RandomPruning(fp.Schedule(8, 4, 0), 0.3)),
        (WINDOWS | {"tolerance": 0.1}, fp.FinePruning(fp.Schedule(8, 4, 0), 0.3, 0.1)),
    ],
)
def test_a_recipe_makes_the_policy_and_survives_a_round_trip(arguments, expected, tmp_path):
    recipe = recipe_of({"policy": expected.name, **arguments})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    again = read_recipe(tmp_path / "recipe.toml")
    assert again == recipe
    for policy in (recipe.policy(), again.policy()):
        assert type(policy) is type(expected)
        assert policy.settings() == expected.settings()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_argument_of_a_policy_is_a_setting(policy):
    """A policy that gets an argument has a setting, with its type and its default."""
    parameters = inspect.signature(POLICIES[policy]).parameters
    made = {"epochs", "rates", "schedule", "options"}
    names = set(parameters) - made
    given: dict[str, Any] = {"window": 4, "prune": 0.3} if follows_schedule(policy) else {}
    given |= {"numbers": [5] * 8} if policy == "matched" else {}
    given |= {"trajectory": 3} if policy == "align-prune" else {}
    arguments = recipe_of({"policy": policy, **given}).pruning.arguments
    for name in names:
        default = parameters[name].default
        if name not in given and default is not None:
            assert arguments[name] == default
        with pytest.raises(InputError, match=rf"expected pruning\.{name} to be .*, got \{{"):
            recipe_of({"policy": policy, **given, name: {"a": 1}})


def test_another_policy_keeps_the_schedule_or_the_saving_and_nothing_else():
    fine = {"policy": "fine-pruning", "window": 4, "start": 2, "prune": 0.3, "tolerance": 0.1}
    sections = {"training": {"epochs": 8}, "pruning": fine}
    random = make_recipe(sections, ["pruning.policy=random"]).pruning.arguments
    assert (random["window"], random["start"], random["prune"]) == (4, 2, 0.3)
    assert "tolerance" not in random
    assert make_recipe(sections, ["pruning.policy=full"]).pruning.arguments == {}
    assert make_recipe(sections, ["pruning.policy=rs2"]).pruning.arguments["save"] == 0.35
    saving = {"training": {"epochs": 8}, "pruning": {"policy": "infobatch", "save": 0.2}}
    rs2 = make_recipe(saving, ["pruning.policy=rs2", "pruning.replacement=true"])
    assert rs2.pruning.arguments == {"save": 0.2, "replacement": True}


@pytest.mark.parametrize(
    ("pruning", "message"),
    [
        ({"policy": "full", "prune": 0.3}, "known key in .pruning., got 'prune': it has no"),
        ({"policy": "adaptive", "anneal": 0.2}, "got 'anneal': .*policy = 'adaptive'"),
        ({"policy": "infobatch", "replacement": True}, "got 'replacement': it has prune"),
        ({"policy": "rs2", "prune": 0.3}, "got 'prune': it has save, replacement"),
        ({"policy": "repb", "trajectory": 3}, "got 'trajectory': it has save"),
        ({"policy": "align-prune"}, "expected trajectory below 7"),
        ({"policy": "infobatch", "prune": 0.3, "save": 0.2}, "expected either prune or save"),
        ({"policy": "random", "window": 4}, "expected pruning.prune, got none: set it"),
        ({"policy": "random", "prune": 0.3}, "expected either pruning.window .* got neither"),
        ({"policy": "a b:C"}, "expected pruning.policy in the form module:attribute"),
        ({"policy": "rs3"}, "did you mean 'rs2'"),
        ({"policy": 3}, "expected pruning.policy to be a text, got 3"),
        ({"policy": "a:B", "x": float("inf")}, "pruning.x to be a finite number, got inf"),
        ({"policy": "a:B", "x": {"y": [float("nan")]}}, "x.y to be a finite number, got nan"),
        ({"policy": "infobatch", "anneal": "much"}, "anneal to be a number, got 'much'"),
        ({"policy": "rs2", "replacement": 1}, "pruning.replacement to be true or false, got"),
    ],
)
def test_settings_that_a_policy_does_not_have_are_refused(pruning, message):
    with pytest.raises(InputError, match=message):
        recipe_of(pruning)


# A policy of the user's own


def test_a_recipe_names_a_policy_and_its_arguments(own_policies, tmp_path):
    arguments = {"start": 3, "names": ["a", 'b"\\'], "deep er": {"x": 0.5, "on": True}}
    recipe = recipe_of({"policy": "own_policies:Half", **arguments})
    assert "own_policies" not in sys.modules  # Only making the policy runs the user's code.
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    again = read_recipe(tmp_path / "recipe.toml")
    assert again == recipe
    policy: Any = again.policy()
    assert policy.name == "half"
    assert policy.epochs == 8
    assert policy.start == 3
    assert policy.more == {"deep er": {"x": 0.5, "on": True}}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("own_policies:Missing", {}, "has no attribute 'Missing'"),
        ("no_module:Half", {}, "there is no module 'no_module'"),
        ("own_policies:number", {}, "to be a class or a function, got int"),
        ("own_policies:no_policy", {}, "to make a fineprune.Policy, got int"),
        ("own_policies:no_policy", {"x": 1}, r"when called with \(8, x=1\)"),
        ("own_policies:other_length", {}, "for 8 epochs, got 9"),
        ("own_policies:WithoutMethods", {}, "base class, got one without select"),
    ],
)
def test_what_is_no_policy_is_refused(name, arguments, message, own_policies):
    recipe = recipe_of({"policy": name, **arguments})
    with pytest.raises(InputError, match=message):
        recipe.policy()


SMALL = {
    "data": {"train_size": 256},
    "network": {"name": "lenet"},
    "run": {"threads": 1, "device": "cpu"},
}


def test_a_run_with_an_own_policy_trains_what_it_says(own_policies, tmp_path):
    pruning = {"policy": "own_policies:Half", "start": 1}
    recipe = make_recipe({**SMALL, "training": {"epochs": 3, "batch_size": 32}, "pruning": pruning})
    numbers = []
    train(recipe, tmp_path / "run", on_epoch=lambda metrics: numbers.append(metrics["samples"]))
    assert numbers == [256, 128, 128]


@pytest.mark.parametrize("validation", [0, 16])
def test_own_data_need_an_attribute_with_the_classes(own_policies, validation):
    data = {
        "validation": validation,
        "name": "own_policies:unlabelled",
        "labels": "labels.csv",
        "true_labels": "dataset",
    }
    with pytest.raises(InputError, match=r"data\.true_labels needs the class of each sample"):
        load_data(make_recipe({**SMALL, "network": {"classes": 4}, "data": data}))
