"""Optimisations of speed must not change the result, and on a GPU no step may wait for it."""

import functools
import shutil
from typing import get_args

import pytest
import torch
import torch._dynamo
from resuming import train_through
from torch import nn

from fineprune.distributed.optimizer_rate import set_rate
from fineprune.runs.files import read_metrics
from fineprune.training import hardware
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.hardware import resolved
from fineprune.training.local_epochs import LocalEpochs
from fineprune.training.optimizer import build_optimizer, load_optimizer
from fineprune.training.recipe import make_recipe
from fineprune.training.settings import OptimizerName, TrainingSettings
from fineprune.training.trainer import train

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def recipe(*changes):
    return make_recipe(
        {
            "data": {"name": "synthetic", "train_size": 320},
            "training": {"epochs": 3, "batch_size": 64, "lr": 0.02, "milestones": [1, 2]},
            "pruning": {"policy": "fine-pruning", "window": 3, "start": 1, "prune": 64},
            "run": {"device": "cpu", "threads": 1, "precision": "float32"},
        },
        changes,
    )


@pytest.fixture
def seems_to_have_a_gpu(monkeypatch):
    for name, found in {"_check_device": None, "_has_fast_bfloat16": True}.items():
        monkeypatch.setattr(hardware, name, lambda device, found=found: found)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def test_auto_compiles_on_a_gpu_with_triton_only(monkeypatch, seems_to_have_a_gpu):
    assert resolved(recipe()).run.compile == "off"
    assert resolved(recipe("run.device=cuda")).run.compile == "on"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolved(recipe("run.device=cuda")).run.compile == "off"


# What is compiled to C++ takes most of a minute. The other backend traces the same network.
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.long, NEEDS_COMPILER])


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_network_trains_like_the_plain_one(tmp_path, monkeypatch, backend):
    """The compiled network may sum in another order, so the weights need not be equal."""
    train(recipe(), tmp_path / "plain")
    compiler = functools.partial(torch.compile, backend=backend)
    monkeypatch.setattr(torch, "compile", compiler)
    try:
        train(recipe("run.compile=on"), tmp_path / "compiled")
    finally:
        torch._dynamo.reset()
    names = ("plain", "compiled")
    plain, compiled = (load_checkpoint(tmp_path / n / "checkpoint.pt")["model"] for n in names)
    assert plain.keys() == compiled.keys()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-3, atol=1e-4)
    lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in names]
    assert [line["steps"] for line in lines[0]] == [line["steps"] for line in lines[1]]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_tensor_as_learning_rate_gives_the_same_steps_and_is_kept_by_loading(name):
    def run(as_tensor):
        model = nn.Linear(3, 2, dtype=torch.float64)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        optimizer = build_optimizer(model.parameters(), TrainingSettings(optimizer=name, lr=0.5))
        if as_tensor:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
        for rate in (0.5, 0.25, 0.125):
            set_rate(optimizer, rate)
            model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    (number, _), (tensor, optimizer) = run(False), run(True)
    torch.testing.assert_close(number.weight, tensor.weight)
    rate = optimizer.param_groups[0]["lr"]
    assert rate.item() == 0.125
    load_optimizer(optimizer, optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] is rate


@needs_gpu
@pytest.mark.parametrize(
    ("compiling", "optimizer"),
    [("on", "sgd"), *(("off", name) for name in get_args(OptimizerName))],
)
def test_no_step_waits_for_the_gpu(compiling, optimizer, tmp_path, monkeypatch):
    train_epoch = LocalEpochs.train

    def watched(self, epoch, *rest):
        # The first epoch makes buffers and compiles, which may wait.
        torch.cuda.set_sync_debug_mode("error" if epoch else "default")
        try:
            return train_epoch(self, epoch, *rest)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(LocalEpochs, "train", watched)
    made = recipe(
        "run.device=cuda",
        "run.precision=auto",
        f"run.compile={compiling}",
        f"training.optimizer={optimizer}",
    )
    assert train(made, tmp_path / "run").pruned_epochs > 0


@needs_gpu
def test_a_run_can_be_resumed_on_a_gpu(tmp_path):
    on_gpu = recipe("run.device=cuda")
    train_through(1, on_gpu, tmp_path / "run")
    summary = train(on_gpu, tmp_path / "run", resume=True)
    assert summary.epochs == 3
    assert [line["epoch"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
