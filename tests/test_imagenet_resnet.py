"""The ResNets in their ImageNet form: torchvision's names, and the function that the paper defines.

The reference below computes the networks from a state dict alone, with one call per layer.
"""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fineprune.networks.registry import build_network
from fineprune.training.recipe import make_recipe
from fineprune.training.trainer import train

PARAMETERS = {
    "imagenet-resnet18": 11_689_512,
    "imagenet-resnet34": 21_797_672,
    "imagenet-resnet50": 25_557_032,
    "imagenet-resnet101": 44_549_160,
}
# The number of entries of torchvision's state dicts, counters of the normalisations included.
ENTRIES = {"imagenet-resnet18": 122, "imagenet-resnet50": 320}


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


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


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_networks_have_the_known_numbers_of_parameters(name):
    with torch.device("meta"):
        network = build_network(name, 1000, 3)
    assert sum(p.numel() for p in network.parameters()) == PARAMETERS[name]
    assert len(network.state_dict()) == ENTRIES.get(name, len(network.state_dict()))


@pytest.mark.parametrize(("name", "convolutions"), [("18", 2), ("50", 3)])
def test_the_outputs_are_those_of_the_definition(name, convolutions):
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


def test_convolutions_are_initialised_after_he_and_the_last_layer_by_torch():
    network = build_network("imagenet-resnet50", 1000, 3)
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5_000:
            fan_out = module.out_channels * math.prod(module.kernel_size)
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)
        if isinstance(module, nn.BatchNorm2d):
            assert module.weight.eq(1).all()
            assert module.bias.eq(0).all()
    bound = 1 / math.sqrt(2048)
    assert network.get_parameter("fc.weight").abs().max().item() == pytest.approx(bound, rel=0.01)


def test_any_number_of_classes_and_channels():
    network = build_network("imagenet-resnet18", 7, 1)
    logits = network(torch.randn(2, 1, 32, 32))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_resnet50_trains_on_larger_images(tmp_path):
    recipe = make_recipe(
        {
            "data": {"name": "synthetic", "train_size": 32, "image_size": 64},
            "network": {"name": "imagenet-resnet50", "classes": 4},
            "training": {"epochs": 1, "batch_size": 16, "lr": 0.01, "evaluate_last": 1},
            "run": {"device": "cpu", "threads": 1, "precision": "float32"},
        }
    )
    summary = train(recipe, tmp_path / "run")
    assert summary.steps == 2
    assert summary.parameters == PARAMETERS["imagenet-resnet50"] - 996 * (2048 + 1)
