"""The learning rates of arms, which are chosen on training samples that are held out."""

import json
import os
import shutil
import signal

import pytest
from made_images import write_folder
from made_runs import made_summary
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.errors import InputError, RunError, Stopped
from fineprune.experiments.compare import compare, plan_runs
from fineprune.experiments.controls import make_arms
from fineprune.experiments.tuning import (
    FACTORS,
    choose_rates,
    held_out_recipe,
    plan_trials,
    rate_lines,
    read_rates,
    untuned,
    with_chosen_rates,
)
from fineprune.runs.files import write_json
from fineprune.runs.run import read_run, read_runs
from fineprune.training.data import load_data
from fineprune.training.recipe import make_recipe, read_recipe
from fineprune.training.trainer import train

pytestmark = pytest.mark.usefixtures("fast_spawn")

RECIPE = {
    "data": {"name": "digits", "train_size": 160},
    "training": {
        "epochs": 2,
        "batch_size": 16,
        "lr": 0.02,
        "evaluate_every": 2,
        "evaluate_last": 1,
    },
    "pruning": {"policy": "fine-pruning", "window": 2, "start": 1, "prune": 32},
    "run": {"device": "cpu", "threads": 1, "precision": "float32", "compile": "off"},
}
ARMS = ("full", "fine-pruning")
TRIALS = [f"{arm}-0-{factor:g}" for arm in ARMS for factor in FACTORS]
HELD_OUT = 16


def small(*changes):
    return make_recipe(RECIPE, changes)


def tune(folder, *changes, arms=ARMS, **options):
    compare(small(*changes), folder, title="t", arms=arms, **{"tune": 1, **options})


def planned(recipe, folder, seeds, arms):
    data = load_data(recipe)
    return plan_runs(recipe, folder, seeds, make_arms(recipe, arms, data.num_samples), data)


def planned_trials(folder, arms=ARMS, seeds=1):
    return plan_trials(planned(held_out_recipe(small(), 160), folder / "rates", seeds, arms))


def results(folder):
    """Return the loss and the accuracies of each epoch of each run in a folder of runs."""
    return {
        path.parent.name: [
            {key: value for key, value in line.items() if "seconds" not in key}
            for line in read_run(path.parent).metrics
        ]
        for path in folder.glob("*/summary.json")
    }


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("rates/*/*")}


@pytest.fixture(scope="module")
def said():
    """The progress of ``tuned``."""
    return []


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, said):
    folder = tmp_path_factory.mktemp("compared") / "tuned"
    tune(folder, on_progress=lambda *progress: said.append(progress))
    return folder


@pytest.fixture
def copied(tuned, tmp_path):
    shutil.copytree(tuned, tmp_path / "copy")
    return tmp_path / "copy"


def test_each_arm_is_trained_with_the_rate_that_was_best_on_held_out_samples(tuned):
    assert sorted(path.name for path in (tuned / "rates").iterdir()) == sorted(TRIALS)
    rates = read_rates(tuned)
    assert (rates.held_out, tuple(rates.arms)) == (HELD_OUT, ARMS)
    for arm in ARMS:
        accuracies = {}
        for factor in FACTORS:
            trial = tuned / "rates" / f"{arm}-0-{factor:g}"
            accuracies[factor] = read_run(trial).summary.accuracy_last
            assert read_recipe(trial / "recipe.toml").training.lr == 0.02 * factor
        best = [factor for factor in FACTORS if accuracies[factor] == max(accuracies.values())]
        assert rates.arms[arm].factor == best[0]
        assert list(rates.arms[arm].accuracies.values()) == [(a,) for a in accuracies.values()]
        recipe = read_recipe(tuned / f"{arm}-0/recipe.toml")
        assert recipe.training.lr == 0.02 * best[0]
        assert recipe.run.rate_factor == best[0]


def test_trials_do_not_evaluate_the_test_set(tuned):
    for name in TRIALS:
        run = read_run(tuned / "rates" / name)
        assert run.summary.evaluated_on == "validation"
        assert run.summary.train_samples == 160 - HELD_OUT
        assert all(line["test_accuracy"] is line["test_loss"] is None for line in run.metrics)
    for run in read_runs([tuned]):
        assert (run.summary.evaluated_on, run.summary.train_samples) == ("test", 160)


def test_the_progress_says_what_the_runs_are(tuned, said):
    lines = [line for line, _, _ in said if line]
    assert len(lines) == len(TRIALS) + 2 * len(ARMS)
    accuracy = read_run(tuned / "rates/full-0-1.5").summary.accuracy_last
    assert (
        f"tuning: finished full, seed 0, 1.5 times the learning rate, accuracy {accuracy:.2%} on "
        f"held-out samples"
    ) in lines
    assert sum(" times: " in line and "points" in line for line in lines) == len(ARMS)
    assert said[-1][1:] == (16, 16)


