"""The version of a user's own code with which a run began is checked wherever it is read again."""

import sys

import pytest
import torch
from resuming import small_recipe

from fineprune.errors import InputError
from fineprune.experiments.compare import compare
from fineprune.runs.run import read_run
from fineprune.training.hardware import resolved
from fineprune.training.own_code import code_digest
from fineprune.training.recipe import read_recipe
from fineprune.training.recipe_replica import RecipeReplica
from fineprune.training.trainer import train

NETWORK = """
import torch
from own_layers import layers

def network(classes, channels):
    return torch.nn.Sequential(*layers(classes, channels))
"""
LAYERS = """
import torch

def layers(classes, channels):
    return torch.nn.Flatten(), torch.nn.Linear(channels * 1024, classes)
"""


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    (tmp_path / "own_network.py").write_text(NETWORK)
    (tmp_path / "own_layers.py").write_text(LAYERS)
    (tmp_path / "unrelated.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("own_network", "own_layers"):
        sys.modules.pop(name, None)


def recipe(*changes):
    settings = ["data.train_size=64", "training.epochs=2", "training.batch_size=32"]
    settings += ["network.name=own_network:network", "pruning.policy=random", "pruning.prune=32"]
    return small_recipe(*settings, *changes)


def test_only_the_files_that_are_imported_count(own_code):
    digest = code_digest(recipe())
    (own_code / "unrelated.py").write_text("changed = True")
    assert code_digest(recipe()) == digest
    (own_code / "own_layers.py").write_text(LAYERS + "\n# changed\n")
    assert code_digest(recipe()) != digest
    assert code_digest(recipe("network.name=lenet")) is None


def test_all_modules_of_a_package_count(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_package/deep").mkdir(parents=True)
    (tmp_path / "own_package/__init__.py").touch()
    (tmp_path / "own_package/deep/__init__.py").touch()
    made = recipe("network.name=own_package.deep:network")
    digest = code_digest(made)
    (tmp_path / "own_package/deep/layers.py").write_text("x = 1")
    assert code_digest(made) != digest


def test_a_run_does_not_go_on_with_other_code(own_code):
    train(recipe(), own_code / "run")
    summary = read_run(own_code / "run").summary
    assert summary.code_sha256 == summary.digests["code"] == code_digest(recipe())
    (own_code / "run/summary.json").unlink()
    (own_code / "own_layers.py").write_text(LAYERS + "\n# changed\n")
    with pytest.raises(InputError, match="expected the code of the recipe's own data, network"):
        train(recipe(), own_code / "run", resume=True)
    again = read_recipe(own_code / "run/recipe.toml", ["run.code=none"])
    train(again, own_code / "again")


def test_a_worker_does_not_start_with_other_code(own_code):
    made = resolved(recipe())
    RecipeReplica(made, 0).load((0, 0), torch.arange(4))
    (own_code / "own_network.py").write_text(NETWORK + "\n# changed\n")
    with pytest.raises(InputError, match="got another version: restore the files"):
        RecipeReplica(made, 0)


def test_a_comparison_does_not_go_on_with_other_code(own_code, fast_spawn):
    compare(recipe(), own_code / "c", title="c", arms=["full"])
    (own_code / "own_layers.py").write_text(LAYERS + "\n# changed\n")
    with pytest.raises(InputError, match="expected the code with which the runs in"):
        compare(recipe(), own_code / "c", title="c", arms=["full", "random"])
