"""The curve of cost against accuracy: cooldowns of one training equal trainings of their own."""

import pytest
import torch
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.errors import InputError
from fineprune.experiments.compare import plan_runs
from fineprune.experiments.cooldowns import plan_curve, train_trunk
from fineprune.runs.run import read_run, read_runs
from fineprune.training.learning_rate import begin_of_cooldown, rate_at
from fineprune.training.loop import train
from fineprune.training.recipe import make_recipe

pytestmark = pytest.mark.usefixtures("fast_spawn")


def recipe(*changes):
    sections = {
        "data": {"name": "digits", "train_size": 128},
        "training": {
            "epochs": 12,
            "batch_size": 32,
            "lr": 0.05,
            "warmup": 1,
            "evaluate_every": 12,
            "evaluate_last": 1,
        },
        "pruning": {"policy": "adaptive", "save": 0.35},
        "run": {"device": "cpu", "threads": 1, "precision": "float32", "compile": "off"},
    }
    return make_recipe(sections, changes)


def test_the_rate_is_constant_and_falls_to_zero_in_the_last_fifth():
    settings = recipe("training.schedule=cooldown", "training.epochs=20").training
    assert begin_of_cooldown(settings) == 16
    assert rate_at(settings, 0.5) < 0.05
    assert {rate_at(settings, progress) for progress in (1, 7.5, 16)} == {0.05}
    assert rate_at(settings, 17) == pytest.approx(0.05 * 0.5)
    assert rate_at(settings, 20) == 0


def test_the_lengths_share_one_trunk(tmp_path):
    trunk, *others = plan_curve(recipe("training.epochs=40"), 0, tmp_path)
    assert trunk.name == "cooldown-40"
    assert [run.name for run in others] == ["cooldown-30", "cooldown-20", "cooldown-10"]
    assert all(run.trunk is not None and run.trunk.folder == trunk.folder for run in others)
    assert trunk.recipe.run.checkpoint_every == 1
    assert all(run.recipe.pruning.policy == "full" for run in (trunk, *others))
    with pytest.raises(InputError, match="got 12 epochs with a warm-up of 12"):
        plan_curve(recipe("training.warmup=12"), 0, tmp_path)


def test_no_run_is_said_to_have_a_rate_that_another_comparison_chose(tmp_path):
    """The recipe may be that of a run of a comparison with --tune."""
    runs = plan_runs(recipe("run.rate_factor=2.0"), tmp_path, 1, ["full"], curve=True)
    assert [run.recipe.run.rate_factor for run in runs] == [None] * 5


def test_a_cooldown_is_bit_for_bit_a_training_of_its_own(tmp_path):
    trunk, *others = plan_curve(recipe(), 0, tmp_path)
    assert len(others) == 3
    train_trunk(trunk.recipe, trunk.folder, 1, [(run.folder, run.recipe) for run in others])
    for run in others:
        copied = (run.folder / "metrics.jsonl").read_text().splitlines()
        assert len(copied) == begin_of_cooldown(run.recipe.training)
        alone = tmp_path / "alone" / run.name
        states, metrics = [], []
        for folder in (run.folder, alone):
            train(run.recipe, folder, resume=True)
            states.append(torch.load(folder / "checkpoint.pt", weights_only=True)["model"])
            metrics.append([line["train_loss"] for line in read_run(folder).metrics])
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert metrics[0] == metrics[1]


def test_a_trunk_that_is_trained_again_leaves_begun_cooldowns_alone(tmp_path):
    trunk, *others = plan_curve(recipe("training.epochs=6"), 0, tmp_path)
    others[0].folder.mkdir()
    killed = others[1].folder.with_name(f"{others[1].folder.name}.fineprune.tmp")
    (killed / "history").mkdir(parents=True)
    train_trunk(trunk.recipe, trunk.folder, 1, [(run.folder, run.recipe) for run in others])
    assert not list(others[0].folder.iterdir())
    assert (others[1].folder / "checkpoint.pt").exists()
    assert not killed.exists()


def test_compare_trains_and_draws_the_curve(tmp_path):
    (tmp_path / "recipe.toml").write_text(recipe("training.epochs=4").to_toml())
    command = ["compare", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "compared")]
    result = CliRunner().invoke(app, [*command, "--arms", "full,adaptive", "--curve"])
    assert result.exit_code == 0, result.output
    runs = {run.summary.arm: run.summary for run in read_runs([tmp_path / "compared"])}
    assert set(runs) == {"full", "adaptive", *(f"cooldown-{epochs}" for epochs in (2, 3, 4))}
    assert runs["cooldown-3"].samples_trained == 3 * 128
    planned = plan_curve(recipe("training.epochs=4"), 0, tmp_path / "compared")
    assert all(run.finished() for run in planned)
