"""The recipe of the distributed training on MVSO: the paper's settings and nodes."""

from pathlib import Path

import torch

from fineprune.networks.registry import build_network
from fineprune.training.optimizer import build_optimizer
from fineprune.training.recipe import read_recipe
from fineprune.training.rmsprop_tf import RMSPropTF

ROOT = Path(__file__).parent.parent


def test_the_settings_are_those_of_the_paper():
    recipe = read_recipe(ROOT / "recipes/paper/mvso-resnet50.toml")
    training, distributed = recipe.training, recipe.distributed
    assert (distributed.strategy, distributed.groups, distributed.servers) == ("mixed", 8, 7)
    assert distributed.placement == "shared"
    assert training.batch_size == 32
    assert training.batch_size * distributed.batches_per_update == 128
    optimizer = build_optimizer([torch.zeros(1)], training)
    assert isinstance(optimizer, RMSPropTF)
    (group,) = optimizer.param_groups
    values = {"lr": 0.1, "decay": 0.9, "epsilon": 1.0, "momentum": 0.0, "weight_decay": 1e-4}
    assert {name: group[name] for name in values} == values
    with torch.device("meta"):
        network = build_network(recipe.network.name, recipe.network.classes or 0, 3)
        assert network(torch.zeros(1, 3, 224, 224)).shape == (1, 1200)
    assert recipe.data.image_size == 224
