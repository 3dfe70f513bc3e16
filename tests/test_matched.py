"""The policy that repeats the numbers and the mean weights of another run."""

import json

import numpy as np
import pytest
import torch
from resuming import small_recipe
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.errors import InputError
from fineprune.experiments.controls import matched_recipe
from fineprune.pruning.policies.matched import Matched
from fineprune.pruning.policies.policy import Training
from fineprune.pruning.pruner import Pruner
from fineprune.runs.run import read_run
from fineprune.training.forecast import cost_is_known
from fineprune.training.recipe import make_recipe
from fineprune.training.trainer import train

NUMBERS, WEIGHTS = [128, 77, 100], [1.0, 1.5, 0.75]
MATCHED = {"policy": "matched", "numbers": NUMBERS, "mean_weights": WEIGHTS}


def small(*changes, pruning=MATCHED):
    settings = ("data.train_size=128", "training.epochs=3", "training.batch_size=32", *changes)
    return small_recipe(*settings, pruning=pruning)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matched") / "whole"
    train(small(), folder)
    return read_run(folder)


def test_the_numbers_are_exact_and_the_weights_are_those_given():
    pruner = Pruner(128, Matched(3, NUMBERS, WEIGHTS), batch_size=32)
    plans = []
    for _ in pruner.epochs():
        plans.append(pruner.plan)
        losses = torch.ones(len(plans[-1].kept), requires_grad=True)
        loss = pruner.record(plans[-1].kept, losses)
        assert loss.item() == WEIGHTS[len(plans) - 1]
        loss.backward()
    assert [len(plan.kept) for plan in plans] == NUMBERS
    assert plans[0].weights is None


def test_every_sample_is_kept_with_the_same_probability():
    kept = np.zeros(40)
    policy = Matched(1, [10])
    policy.begin(Training(40))
    for seed in range(2000):
        kept[policy.select(0, None, np.random.default_rng(seed)).kept.numpy()] += 1
    # The standard deviation of a count is 19.4, and 40 counts are compared.
    assert np.abs(kept - 500).max() < 4 * 19.4


def test_a_run_trains_the_numbers_and_states_the_mean_weights(whole):
    assert [line["samples"] for line in whole.metrics] == NUMBERS
    assert "mean_weight" not in whole.metrics[0]
    assert [line["mean_weight"] for line in whole.metrics[1:]] == WEIGHTS[1:]


def test_the_control_of_a_run_has_its_numbers_and_mean_weights(whole):
    recipe = small()
    method = recipe.replaced("pruning", policy="adaptive", numbers=None, mean_weights=None)
    assert matched_recipe(method, whole) == recipe


def test_the_control_of_a_run_that_skipped_nothing_is_refused(whole):
    whole_data = [{**line, "skipped": 0} for line in whole.metrics]
    run = type(whole)(whole.path, whole.summary, whole_data, whole.recipe)
    with pytest.raises(InputError, match="expected a run that skipped samples for the arm"):
        matched_recipe(small(), run)


def test_numbers_that_are_not_rounded_give_no_cost_in_advance():
    assert not cost_is_known(small(), 128)
    schedule = {"policy": "fine-pruning", "window": 2, "prune": 64}
    for pruning in (schedule, {"policy": "adaptive", "save": 0.35}):
        assert cost_is_known(small(pruning=pruning), 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["pruning.numbers=[128, 77]"], "expected numbers with one value for each of 3 epochs, g"),
        (["pruning.mean_weights=[1]"], "expected mean_weights with one value for each of 3 epoch"),
        (["pruning.numbers=[128, 0, 9]"], "expected each of numbers to be a whole number of at"),
        (
            ["pruning.mean_weights=[1, nan, 1]"],
            "pruning.mean_weights to be a finite number, got nan",
        ),
    ],
)
def test_wrong_numbers_are_refused(changes, message):
    with pytest.raises(InputError) as raised:
        small(*changes)
    assert message in str(raised.value)


def test_plan_shows_the_numbers_of_the_control(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(small().to_toml())
    shown = CliRunner().invoke(app, ["plan", str(file), "--svg", str(tmp_path / "plan.svg")])
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == ["128", "77", "100"]
    assert lines[4:] == [
        "samples: 305 of 384 (20.57% skipped)",
        "weights: 0.75 to 1.5, the same within an epoch",
    ]
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    answer = json.loads(CliRunner().invoke(app, ["plan", str(file), "--json"]).stdout)
    assert answer["kept"] == NUMBERS
    refused = CliRunner().invoke(app, ["plan", str(file), "--samples", "100"])
    assert refused.exit_code == 2
    assert "expected numbers of at most 100" in refused.stderr


def test_missing_and_impossible_numbers_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"expected pruning\.numbers, got none: set it"):
        make_recipe({"pruning": {"policy": "matched"}})
    with pytest.raises(InputError, match="expected numbers of at most 128, the number of samples"):
        train(small("pruning.numbers=[128, 129, 1]"), tmp_path / "run")
