"""Fine-tuning: frozen parts of a network."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from resuming import small_recipe
from torch import nn

from fineprune.networks.registry import build_network
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.network import freeze, training_mode
from fineprune.training.recipe import make_recipe
from fineprune.training.recipe_replica import RecipeReplica
from fineprune.training.trainer import train


def recipe(*changes):
    settings = ["training.epochs=2", "training.batch_size=16", "pruning.policy=full", *changes]
    data = {"name": "synthetic", "train_size": 64, "image_size": 32}
    return small_recipe(*settings, data=data, network={"name": "imagenet-resnet18", "classes": 4})


FREEZE = 'network.freeze=["conv1", "bn1", "layer1", "layer2.0"]'


def initial(recipe):
    """The weights with which a run of the recipe begins, as a worker builds them."""
    with torch.random.fork_rng():
        return RecipeReplica(recipe, rank=0).model.state_dict()


def test_frozen_parts_and_their_statistics_do_not_change(tmp_path):
    train(recipe(FREEZE), tmp_path / "run")
    before, saved = initial(recipe(FREEZE)), load_checkpoint(tmp_path / "run/checkpoint.pt")
    assert len(saved["optimizer"]["state"]) == sum(
        not name.startswith(("conv1.", "bn1.", "layer1.", "layer2.0."))
        for name, _ in build_network("imagenet-resnet18", 4, 3).named_parameters()
    )
    for name, value in saved["model"].items():
        frozen = name.startswith(("conv1.", "bn1.", "layer1.", "layer2.0."))
        # A shift that starts at zero can be zero again only by chance.
        assert torch.equal(value, before[name]) == frozen, name


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
        train(recipe(change), tmp_path / "run")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run/recipe.toml").exists()


def test_the_settings_of_the_page_are_valid():
    page = (Path(__file__).parent.parent / "docs/fine-tuning.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    made = make_recipe({"data": {"name": "synthetic"}, **tomllib.loads(shown)})
    with torch.device("meta"):
        network = build_network(made.network.name, 20, 3)
    freeze(network, made.network.freeze)
    assert not network.get_parameter("layer1.0.conv1.weight").requires_grad
