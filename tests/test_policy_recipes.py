"""Policies and their options in recipes, including a policy of the user's own."""

import sys
from typing import Any

import pytest
import torch

import fineprune as fp
from fineprune.errors import InputError
from fineprune.training.data import load_data
from fineprune.training.loop import train
from fineprune.training.recipe import make_recipe, read_recipe

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
"""


@pytest.fixture
def own_policies(tmp_path, monkeypatch):
    """Put a module with policies into the current folder."""
    (tmp_path / "own_policies.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_policies", None)


def recipe_of(pruning, **sections):
    return make_recipe({"training": {"epochs": 8}, "pruning": pruning, **sections})


@pytest.mark.parametrize(
    ("pruning", "expected"),
    [
        ({"policy": "infobatch"}, fp.InfoBatch(8)),
        ({"policy": "infobatch", "prune": 0.3}, fp.InfoBatch(8, 0.3)),
        ({"policy": "infobatch", "save": 0.2}, fp.InfoBatch(8, save=0.2)),
        ({"policy": "infobatch", "save": 0.2, "prune": 0}, fp.InfoBatch(8, save=0.2)),
        (
            {"policy": "infobatch", "anneal": 0.0, "rescale": False},
            fp.InfoBatch(8, anneal=0.0, rescale=False),
        ),
        ({"policy": "repb"}, fp.RePB(8)),
        ({"policy": "repb", "save": 0.2, "rescale": False}, fp.RePB(8, 0.2, rescale=False)),
        ({"policy": "align-prune", "trajectory": 3}, fp.AlignPrune(8, trajectory=3)),
        (
            {"policy": "align-prune", "save": 0.2, "trajectory": 2, "reference": [4, 1]},
            fp.AlignPrune(8, 0.2, trajectory=2, reference=[1, 4]),
        ),
        ({"policy": "rs2"}, fp.RS2(8)),
        (
            {"policy": "rs2", "save": 0.5, "replacement": True, "anneal": 0.25},
            fp.RS2(8, 0.5, replacement=True, anneal=0.25),
        ),
        ({"policy": "full", "anneal": 0.25}, fp.FullData(8, anneal=0.25)),
        (
            {"policy": "random", "window": 4, "prune": 0.3, "anneal": 0.5},
            fp.RandomPruning(fp.Schedule(8, 4, 0), 0.3, anneal=0.5),
        ),
        (
            {"policy": "fine-pruning", "window": 4, "prune": 0.3, "rescale": True},
            fp.FinePruning(fp.Schedule(8, 4, 0), 0.3, rescale=True),
        ),
    ],
)
def test_a_recipe_makes_the_policy_and_survives_a_round_trip(pruning, expected, tmp_path):
    recipe = recipe_of(pruning)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    again = read_recipe(tmp_path / "recipe.toml")
    assert again == recipe
    for policy in (recipe.policy(), again.policy()):
        assert type(policy) is type(expected)
        assert policy.settings() == expected.settings()


def test_the_recipe_of_a_run_says_what_the_defaults_of_a_policy_are():
    infobatch = recipe_of({"policy": "infobatch"}).pruning
    assert (infobatch.prune, infobatch.save) == (0.5, None)
    assert (infobatch.anneal, infobatch.rescale) == (0.125, True)
    rs2 = recipe_of({"policy": "rs2"}).pruning
    assert (rs2.save, rs2.replacement) == (0.35, False)
    scheduled = recipe_of({"policy": "random", "window": 4}).pruning
    assert (scheduled.prune, scheduled.save, scheduled.anneal) == (0.0, None, None)


def test_a_recipe_can_set_the_threshold_of_adaptive():
    recipe = recipe_of({"policy": "adaptive", "save": 0.3, "threshold": 1.5, "first_epoch": 3})
    settings = recipe.policy().settings()
    assert (settings["threshold"], settings["first_epoch"]) == (1.5, 3)
    with pytest.raises(InputError, match=r'no pruning\.anneal with pruning\.policy = "adaptive"'):
        recipe_of({"policy": "adaptive", "save": 0.3, "anneal": 0.2})


SERVED = {"distributed": {"strategy": "sync", "workers": 2}}


@pytest.mark.parametrize(
    ("pruning", "sections", "message"),
    [
        ({"policy": "rs2", "arguments": {"a": 1}}, {}, "expected pruning.arguments with a policy"),
        ({"policy": "infobatch", "replacement": True}, {}, "expected pruning.replacement with"),
        ({"policy": "rs2", "prune": 0.3}, {}, "expected pruning.save with"),
        ({"policy": "repb", "prune": 0.3}, {}, "expected pruning.save with"),
        ({"policy": "repb", "trajectory": 3}, {}, "expected pruning.trajectory with"),
        ({"policy": "align-prune"}, {}, "expected trajectory below 7"),
        ({"policy": "infobatch", "prune": 0.3, "save": 0.2}, {}, "set one of them to 0"),
        ({"policy": "a:B", "save": 0.3}, {}, "got pruning.save = 0.3: put it into"),
        ({"policy": "a:B", "prune": 0.3}, {}, "got pruning.prune = 0.3: put it into"),
        ({"policy": "a:B", "anneal": 2.0}, {}, "expected anneal"),
        ({"policy": "a b:C"}, {}, "expected pruning.policy in the form module:attribute"),
        ({"policy": "rs3"}, {}, "did you mean 'rs2'"),
        ({"policy": "a:B", "arguments": 3}, {}, "expected pruning.arguments to be table, got 3"),
        ({"policy": "a:B", "arguments": {"x": float("inf")}}, {}, "arguments.x as a finite"),
        ({"policy": "rs2", "anneal": "much"}, {}, "expected pruning.anneal to be float"),
        ({"policy": "a:B", "replacement": True}, {}, "expected pruning.replacement with"),
    ],
)
def test_settings_that_a_policy_does_not_have_are_refused(pruning, sections, message):
    with pytest.raises(InputError, match=message):
        recipe_of(pruning, **sections)


def test_parameter_servers_train_with_weights():
    assert recipe_of({"policy": "infobatch"}, **SERVED).policy()


# A policy of the user's own


def test_a_recipe_names_a_policy_and_its_arguments(own_policies, tmp_path):
    arguments = {"start": 3, "names": ["a", 'b"\\'], "deep er": {"x": 0.5, "on": True}}
    recipe = recipe_of(
        {"policy": "own_policies:Half", "arguments": arguments, "anneal": 0.25, "window": 4}
    )
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
    recipe = recipe_of({"policy": name, "arguments": arguments})
    with pytest.raises(InputError, match=message):
        recipe.policy()


SMALL = {
    "data": {"train_size": 256},
    "network": {"name": "lenet"},
    "run": {"threads": 1, "device": "cpu"},
}


def test_a_run_with_an_own_policy_trains_what_it_says(own_policies, tmp_path):
    pruning = {"policy": "own_policies:Half", "arguments": {"start": 1}, "anneal": 0.3}
    recipe = make_recipe({**SMALL, "training": {"epochs": 3, "batch_size": 32}, "pruning": pruning})
    numbers = []
    train(recipe, tmp_path / "run", on_epoch=lambda metrics: numbers.append(metrics["samples"]))
    assert numbers == [256, 128, 256]


OWN_DATA = """
import torch
from torch.utils.data import TensorDataset

def unlabelled():
    labelled = TensorDataset(torch.rand(64, 3, 32, 32), torch.arange(64) % 4)
    return list(labelled), labelled
"""


@pytest.mark.parametrize("validation", [0, 16])
def test_own_data_need_an_attribute_with_the_classes(tmp_path, monkeypatch, validation):
    (tmp_path / "own_classes.py").write_text(OWN_DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.manual_seed(0)
    data = {
        "validation": validation,
        "name": "own_classes:unlabelled",
        "labels": "labels.csv",
        "true_labels": "dataset",
    }
    with pytest.raises(InputError, match=r"data\.true_labels needs the class of each sample"):
        load_data(make_recipe({**SMALL, "network": {"classes": 4}, "data": data}))
