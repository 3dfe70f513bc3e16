"""Recipes, learning rates, the training loop, the run folder, and interrupted runs."""

import itertools

import numpy as np
import pytest
import torch
from resuming import checkpoint_number, train_through, train_until

from fineprune.runs.files import read_metrics
from fineprune.runs.run import read_run
from fineprune.training import hardware
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.learning_rate import rate_at
from fineprune.training.recipe import Recipe, make_recipe, read_recipe
from fineprune.training.trainer import train

SMALL = {
    "data": {"name": "digits", "train_size": 256},
    "training": {
        "epochs": 6,
        "batch_size": 64,
        "lr": 0.02,
        "milestones": [3, 5],
        "evaluate_every": 2,
        "evaluate_last": 1,
    },
    "pruning": {"policy": "fine-pruning", "window": 2, "start": 1, "prune": 64},
    "run": {
        "threads": 1,
        "device": "cpu",
        "precision": "float32",
        "compile": "off",
    },
}

TIMES = {"seconds", "bookkeeping_seconds", "evaluate_seconds"}


def small(*changes):
    return make_recipe(SMALL, changes)


def outcome(folder):
    """Return the results of a finished run, which must not depend on interruptions."""
    state = load_checkpoint(folder / "checkpoint.pt")
    weights = torch.cat([value.flatten() for value in state["model"].values()])
    metrics = [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in read_metrics(folder / "metrics.jsonl")
    ]
    counts = {epoch: c.tolist() for epoch, c in read_run(folder).counts().items()}
    return weights, metrics, counts, state["pruner"]["learned"]["counts"]


def assert_same(one, other):
    assert torch.equal(one[0], other[0])
    assert one[1] == other[1]
    assert one[2] == other[2]
    assert torch.equal(one[3], other[3])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(small(), folder)
    return folder


def test_the_folder_of_a_run_holds_all_results(whole):
    run = read_run(whole)
    assert [line["epoch"] for line in run.metrics] == list(range(6))
    # Epochs e = 1, 3, 5 are at position 1, which is at least start = 1. The others are at 0.
    assert [line["pruned"] for line in run.metrics] == [True, False] * 3
    assert [line["samples"] for line in run.metrics] == [192, 256] * 3
    assert [line["steps"] for line in run.metrics] == [3, 4] * 3
    assert [line["test_accuracy"] is not None for line in run.metrics] == [False, True] * 3
    assert run.summary.samples_trained == 3 * (192 + 256)
    assert run.summary.skipped_share == pytest.approx(64 / 512)
    assert run.summary.parameters == 62_006
    assert run.summary.accuracy_last == run.metrics[-1]["test_accuracy"]
    assert run.summary.evaluated_on == "test"
    assert run.summary.hardware.threads == 1
    assert set(run.counts()) == {2, 4, 6}
    assert all(counts.shape == (256,) for counts in run.counts().values())
    assert read_recipe(whole / "recipe.toml") == small()


def test_the_network_learns(tmp_path):
    changes = ["training.epochs=30", "training.milestones=[20, 25]", "training.evaluate_every=30"]
    assert train(small(*changes), tmp_path / "run").accuracy_last > 0.8


@pytest.mark.parametrize("policy", ["fine-pruning", pytest.param("random", marks=pytest.mark.long)])
def test_a_run_stopped_after_any_epoch_and_resumed_has_the_same_result(policy, tmp_path):
    recipe = small(f"pruning.policy={policy}", "training.evaluate_every=6")
    train(recipe, tmp_path / "whole")
    for last in range(6):
        folder = tmp_path / f"stopped{last}"
        train_through(last, recipe, folder)
        train(recipe, folder, resume=True)
        one, other = (load_checkpoint(f / "checkpoint.pt") for f in (tmp_path / "whole", folder))
        for name, value in one["model"].items():
            assert torch.equal(value, other["model"][name])


@pytest.mark.parametrize("batch", [1, 2, 4, 6, 7, 9])
def test_a_run_stopped_inside_an_epoch_and_resumed_has_the_same_result(
    batch, whole, tmp_path, monkeypatch
):
    """Stop in a pruning epoch (batches 1-3), in one that clears (4-7), or in the next (8-10)."""
    recipe = small("run.checkpoint_steps=1")
    # One more checkpoint is written at the end of each epoch.
    after = checkpoint_number(batch + (batch > 3) + (batch > 7))
    train_until(after, recipe, tmp_path / "run", monkeypatch)
    train(recipe, tmp_path / "run", resume=True)
    assert_same(outcome(whole), outcome(tmp_path / "run"))


