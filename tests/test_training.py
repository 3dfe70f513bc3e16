"""Recipes, learning rates, the training loop, the run folder, and interrupted runs."""

import itertools

import numpy as np
import pytest
import torch
from made_images import break_files, write_folder
from resuming import outcome, small_recipe, train_with_stops

from fineprune.runs.files import read_metrics
from fineprune.runs.run import read_run
from fineprune.training import hardware
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.learning_rate import rate_at
from fineprune.training.recipe import Recipe, make_recipe, read_recipe
from fineprune.training.trainer import train


def small(*changes):
    return small_recipe(
        *("training.epochs=6", "training.milestones=[3, 5]", "training.evaluate_every=2"), *changes
    )


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


def noisy_digits(folder):
    """Labels of which some are wrong, and the policy that looks for them."""
    adaptive = {"policy": "adaptive", "save": 0.35}
    return small_recipe("data.label_noise=0.3", "training.batch_size=128", pruning=adaptive)


def broken_images(folder):
    write_folder(folder / "train", 64)
    write_folder(folder / "test", 24)
    break_files(folder, missing=False)
    data = {"name": "images", "train": str(folder / "train"), "test": str(folder / "test")}
    settings = ["data.image_size=32", "data.broken_limit=0.1", "training.batch_size=16"]
    return small_recipe(*settings, "pruning.prune=16", data=data)


def own_data(folder):
    """Random transforms draw from the generators of torch, NumPy and Python."""
    data = {"name": "test_own_data:noisy"}
    return small_recipe("training.batch_size=32", "pruning.prune=32", data=data)


def average(folder):
    """A moving average of the weights, of which some are frozen, and gradients of two batches."""
    settings = ["training.ema=0.8", "training.accumulation=2", "training.batch_size=8"]
    settings += ['network.freeze=["conv", "norm", "stages.0"]', "pruning.prune=32"]
    data = {"name": "synthetic", "train_size": 96, "image_size": 16}
    return small_recipe(*settings, data=data, network={"name": "resnet18", "classes": 4})


def slow_worker(folder):
    settings = ["training.epochs=3", "training.batch_size=32", "distributed.simulate=3"]
    settings += ["distributed.step_seconds=[1.0, 1.0, 3.0]", "distributed.step_spread=0.3"]
    return small_recipe(*settings)


@pytest.mark.parametrize(
    ("made", "changes", "places"),
    [
        (lambda folder: small(), (), None),
        (lambda folder: small("pruning.policy=random"), (), {(1, 2), (4, 0)}),
        (noisy_digits, (), None),
        (slow_worker, (), None),
        (own_data, ("data.workers=2",), {(0, 2)}),
        (broken_images, (), {(0, 2), (1, 1), (2, 0)}),
        (broken_images, ("data.workers=2",), {(1, 1)}),
        (average, (), {(1, 2), (2, 0), (3, 10)}),
    ],
)
def test_a_run_that_is_stopped_and_resumed_ends_as_if_it_never_was(
    made, changes, places, tmp_path, monkeypatch
):
    """Inside an epoch, after its last batch and at its end, and also with processes that load."""
    recipe = made(tmp_path)
    train(recipe, tmp_path / "whole")
    settings = make_recipe(recipe.as_dict(), ["run.checkpoint_steps=1", *changes])
    stops = train_with_stops(settings, tmp_path / "run", monkeypatch, places)
    if places is None:
        lines = read_metrics(tmp_path / "whole/metrics.jsonl")
        assert len(stops) == sum(line["steps"] + 1 for line in lines)
    else:
        assert stops == places
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


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


def test_a_recipe_is_unchanged_after_writing_and_reading(tmp_path):
    recipe = small('data.dir="a \\"quoted\\" \\\\ dätä \U0001f600 \\u007f"', "pruning.prune=0.25")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    assert read_recipe(tmp_path / "recipe.toml") == recipe
    assert make_recipe({}) == Recipe()


def test_a_container_limits_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(hardware, "_QUOTA", tmp_path / "cpu.max")
    assert hardware.available_cores() == 8  # There is no such file without containers.
    for text, cores in (("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(f"{text}\n")
        assert hardware.available_cores() == cores
