"""The moving average of the weights: its formula, its evaluation, and its refusals."""

import copy

import pytest
import torch
from resuming import small_recipe
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from fineprune.networks.registry import build_network
from fineprune.runs.files import read_metrics
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.data import load_data
from fineprune.training.evaluate import evaluate
from fineprune.training.moving_average import MovingAverage
from fineprune.training.network import precision
from fineprune.training.trainer import train


def small(*changes):
    settings = ["training.epochs=3", "training.batch_size=16", "training.lr=0.05"]
    settings += ["training.ema=0.8", "training.evaluate_every=1", "pruning.prune=32", *changes]
    data = {"name": "synthetic", "train_size": 96, "image_size": 16}
    return small_recipe(*settings, data=data, network={"name": "resnet18", "classes": 4})


def test_the_average_is_that_of_torch():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        ours = MovingAverage(model, 0.9)
        theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for _ in range(5):
            torch._foreach_add_([p.detach() for p in model.parameters()], 0.1)
            model(torch.randn(8, 3, 4, 4))
            ours.update(model)
            theirs.update_parameters(model)
    state, expected = ours.network.state_dict(), theirs.module.state_dict()
    assert not torch.equal(state["3.weight"], model.get_parameter("3.weight"))
    for name, value in state.items():
        counter = name.endswith("num_batches_tracked")
        assert value == 5 if counter else torch.equal(value, expected[name]), name


class NoReads(TorchDispatchMode):
    """Raises an error if a value is read from a tensor, which would wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"):
            raise RuntimeError(f"{func.name()} waits for the device")
        return func(*args, **(kwargs or {}))


def test_an_update_reads_no_value_so_that_it_does_not_wait_for_a_gpu():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = MovingAverage(model, 0.9)
    with NoReads():
        for _ in range(3):
            average.update(model)
        with pytest.raises(RuntimeError, match="waits for the device"):
            torch.ones(()).item()


def test_the_average_of_all_steps_is_evaluated_in_place_of_the_weights(tmp_path, monkeypatch):
    """The steps are those without an average, and their average is computed by hand."""
    recipe = small()
    by_hand: list[dict[str, torch.Tensor]] = []

    class Noted(MovingAverage):
        def update(self, network):
            super().update(network)
            weights = copy.deepcopy(network.state_dict())
            if by_hand:
                last = by_hand[-1]
                weights = {
                    key: last[key].lerp(w, 1 - 0.8) if w.is_floating_point() else w
                    for key, w in weights.items()
                }
            by_hand.append(weights)

    with monkeypatch.context() as patched:
        patched.setattr("fineprune.training.trainer.MovingAverage", Noted)
        train(recipe, tmp_path / "average")
    train(recipe.replaced("training", ema=None), tmp_path / "plain")
    average, plain = (load_checkpoint(tmp_path / n / "checkpoint.pt") for n in ("average", "plain"))
    assert "average" not in plain
    steps = [line["steps"] for line in read_metrics(tmp_path / "average/metrics.jsonl")]
    assert len(by_hand) == sum(steps)
    for name, value in average["average"]["network"].items():
        assert torch.equal(value, by_hand[-1][name]), name
        assert torch.equal(average["model"][name], plain["model"][name]), name

    made = build_network("resnet18", 4, 3)
    made.load_state_dict(average["average"]["network"])
    batches = (batch for _, batch in load_data(recipe).evaluation)
    evaluation = evaluate(made, batches, "cpu", precision(recipe.run), 4)
    last, other = (read_metrics(tmp_path / n / "metrics.jsonl")[-1] for n in ("average", "plain"))
    assert (last["test_loss"], last["test_accuracy"]) == (evaluation.loss, evaluation.accuracy)
    assert last["train_loss"] == other["train_loss"]
    assert last["test_loss"] != other["test_loss"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["training.ema=1"], r"training\.ema to be below 1, got 1"),
        (["training.ema=0"], r"training\.ema to be above 0, got 0"),
        (["training.ema=nan"], r"training\.ema to be a finite number, got nan"),
        (["distributed.strategy=sync"], r"ema = none .*strategy 'sync'"),
        (["distributed.simulate=2"], r"training\.ema = none with distributed\.simulate, got 0\.8"),
    ],
)
def test_what_cannot_be_averaged_is_refused_in_one_line(changes, told):
    with pytest.raises(ValueError, match=told) as raised:
        small(*changes)
    assert "\n" not in str(raised.value)
