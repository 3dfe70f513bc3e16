"""The optimizers of a recipe, and RMSProp in TensorFlow's form compared with its formula."""

import math
from typing import get_args

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fineprune.distributed.optimizer_rate import set_rate
from fineprune.training.optimizer import build_optimizer, load_optimizer
from fineprune.training.rmsprop_tf import RMSPropTF
from fineprune.training.settings import OptimizerName, TrainingSettings


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


@pytest.mark.parametrize("wrong", [{"decay": 1.0}, {"momentum": -0.1}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        RMSPropTF([torch.ones(1, requires_grad=True)], **wrong)


@pytest.mark.parametrize("name", get_args(OptimizerName))
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


class FusedKernels(TorchDispatchMode):
    """Lets torch's fused kernels do nothing, because they have no fake implementation.

    On a GPU, only the overload that reads the learning rate there is allowed.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("aten::_fused_"):
            parameters = args[0]
            assert func.name().endswith("_.tensor_lr") or parameters[0].device.type == "cpu"
            return None
        return func(*args, **(kwargs or {}))


def fake_parameters(device):
    return [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in [(4, 3), (4,)]]


def fake_step(optimizer, parameters, rate):
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    set_rate(optimizer, rate)
    optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_no_optimizer_waits_for_the_gpu(name, momentum, weight_decay):
    """Fake tensors have no values, so that reading one, as ``.item()`` does, raises an error."""
    given = {} if name.startswith("adam") else {"momentum": momentum}
    settings = TrainingSettings(optimizer=name, weight_decay=weight_decay, **given)
    with FakeTensorMode(), FusedKernels():
        parameters = fake_parameters("cuda")
        optimizer = build_optimizer(parameters, settings)
        rate = optimizer.param_groups[0]["lr"]
        assert rate.device.type == "cuda"
        for number in range(3):
            fake_step(optimizer, parameters, 0.1 / (number + 1))
        assert optimizer.param_groups[0]["lr"] is rate
        with pytest.raises(DataDependentOutputException):
            torch.zeros((), device="cuda").item()


@pytest.mark.parametrize("name", get_args(OptimizerName))
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_a_state_from_another_kind_of_device_does_not_make_it_wait(name, devices):
    settings = TrainingSettings(optimizer=name)

    def form(optimizer):
        options = ("fused", "foreach", "capturable")
        return {option: optimizer.param_groups[0].get(option) for option in options}

    with FakeTensorMode(), FusedKernels():
        first, second = (fake_parameters(device) for device in devices)
        saved, loaded = (build_optimizer(p, settings) for p in (first, second))
        fake_step(saved, first, 0.1)
        state = saved.state_dict()
        for values in state["state"].values():  # Checkpoints are loaded on the CPU.
            values.update({key: value.cpu() for key, value in values.items() if value is not None})
        wanted, rate = form(loaded), loaded.param_groups[0]["lr"]
        load_optimizer(loaded, state)
        assert form(loaded) == wanted
        assert loaded.param_groups[0]["lr"] is rate
        fake_step(loaded, second, 0.1)