@pytest.mark.long
def test_a_stopped_tuning_is_continued_with_the_same_result(tuned, tmp_path):
    def stop(line, done, total):
        if line:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="with 3 runs to go"):
        tune(tmp_path / "c", arms=["full"], on_progress=stop)
    assert list(results(tmp_path / "c/rates")) == ["full-0-1"]
    assert not (tmp_path / "c/rates.json").exists()
    before = times(tmp_path / "c")
    tune(tmp_path / "c", arms=["full"])
    assert before.items() <= times(tmp_path / "c").items()
    for part in ("", "rates"):
        expected = results(tuned / part)
        continued = results(tmp_path / "c" / part)
        assert continued == {name: expected[name] for name in expected if "full" in name}
    assert read_rates(tmp_path / "c").arms == {"full": read_rates(tuned).arms["full"]}


def test_a_chosen_rate_is_kept_when_seeds_are_added(copied):
    """The choice is replaced by a worse one, which would be corrected if it were made again."""
    content = json.loads((copied / "rates.json").read_text())
    kept = dict.fromkeys(ARMS, 1.25)
    for arm in ARMS:
        content["arms"][arm]["factor"] = kept[arm]
        shutil.rmtree(copied / f"{arm}-0")
    (copied / "rates.json").write_text(json.dumps(content))
    before = times(copied)
    for run in with_chosen_rates(planned(small(), copied, 2, ARMS), copied):
        train(run.recipe, run.folder)  # In this process, which takes less time than a new one.
    tune(copied, seeds=2)
    assert times(copied) == before
    assert json.loads((copied / "rates.json").read_text()) == content
    runs = read_runs([copied])
    assert len(runs) == 4
    assert {run.recipe["training"]["lr"] for run in runs} == {0.02 * 1.25}


def test_an_added_arm_is_tuned_alone(copied):
    before, known = times(copied), read_rates(copied)
    for trial in planned_trials(copied, ["random"]):
        train(trial.recipe, trial.folder)
    tune(copied, arms=["random"])
    rates = read_rates(copied)
    assert list(rates.arms) == [*ARMS, "random"]
    assert all(rates.arms[arm] == known.arms[arm] for arm in ARMS)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(read_runs([copied])) == 3
    arms = make_arms(small(), [*ARMS, "watched", "second", "random", "matched"], 160)
    assert [arm.name for arm in untuned(copied, arms)] == ["fine-pruning", "matched"]


def test_a_trial_of_the_matched_control_repeats_the_method_at_the_same_rate(tmp_path):
    arms = ("matched", "full", "fine-pruning")
    trials = [trial for trial in planned_trials(tmp_path, arms) if trial.name == "matched"]
    assert len(trials) == len(FACTORS)
    for trial, factor in zip(trials, FACTORS, strict=True):
        assert trial.needs is not None
        assert trial.needs.folder == tmp_path / f"rates/fine-pruning-0-{factor:g}"
        assert trial.needs.recipe.training.lr == trial.recipe.training.lr == 0.02 * factor


def finished_trials(folder, accuracies, seeds=1):
    """Return trials of full training with these accuracies; None if the training diverged."""
    trials = planned_trials(folder, ["full"], seeds)
    for trial, accuracy in zip(trials, accuracies, strict=True):
        if accuracy is not None:
            trial.folder.mkdir(parents=True)
            write_json(trial.folder / "summary.json", made_summary(accuracy_last=accuracy))
    return trials


@pytest.mark.parametrize(
    ("accuracies", "chosen"),
    [
        ((0.5, 0.75, 0.6), 1.5),
        ((0.5, 0.75, 0.75), 1.5),
        ((0.75, 0.5, 0.75), 1.0),
        ((0.5, None, 0.6), 2.0),
        ((None, 0.1, None), 1.5),
    ],
)
def test_the_smaller_of_the_best_rates_is_chosen(accuracies, chosen, tmp_path):
    choose_rates(tmp_path, finished_trials(tmp_path, accuracies))
    rate = read_rates(tmp_path).arms["full"]
    assert rate.factor == chosen
    assert rate.accuracies == {
        factor: (accuracy,) for factor, accuracy in zip(("1", "1.5", "2"), accuracies, strict=True)
    }