def test_accumulation_averages_the_gradients_of_its_batches(tmp_path):
    """One batch of 256 samples and four accumulated batches of 64 give the same steps."""
    options = ["pruning.policy=full", "data.crop_padding=0", "training.epochs=3"]
    options += ["training.milestones=[]"]
    train(small(*options, "training.batch_size=256"), tmp_path / "one")
    train(small(*options, "training.accumulation=4"), tmp_path / "four")
    one, four = (
        load_checkpoint(tmp_path / name / "checkpoint.pt")["model"] for name in ("one", "four")
    )
    for name, value in one.items():
        assert torch.allclose(value, four[name], atol=1e-5), name


@pytest.mark.parametrize(("accumulation", "at"), [(1, [3, 6]), (2, [4, 6]), (5, [5, 8])])
def test_a_checkpoint_inside_an_epoch_is_written_after_the_next_step(
    accumulation, at, tmp_path, monkeypatch
):
    saved = []
    monkeypatch.setattr(
        "fineprune.training.trainer.save_checkpoint",
        lambda path, state: saved.append(state["epoch_so_far"]),
    )
    changes = ["training.epochs=1", "training.milestones=[]", "training.batch_size=32"]
    changes += ["pruning.policy=full", "run.checkpoint_steps=3"]
    train(small(*changes, f"training.accumulation={accumulation}"), tmp_path / "run")
    assert [so_far["batches"] for so_far in saved if so_far] == at


def test_a_damaged_checkpoint_is_refused(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="cannot read it"):
        load_checkpoint(tmp_path / "checkpoint.pt")


def test_the_random_state_and_the_threads_of_torch_are_restored(tmp_path):
    torch.manual_seed(7)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    train(small("training.epochs=1", "training.milestones=[]"), tmp_path / "run")
    assert torch.equal(before, torch.get_rng_state())
    assert threads == torch.get_num_threads()


def test_milestones_are_those_of_multisteplr():
    settings = small().training
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=settings.lr)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5], gamma=settings.gamma)
    for epoch in range(6):
        assert rate_at(settings, epoch + 0.5) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_rates_have_the_base_rate_as_their_maximum_and_end_near_zero(schedule):
    changes = (f"training.schedule={schedule}", "training.epochs=10", "training.milestones=[]")
    settings = small(*changes).training
    rates = [rate_at(settings, progress) for progress in np.linspace(0, 10, 501)]
    assert max(rates) == pytest.approx(settings.lr)
    assert rates[-1] < 1e-4 * settings.lr
    peak = int(np.argmax(rates))
    assert all(a <= b for a, b in itertools.pairwise(rates[: peak + 1]))
    assert all(a >= b for a, b in itertools.pairwise(rates[peak:]))


def test_a_warmup_rises_to_the_base_rate():
    changes = ("training.warmup=2", "training.schedule=constant", "training.milestones=[]")
    settings = small(*changes).training
    assert rate_at(settings, 0) < 1e-3 * settings.lr
    assert rate_at(settings, 1) == pytest.approx(settings.lr / 2, rel=0.01)
    assert rate_at(settings, 2) == settings.lr


def test_an_unavailable_device_is_refused_before_the_training(tmp_path):
    with pytest.raises(ValueError, match=r"expected run\.device"):
        train(small("run.device=cuda:99"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_recipe_is_unchanged_after_writing_and_reading(tmp_path):
    recipe = small('data.dir="a \\"quoted\\" \\\\ dätä \U0001f600 \\u007f"', "pruning.prune=0.25")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    assert read_recipe(tmp_path / "recipe.toml") == recipe
    assert make_recipe({}) == Recipe()


def test_windows_from_milestones_end_at_the_milestones():
    recipe = make_recipe(
        {
            "training": {"epochs": 20, "milestones": [6, 12, 16]},
            "pruning": {"policy": "random", "windows_per_interval": 1, "start": 0.5, "prune": 0.25},
        }
    )
    assert recipe.schedule().boundaries == (6, 12, 16, 20)


def test_a_container_limits_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(hardware, "_QUOTA", tmp_path / "cpu.max")
    assert hardware.available_cores() == 8  # There is no such file without containers.
    for text, cores in (("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(f"{text}\n")
        assert hardware.available_cores() == cores
