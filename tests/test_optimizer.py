"""The optimizers of a recipe, and RMSProp in TensorFlow's form compared with its formula."""

import math

import pytest
import torch

from fineprune.training.optimizer import build_optimizer
from fineprune.training.rmsprop_tf import RMSPropTF
from fineprune.training.settings import TrainingSettings


def scalars(gradients, *, rates, decay, epsilon, momentum, weight_decay):
    """Return the parameter after each step, computed with the formula for a single number."""
    p, square, moment = 2.0, 1.0, 0.0
    path = []
    for g, lr in zip(gradients, rates, strict=True):
        g = g + weight_decay * p
        square = decay * square + (1 - decay) * g * g
        moment = momentum * moment + lr * g / math.sqrt(square + epsilon)
        p -= moment
        path.append(p)
    return path


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.01)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_rmsprop_tf_follows_its_formula_while_the_rate_changes(momentum, weight_decay, as_tensor):
    gradients, rates = [0.5, -1.5, 2.0, 0.25], [0.1, 0.1, 0.02, 0.02]
    settings = {"decay": 0.9, "epsilon": 1.0, "momentum": momentum, "weight_decay": weight_decay}
    expected = scalars(gradients, rates=rates, **settings)
    p = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
    untouched = torch.ones(1, requires_grad=True)
    optimizer = RMSPropTF([p, untouched], lr=0.1, **settings)
    for gradient, rate, wanted in zip(gradients, rates, expected, strict=True):
        optimizer.param_groups[0]["lr"] = (
            torch.tensor(rate, dtype=torch.float64) if as_tensor else rate
        )
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
        torch.testing.assert_close(p.detach(), torch.full((3,), wanted, dtype=torch.float64))
    assert untouched.item() == 1.0


def test_rmsprop_tf_continues_from_its_saved_state():
    def run(optimizer, p, gradients):
        for gradient in gradients:
            p.grad = torch.full_like(p, gradient)
            optimizer.step()

    whole, half = (torch.ones(2, requires_grad=True) for _ in range(2))
    run(RMSPropTF([whole], momentum=0.9), whole, [1.0, 2.0, 3.0])
    first = RMSPropTF([half], momentum=0.9)
    run(first, half, [1.0])
    second = RMSPropTF([half], momentum=0.9)
    second.load_state_dict(first.state_dict())
    run(second, half, [2.0, 3.0])
    assert torch.equal(whole, half)


@pytest.mark.parametrize(
    "wrong", [{"decay": 1.0}, {"momentum": -0.1}, {"epsilon": 0.0}, {"lr": -1.0}]
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        RMSPropTF([torch.ones(1, requires_grad=True)], **wrong)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop", "rmsprop-tf"])
def test_every_optimizer_of_a_recipe_goes_downhill(name):
    model = torch.nn.Linear(4, 1)
    torch.nn.init.ones_(model.weight)
    optimizer = build_optimizer(model.parameters(), TrainingSettings(optimizer=name, lr=0.01))
    x = torch.eye(4)
    before = model(x).square().mean().item()
    for _ in range(20):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert model(x).square().mean().item() < before