def test_several_seeds_decide_and_say_what_may_be_chance(tmp_path):
    """The order of the trials is that of the factors, and of the seeds for each of them."""
    accuracies = (0.70, 0.72, 0.74, 0.73, 0.72, 0.74, 0.60, 0.61, 0.64)
    choose_rates(tmp_path, finished_trials(tmp_path, accuracies, seeds=3))
    rates = read_rates(tmp_path)
    assert rates.arms["full"].factor == 1.5
    (line,) = rate_lines(rates)
    assert line.startswith("full: 1.5 times the learning rate, 73.00% on 16 held-out samples (see")
    assert "; 1 times: -1.00\N{NO-BREAK SPACE}±4.30 points" in line
    assert line.endswith("; 2 times: -11.33\N{NO-BREAK SPACE}±3.79 points")


def test_a_second_training_has_the_rate_of_the_first(tmp_path):
    choose_rates(tmp_path, finished_trials(tmp_path, (0.5, 0.75, 0.6)))
    runs = with_chosen_rates(planned(small(), tmp_path, 1, ["watched", "second"]), tmp_path)
    assert {run.recipe.training.lr for run in runs} == {0.02 * 1.5}


def test_an_arm_that_diverges_at_every_rate_ends_the_comparison(tmp_path):
    """The control of a method that diverged is not trained."""
    lines: list[str] = []
    with pytest.raises(RunError, match=r"'full' diverged with 1, 1.5, 2 times the learning rate"):
        tune(
            tmp_path / "c",
            "training.lr=1e30",
            arms=(*ARMS, "matched"),
            on_progress=lambda line, done, total: lines.append(line),
        )
    assert "tuning: matched, seed 0, 2 times the learning rate diverged" in lines
    assert sum(bool(line) for line in lines) == 9
    assert not (tmp_path / "c/rates.json").exists()


def test_a_comparison_goes_on_with_tuning_or_without_it_as_it_began(copied):
    before = {path: path.read_bytes() for path in copied.glob("*.*")}
    with pytest.raises(InputError, match=r"expected --tune 1, as when .* got none: give the same"):
        compare(small(), copied, title="t", arms=ARMS)
    content = json.loads((copied / "compare.json").read_text())
    assert {path: path.read_bytes() for path in copied.glob("*.*")} == before
    (copied / "compare.json").write_text(json.dumps({**content, "tuned": 0}))
    with pytest.raises(InputError, match=r"expected no --tune, as when .* got --tune 1: give the"):
        tune(copied)


def test_a_damaged_choice_is_refused(copied):
    (copied / "rates.json").write_text('{"held_out": 12, "arms": {"full": 1.5}}')
    with pytest.raises(InputError, match=r"expected .*rates.json as fineprune wrote it"):
        tune(copied)


def test_data_that_cannot_be_held_out_are_refused_before_the_training(tmp_path):
    data = {"name": "test_own_data:noisy", "validation": 0}
    recipe = make_recipe({**RECIPE, "data": data})
    with pytest.raises(InputError, match="random transforms only"):
        compare(recipe, tmp_path / "c", title="t", arms=ARMS, tune=1)
    assert not (tmp_path / "c").exists()
    with pytest.raises(InputError, match="at least 2 training samples with --tune, got 1"):
        held_out_recipe(small(), 1)


def test_a_tenth_is_held_out_of_the_samples_that_a_recipe_trains(tmp_path):
    for part, number in (("train", 48), ("test", 8)):
        write_folder(tmp_path / part, number)
    images = {"name": "images", "image_size": 32, "train_size": 48}
    images |= {part: str(tmp_path / part) for part in ("train", "test")}
    for data, number in ((images, 48), (RECIPE["data"], 160)):
        held_out = held_out_recipe(make_recipe({**RECIPE, "data": data}), number)
        loaded = load_data(held_out)
        assert loaded.evaluated_on == "validation"
        assert loaded.num_samples == number - number // 10
    cifar = held_out_recipe(small("data.name=cifar10", "data.train_size=50000"), 50_000)
    assert (cifar.data.validation, cifar.data.limited(45_000)) == (5_000, 45_000)
    own = small("data.validation=30")
    assert held_out_recipe(own, 130) is own


def test_reports_say_which_rates_were_chosen_and_how(tuned, tmp_path):
    out = tmp_path / "report.html"
    factors = {arm: rate.factor for arm, rate in read_rates(tuned).arms.items()}
    chosen = ", ".join(f"{factor:g} ({arm})" for arm, factor in factors.items())
    sentence = f"that of the recipe times {chosen}, chosen on held-out samples"
    command = ["report", str(tuned), "--out", str(out)]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    said = " ".join(printed.stdout.split())
    assert f"lenet on digits: the learning rate is {sentence}" in said
    page = out.read_text(encoding="utf-8")
    assert f"<dt>Learning rates</dt><dd>{sentence}</dd>" in page
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["rows"]
    assert {row["arm"]: row["rate_factor"] for row in rows} == factors
