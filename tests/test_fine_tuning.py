"""Fine-tuning: frozen parts of a network."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from resuming import train_until
from torch import nn

from fineprune.networks.registry import build_network
from fineprune.runs.files import read_metrics
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.network import freeze, training_mode
from fineprune.training.recipe import make_recipe, read_recipe
from fineprune.training.recipe_replica import RecipeReplica
from fineprune.training.trainer import train

RECIPE = {
    "data": {"name": "synthetic", "train_size": 64, "image_size": 32},
    "network": {"name": "imagenet-resnet18", "classes": 4},
    "training": {"epochs": 3, "batch_size": 16, "lr": 0.01, "evaluate_last": 1},
    "run": {
        **{"device": "cpu", "threads": 1, "precision": "float32", "compile": "off"},
        "checkpoint_steps": 1,
    },
}
FREEZE = 'network.freeze=["conv1", "bn1", "layer1", "layer2.0"]'


def initial(recipe):
    """The weights with which a run of the recipe begins, as a worker builds them."""
    with torch.random.fork_rng():
        return RecipeReplica(recipe, rank=0).model.state_dict()


def test_frozen_parts_and_their_statistics_do_not_change(tmp_path):
    recipe = make_recipe(RECIPE, [FREEZE, "training.epochs=2", "run.checkpoint_steps=0"])
    train(recipe, tmp_path / "run")
    before, saved = initial(recipe), load_checkpoint(tmp_path / "run/checkpoint.pt")
    assert len(saved["optimizer"]["state"]) == sum(
        not name.startswith(("conv1.", "bn1.", "layer1.", "layer2.0."))
        for name, _ in build_network("imagenet-resnet18", 4, 3).named_parameters()
    )
    for name, value in saved["model"].items():
        frozen = name.startswith(("conv1.", "bn1.", "layer1.", "layer2.0."))
        # A shift that starts at zero can be zero again only by chance.
        assert torch.equal(value, before[name]) == frozen, name


@pytest.mark.long
def test_a_stopped_run_with_frozen_parts_is_resumed_bit_for_bit(tmp_path, monkeypatch):
    recipe = make_recipe(RECIPE, [FREEZE, "training.epochs=2"])
    train(recipe, tmp_path / "whole")
    middle = lambda state: state["epoch_so_far"] and state["epoch_so_far"]["batches"] == 2  # noqa: E731
    train_until(middle, recipe, tmp_path / "stopped", monkeypatch)
    train(recipe, tmp_path / "stopped", resume=True)
    whole, stopped = (load_checkpoint(tmp_path / n / "checkpoint.pt") for n in ("whole", "stopped"))
    for name, value in whole["model"].items():
        assert torch.equal(value, stopped["model"][name]), name
    losses = [
        [line["train_loss"] for line in read_metrics(tmp_path / n / "metrics.jsonl")]
        for n in ("whole", "stopped")
    ]
    assert losses[0] == losses[1]
    assert read_recipe(tmp_path / "whole/recipe.toml") == recipe


def test_the_statistics_are_frozen_by_a_prefix_that_covers_their_module():
    network = build_network("imagenet-resnet18", 4, 3)
    freeze(network, ["bn1", "layer1.0.bn1.weight"])
    network.eval()
    network.train()
    training_mode(network, ["bn1", "layer1.0.bn1.weight"])
    modes = {
        name: m.training for name, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)
    }
    # Only a prefix that covers the module freezes its statistics.
    assert [name for name, training in modes.items() if not training] == ["bn1"]
    assert network.training


def test_prefixes_consist_of_whole_parts_of_names():
    network = nn.ModuleDict({f"layer{n}": nn.Linear(1, 1) for n in (1, 10)})
    freeze(network, ["layer1"])
    assert [name for name, p in network.named_parameters() if p.requires_grad] == [
        "layer10.weight",
        "layer10.bias",
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ('network.freeze=["layer5"]', "network.freeze .* got 'layer5': did you mean 'layer"),
        ('network.freeze=["con"]', "got 'con': did you mean 'con"),
        ('network.freeze=[""]', "network.freeze .* got ''"),
        (
            'network.freeze=["conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"]',
            "parameters to train, got none with network.freeze = .*: leave some of them unfrozen",
        ),
        ("network.freeze=layer1", "expected network.freeze to be a list, got 'layer1'"),
    ],
)
def test_what_names_no_parameters_is_refused_in_one_line(change, told, tmp_path):
    with pytest.raises(ValueError, match=told) as raised:
        train(make_recipe(RECIPE, [change]), tmp_path / "run")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run/recipe.toml").exists()


def test_the_settings_of_the_page_are_valid():
    page = (Path(__file__).parent.parent / "docs/fine-tuning.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    recipe = make_recipe({"data": {"name": "synthetic"}, **tomllib.loads(shown)})
    with torch.device("meta"):
        network = build_network(recipe.network.name, 20, 3)
    freeze(network, recipe.network.freeze)
    assert not network.get_parameter("layer1.0.conv1.weight").requires_grad
