"""Runs of policies that need the losses of samples that an epoch did not train."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo_group import gloo_group
from resuming import Stop, checkpoint_number, train_until
from torch.multiprocessing.spawn import spawn

from fineprune.runs.files import read_metrics
from fineprune.runs.run import read_run
from fineprune.training import loop, rescoring
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.loop import train
from fineprune.training.recipe import make_recipe
from fineprune.training.train_state import checkpoint_state

RECIPE = {
    "data": {"name": "digits", "train_size": 256},
    "training": {
        "epochs": 4,
        "batch_size": 32,
        "lr": 0.02,
        "evaluate_every": 2,
        "evaluate_last": 1,
    },
    # After an epoch, about half of the classes have less than the probability of a guess.
    "pruning": {"policy": "progressive-dropout", "threshold": 0.1},
    "run": {"threads": 1, "device": "cpu", "precision": "float32"},
}
TIMES = {"seconds", "bookkeeping_seconds", "evaluate_seconds"}


def own_data():
    """Return images of two classes, with noise from torch's generator."""

    class Noisy(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
        def __len__(self):
            return 128

        def __getitem__(self, index):
            return torch.full((3, 32, 32), index % 2 / 2) + torch.rand(3, 32, 32), index % 2

    return Noisy(), Noisy()


def outcome(folder):
    state = load_checkpoint(folder / "checkpoint.pt")
    weights = torch.cat([value.flatten() for value in state["model"].values()])
    metrics = [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in read_metrics(folder / "metrics.jsonl")
    ]
    return weights, metrics, state["pruner"]["learned"]["losses"]


def assert_same(one, other):
    assert torch.equal(one[0], other[0])
    assert one[1] == other[1]
    torch.testing.assert_close(one[2], other[2], rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(make_recipe(RECIPE), folder)
    return folder


def test_forward_passes_over_skipped_samples_are_counted(whole):
    run = read_run(whole)
    skipped = [line["skipped"] for line in run.metrics]
    assert skipped[0] == skipped[3] == 0
    assert skipped[1] > 0
    # The losses of the third epoch are not needed, since the fourth trains all samples.
    rescored = [line["forward_samples"] - line["samples"] for line in run.metrics]
    assert rescored == [0, skipped[1], 0, 0]
    assert run.summary.forward_samples == run.summary.samples_trained + skipped[1]


def test_the_policy_learns_the_losses_in_evaluation_mode(tmp_path, monkeypatch):
    checked = []

    def rescore(state, epoch, totals):
        wanted = state.pruner.to_rescore()
        before = torch.get_rng_state(), {k: v.clone() for k, v in state.model.state_dict().items()}
        rescoring.rescore(state, epoch, totals)
        assert torch.equal(before[0], torch.get_rng_state())
        assert all(torch.equal(before[1][k], v) for k, v in state.model.state_dict().items())
        assert state.model.training
        if wanted is not None:
            x, y = state.data.make_fetch()(wanted, epoch)
            state.model.eval()
            with torch.no_grad():
                expected = F.cross_entropy(state.model(x), y, reduction="none")
            state.model.train()
            state.pruner.synchronize()
            learned = state.pruner.policy.losses[wanted.numpy()]
            assert torch.allclose(torch.from_numpy(learned), expected, atol=1e-5)
            checked.append(len(wanted))

    monkeypatch.setattr(loop, "rescore", rescore)
    changes = [
        "network.name=resnet18",
        "pruning.anneal=0",
        "training.epochs=3",
        "data.validation=32",
    ]
    train(make_recipe(RECIPE, changes), tmp_path / "run")
    assert len(checked) == 1
    assert checked[0] > 0


@pytest.mark.parametrize("position", ["first", "last", "end"])
def test_a_run_stopped_in_a_rescored_epoch_and_resumed_has_the_same_result(
    position, whole, tmp_path, monkeypatch
):
    steps = [line["steps"] for line in read_metrics(whole / "metrics.jsonl")]
    # One checkpoint per step, and one at the end of each epoch.
    number = steps[0] + 1 + {"first": 1, "last": steps[1], "end": steps[1] + 1}[position]
    recipe = make_recipe(RECIPE, ["run.checkpoint_steps=1"])
    train_until(checkpoint_number(number), recipe, tmp_path / "run", monkeypatch)
    train(recipe, tmp_path / "run", resume=True)
    assert_same(outcome(whole), outcome(tmp_path / "run"))


def ranks_main(rank, folder):
    """Train a run, then stop one after the last step of a rescored epoch, and resume it."""
    changes = ["network.name=resnet18", "data.train_size=128", "training.batch_size=16"]
    changes += ["data.validation=32"]
    changes += ["training.epochs=3", "pruning.anneal=0", "run.checkpoint_steps=1"]
    recipe = make_recipe(RECIPE, changes)
    with gloo_group(rank, folder):
        train(recipe, Path(folder) / "whole")
        dist.barrier()
        steps = [line["steps"] for line in read_metrics(Path(folder) / "whole" / "metrics.jsonl")]
        states = []

        def stop_after(state, totals):
            states.append(checkpoint_state(state, totals))
            # One per step and one at the end of the epoch were written before this one.
            if len(states) == steps[0] + 1 + steps[1] + 1:
                raise Stop
            return states[-1]

        vars(loop)["checkpoint_state"] = stop_after
        with pytest.raises(Stop):
            train(recipe, Path(folder) / "resumed")
        vars(loop)["checkpoint_state"] = checkpoint_state
        dist.barrier()
        train(recipe, Path(folder) / "resumed", resume=True)


@pytest.mark.long
def test_two_ranks_that_are_resumed_before_they_rescore_have_the_same_result(fast_spawn, tmp_path):
    spawn(ranks_main, args=(str(tmp_path),), nprocs=2)
    whole, resumed = outcome(tmp_path / "whole"), outcome(tmp_path / "resumed")
    assert whole[1][1]["forward_samples"] > whole[1][1]["samples"]
    assert_same(whole, resumed)


def test_own_data_are_rescored_the_same_with_any_number_of_workers(tmp_path):
    changes = [f"data.name={__name__}:own_data", "data.train_size=none", "network.classes=2"]
    changes += ["pruning.threshold=0.5"]
    for workers in (0, 2):
        recipe = make_recipe(RECIPE, [*changes, f"data.workers={workers}"])
        train(recipe, tmp_path / f"workers{workers}")
    lines = read_metrics(tmp_path / "workers0" / "metrics.jsonl")
    assert any(line["forward_samples"] > line["samples"] for line in lines)
    assert_same(outcome(tmp_path / "workers0"), outcome(tmp_path / "workers2"))
