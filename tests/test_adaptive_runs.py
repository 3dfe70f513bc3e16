"""Recipes with the adaptive policy: planned, trained and compared with their controls."""

import json

import pytest
from resuming import small_recipe
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.runs.run import read_run, read_runs
from fineprune.training.forecast import forecast, predicted_cost
from fineprune.training.trainer import train

pytestmark = pytest.mark.usefixtures("fast_spawn")


def small():
    settings = ["data.train_size=512", "training.epochs=8", "training.batch_size=32"]
    settings += ["training.milestones=[3, 5, 7]", "training.evaluate_every=8"]
    return small_recipe(*settings, pruning={"policy": "adaptive", "save": 0.35, "first_epoch": 2})


def test_a_run_has_exactly_the_planned_steps(tmp_path):
    train(small(), tmp_path / "run")
    cost = predicted_cost(small(), 512)
    lines = read_run(tmp_path / "run").metrics
    assert sum(line["steps"] for line in lines) == cost.steps == round(0.65 * 8 * 16)
    assert [line["samples"] for line in lines[:2]] == [512] * 2
    assert lines[-1]["samples"] < 256


def test_a_plan_shows_the_samples_of_each_epoch():
    planned = forecast(small(), 512).kept
    arguments = "plan training.epochs=8 training.milestones=[3,5,7]"
    arguments += " training.gamma=0.2 training.batch_size=32"
    command = [*arguments.split(), "--save", "0.35", "--samples", "512"]
    shown = CliRunner().invoke(app, [*command, "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["kept"] == planned
    assert json.loads(shown.stdout)["steps"] == predicted_cost(small(), 512).steps
    text = CliRunner().invoke(app, command)
    assert "steps: 83 of 128" in text.stdout


def test_a_plan_shows_epochs_of_about_one_length_in_one_line():
    options = "plan training.epochs=200 training.schedule=linear"
    shown = CliRunner().invoke(app, [*options.split(), "--save", "0.35"]).stdout.splitlines()
    bars = [line.split() for line in shown if "█" in line]
    assert 10 < len(bars) <= 40
    assert bars[0][2:] == ["49,408", "to", "50,000"]
    ends = [int(name.split("-")[-1]) for name, *_ in bars]
    begins = [int(name.split("-")[0]) for name, *_ in bars]
    assert begins == [1, *(end + 1 for end in ends[:-1])]
    assert ends[-1] == 200


def test_a_plan_has_other_bars_where_the_encoding_has_no_block():
    command = ["plan", "training.epochs=8", "training.milestones=[3,5,7]", "--save", "0.35"]
    usual = CliRunner().invoke(app, command)
    other = CliRunner(charset="latin-1").invoke(app, command)
    assert other.exit_code == 0, other.exception
    assert other.stdout == usual.stdout.replace("█", "#") != usual.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--save 0.35", "expected a recipe, or training.epochs="),
        ("training.epochs=8 --save 1", "expected save as a share in [0, 1), got 1.0"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(options, message):
    result = CliRunner().invoke(app, ["plan", *options.split()])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_compare_trains_the_policy_and_its_controls_at_the_same_cost(tmp_path):
    (tmp_path / "recipe.toml").write_text(small().to_toml())
    folder = tmp_path / "compared"
    command = ["compare", str(tmp_path / "recipe.toml"), "--out", str(folder)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    samples = {run.summary.arm: run.summary.samples_trained for run in read_runs([folder])}
    assert list(samples) == ["full", "adaptive", "shorter"]
    assert samples["shorter"] == pytest.approx(samples["adaptive"], abs=256)
    page = (folder / "report.html").read_text()
    assert "adaptive minus arm, points" in page
    assert "Samples per epoch, and the learning rate" in page
    assert "DroppingCount in each window" not in page
