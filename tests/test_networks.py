"""The paper's ten networks and those for ImageNet, by any name, and the presets of their recipes.

The reference of ImageNet's ResNets computes them from a state dict alone, one call per layer.
"""

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from resuming import small_recipe
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

SMALL = ("lenet", "vgg13", "resnet18", "resnet50", "wrn10")

# Those of torchvision, with 1000 classes.
IMAGENET = {
    "imagenet-resnet18": 11_689_512,
    "imagenet-resnet34": 21_797_672,
    "imagenet-resnet50": 25_557_032,
    "imagenet-resnet101": 44_549_160,
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


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenets_networks_have_the_parameters_of_torchvision(name):
    with torch.device("meta"):
        network = build_network(name, 1000, 3)
    assert sum(p.numel() for p in network.parameters()) == IMAGENET[name]


@pytest.mark.parametrize(
    "name",
    [*SMALL, "resnet9", "resnet9-wide", "imagenet-resnet18"],
)
@pytest.mark.parametrize(("classes", "channels"), [(10, 3), (7, 1)])
def test_any_number_of_classes_and_channels(name, classes, channels):
    network = build_network(name, classes, channels)
    logits = network(torch.randn(2, channels, 32, 32))
    assert logits.shape == (2, classes)
    logits.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "wrn10", "imagenet-resnet50"])
def test_residual_networks_are_initialised_after_he(name):
    for module in build_network(name, 10, 3).modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5_000:
            fan_out = module.out_channels * math.prod(module.kernel_size)
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)
            assert module.weight.mean().item() == pytest.approx(0, abs=0.01)
        if isinstance(module, nn.BatchNorm2d):
            assert module.weight.eq(1).all()
            assert module.bias.eq(0).all()


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
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_networks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_networks", None)


def test_a_network_of_ones_own_is_trained_by_its_name(own_module, tmp_path):
    recipe = small_recipe(
        *("training.lr=0.1", "pruning.policy=full"),
        data={"name": "synthetic", "train_size": 256},
        network={"name": "own_networks:small"},
    )
    summary = train(recipe, tmp_path / "run")
    assert summary.network == "own_networks:small"
    assert summary.parameters == 48 * 10 + 10
    assert summary.accuracy_last > 0.3


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


# -- ImageNet's ResNets ----------------------------------------------------------------------------


def randomised(network):
    """Give the normalisations values other than those of their initialisation."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
    return network.eval()


def reference(state, x, convolutions):
    """Compute the logits of a state dict with 2 or 3 convolutions per block."""

    def normalised(x, name):
        statistics = (state[f"{name}.running_mean"], state[f"{name}.running_var"])
        return F.batch_norm(x, *statistics, state[f"{name}.weight"], state[f"{name}.bias"])

    x = F.conv2d(x, state["conv1.weight"], stride=2, padding=3)
    x = F.max_pool2d(normalised(x, "bn1").relu(), kernel_size=3, stride=2, padding=1)
    for stage in range(1, 5):
        block = 0
        while f"layer{stage}.{block}.conv1.weight" in state:
            name = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            y = x
            for number in range(1, convolutions + 1):
                weight = state[f"{name}.conv{number}.weight"]
                strided = number == convolutions - 1  # The first of 2, the second of 3.
                step, padding = stride if strided else 1, weight.shape[-1] // 2
                y = F.conv2d(y, weight, stride=step, padding=padding)
                y = normalised(y, f"{name}.bn{number}")
                y = y.relu() if number < convolutions else y
            if f"{name}.downsample.0.weight" in state:
                x = F.conv2d(x, state[f"{name}.downsample.0.weight"], stride=stride)
                x = normalised(x, f"{name}.downsample.1")
            x = (x + y).relu()
            block += 1
    return F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize(("name", "convolutions"), [("18", 2), ("50", 3)])
def test_the_outputs_of_imagenets_resnets_are_those_of_the_definition(name, convolutions):
    network = randomised(build_network(f"imagenet-resnet{name}", 13, 3))
    x = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        expected = reference(network.state_dict(), x, convolutions)
        torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.parametrize("depth", [18, 50])
def test_the_weights_and_outputs_are_those_of_other_libraries(library, depth):
    """Both need a torchvision that fits torch."""
    try:
        importlib.import_module(library)
    except Exception:  # a build for another torch
        pytest.skip(f"no {library} that fits torch")
    theirs = randomised(build_network(f"{library}:resnet{depth}", 13, 3))
    ours = build_network(f"imagenet-resnet{depth}", 13, 3).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


def test_resnet50_trains_on_larger_images(tmp_path):
    recipe = small_recipe(
        *("training.epochs=1", "training.batch_size=16", "pruning.policy=full"),
        data={"name": "synthetic", "train_size": 32, "image_size": 64},
        network={"name": "imagenet-resnet50", "classes": 4},
    )
    summary = train(recipe, tmp_path / "run")
    assert summary.steps == 2
    assert summary.parameters == IMAGENET["imagenet-resnet50"] - 996 * (2048 + 1)
