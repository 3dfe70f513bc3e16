"""The paper's ten networks, networks by other names, and the presets of their recipes."""

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fineprune.datasets.synthetic import make_synthetic
from fineprune.networks.registry import NETWORKS, build_network
from fineprune.pruning.savings import predict_savings
from fineprune.training.recipe import make_recipe, read_recipe
from fineprune.training.trainer import train

# Parameters with 10 classes if every convolution had biases, as METHOD counts them.
PARAMETERS = {
    "lenet": 62_006,
    "vgg13": 9_416_010,
    "vgg16": 14_728_266,
    "vgg19": 20_040_522,
    "resnet18": 175_818,
    "resnet34": 514_218,
    "resnet50": 545_930,
    "wrn10": 7_438_730,
    "wrn16": 17_122_250,
    "wrn22": 26_805_770,
}

# Table 1's time saved with its overhead added back, in per cent.
SKIPPED = {
    "lenet": 12.15,
    "vgg13": 7.61,
    "vgg16": 7.73,
    "vgg19": 7.79,
    "resnet18": 13.08,
    "resnet34": 13.64,
    "resnet50": 14.02,
    "wrn10": 13.8,
    "wrn16": 13.8,
    "wrn22": 14.3,
}


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_papers_networks_have_its_parameters(name):
    with torch.device("meta"):
        network = build_network(name, 10, 3)
    missing = sum(
        module.out_channels
        for module in network.modules()
        if isinstance(module, nn.Conv2d) and module.bias is None
    )
    assert sum(p.numel() for p in network.parameters()) + missing == PARAMETERS[name]


@pytest.mark.parametrize(
    "name", ["lenet", "resnet9", "resnet9-wide", "vgg13", "resnet18", "resnet50", "wrn10"]
)
@pytest.mark.parametrize(("classes", "channels"), [(10, 3), (7, 1)])
def test_any_number_of_classes_and_channels(name, classes, channels):
    network = build_network(name, classes, channels)
    x = torch.randn(2, channels, 32, 32)
    logits = network(x)
    assert logits.shape == (2, classes)
    assert torch.isfinite(logits).all()
    logits.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_larger_images_are_averaged_at_the_end():
    for name in ("vgg13", "resnet18", "wrn10"):
        assert build_network(name, 5, 3)(torch.randn(2, 3, 64, 64)).shape == (2, 5)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "wrn10"])
def test_residual_networks_are_initialised_after_he(name):
    for module in build_network(name, 10, 3).modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5_000:
            fan_out = module.out_channels * math.prod(module.kernel_size)
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)
            assert module.weight.mean().item() == pytest.approx(0, abs=0.01)


def test_vgg_is_initialised_after_glorot():
    network = build_network("vgg13", 10, 3)
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5_000:
            fans = 9 * (module.in_channels + module.out_channels)
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fans), rel=0.05)
    assert not network.get_parameter("linear.bias").any()


def test_wide_networks_drop_out_while_training_only():
    network = build_network("wrn10", 10, 3)
    x = torch.randn(2, 3, 32, 32)
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))


@pytest.mark.parametrize("name", SKIPPED)
def test_the_presets_skip_what_the_paper_saved(name):
    recipe = read_recipe(Path(f"recipes/paper/{name}.toml"))
    assert recipe.network.name == name
    assert (recipe.training.epochs, recipe.training.milestones) == (200, (60, 120, 160))
    savings = predict_savings(recipe.policy(), 50_000, recipe.training.batch_size)
    skipped = 100 * (1 - savings.samples / savings.samples_full)
    assert skipped == pytest.approx(SKIPPED[name], abs=0.3)


OWN = """
from torch import nn

def small(classes, channels):
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(16 * channels, classes))

def number(classes, channels):
    return classes
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_networks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_networks", None)


def test_a_network_of_ones_own_is_trained_by_its_name(own_module, tmp_path):
    recipe = make_recipe(
        {
            "data": {"name": "synthetic", "train_size": 256},
            "network": {"name": "own_networks:small"},
            "training": {"epochs": 4, "batch_size": 64, "lr": 0.1},
            "run": {"device": "cpu", "threads": 1, "precision": "float32"},
        }
    )
    summary = train(recipe, tmp_path / "run")
    assert summary.network == "own_networks:small"
    assert summary.parameters == 48 * 10 + 10
    assert summary.accuracy_last > 0.3


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("own_networks:nothing", "module:attribute"),
        ("own_networks:number", "torch.nn.Module, got int"),
        ("resnet19", "expected network.name to be one of"),
    ],
)
def test_what_makes_no_network_is_refused_in_one_line(name, told, own_module):
    with pytest.raises(ValueError, match="expected") as caught:
        build_network(name, 10, 3)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_other_libraries_networks_are_built_or_their_absence_is_said(library):
    """Both need a torchvision that fits torch; where it is there, the network is built."""
    try:
        found = importlib.import_module(library) is not None
    except Exception:  # a build for another torch
        found = False
    if found:
        network = build_network(f"{library}:resnet18", 7, 3)
        assert network(torch.randn(2, 3, 64, 64)).shape == (2, 7)
        return
    with pytest.raises(ValueError, match=f"expected {library} to be installed") as caught:
        build_network(f"{library}:resnet18", 7, 3)
    assert "\n" not in str(caught.value)


def test_torchvisions_networks_take_three_channels():
    with pytest.raises(ValueError, match="3 channels"):
        build_network("torchvision:resnet18", 10, 1)


def test_all_names_can_be_in_a_recipe():
    for name in [*NETWORKS, "timm:resnet18", "torchvision:resnet18", "module:attribute"]:
        assert make_recipe({"network": {"name": name}}).network.name == name


def test_synthetic_images_are_always_the_same_and_no_two_splits_share_noise():
    train_set, test_set = make_synthetic(100, size=16, classes=4)
    again, _ = make_synthetic(100, size=16, classes=4)
    assert torch.equal(train_set.images, again.images)
    assert torch.equal(train_set.labels, again.labels)
    assert train_set.images.shape == (100, 3, 16, 16)
    assert len(test_set) == 20
    assert not torch.equal(train_set.images[:20], test_set.images)
