"""The learning rates of arms, which are chosen on training samples that are held out."""

import json
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
from commands import printed
from made_images import write_folder
from made_runs import made_summary

from fineprune.errors import InputError, RunError, Stopped, TrainingDiverged
from fineprune.experiments import tuning
from fineprune.experiments.compare import compare, plan_runs
from fineprune.experiments.controls import make_arms
from fineprune.experiments.tuning import FACTORS, held_out_recipe, tuned_rates
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
TRIALS = [f"{factor:g}/{arm}-0" for factor in FACTORS for arm in ARMS]
HELD_OUT = 16


def small(*changes):
    return make_recipe(RECIPE, changes)


def tune(folder, *changes, arms=ARMS, seeds=1, **options):
    rates = tuned_rates(small(*changes), folder, seeds=1, arms=arms, **options)
    compare(small(*changes), folder, title="t", arms=arms, seeds=seeds, rates=rates, **options)
    return rates


def results(folder):
    """Return the loss and the accuracies of each epoch of each run in a folder of runs."""
    return {
        str(path.parent.relative_to(folder)): [
            {key: value for key, value in line.items() if "seconds" not in key}
            for line in read_run(path.parent).metrics
        ]
        for path in folder.rglob("summary.json")
    }


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("rates/*/*/*.*")}


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
    assert {path.name for path in (tuned / "rates").iterdir()} == {"1", "1.5", "2"}
    for arm in ARMS:
        accuracies = {}
        for factor in FACTORS:
            trial = tuned / f"rates/{factor:g}/{arm}-0"
            accuracies[factor] = read_run(trial).summary.accuracy_last
            assert read_recipe(trial / "recipe.toml").training.lr == 0.02 * factor
        best = [factor for factor in FACTORS if accuracies[factor] == max(accuracies.values())]
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
    start = "tuning, 1.5 times the learning rate: finished full, seed 0"
    trial = f"accuracy {read_run(tuned / 'rates/1.5/full-0').summary.accuracy_last:.2%}"
    assert any(line.startswith(start) and trial in line for line in lines)
    assert sum(" times: " in line and "points" in line for line in lines) == len(ARMS)


@pytest.mark.long
def test_a_stopped_tuning_is_continued_with_the_same_result(tuned, tmp_path):
    def stop(line, done, total):
        if line:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="with 1 runs to go"):
        tune(tmp_path / "c", on_progress=stop)
    assert list(results(tmp_path / "c")) == ["rates/1/full-0"]
    before = times(tmp_path / "c/rates/1/full-0")
    tune(tmp_path / "c")
    assert before.items() <= times(tmp_path / "c/rates/1/full-0").items()
    assert results(tmp_path / "c") == results(tuned)


def test_trials_are_kept_when_seeds_and_arms_are_added(copied):
    before, rates = times(copied), dict[str, float]()
    for seeds, arms in ((2, ARMS), (1, ("random", "watched"))):
        data = load_data(small())
        made = make_arms(small(), arms, data.num_samples)
        for factor in FACTORS if "random" in arms else ():
            at_rate = held_out_recipe(small(f"training.lr={0.02 * factor}"), 160)
            own = make_arms(at_rate, ("random",), 144)
            folder = copied / f"rates/{factor:g}"
            for trial in plan_runs(at_rate, folder, 1, own, load_data(at_rate)):
                train(trial.recipe, trial.folder)  # In this process: less time than a new one.
        rates |= tuned_rates(small(), copied, seeds=1, arms=arms)
        for run in plan_runs(small(), copied, seeds, made, data, rates):
            train(run.recipe, run.folder, resume=True)
        compare(small(), copied, title="t", arms=arms, seeds=seeds, rates=rates)
    assert before.items() <= times(copied).items()
    assert rates["watched"] == rates["full"]  # It trains like it, and has no trials.
    assert len(read_runs([copied])) == 6
    trials = {path.name for path in copied.glob("rates/1/*-0")}
    assert trials == {"full-0", "fine-pruning-0", "random-0"}


def test_the_runs_of_a_matched_control_have_its_own_rate_and_its_methods(tmp_path):
    arms = make_arms(small(), ("matched", "full", "fine-pruning"), 160)
    rates = {"full": 1.0, "fine-pruning": 1.5, "matched": 2.0}
    runs = plan_runs(small(), tmp_path, 1, arms, load_data(small()), rates)
    (matched,) = (run for run in runs if run.name == "matched")
    assert matched.recipe.training.lr == 0.02 * 2
    assert matched.needs is not None
    assert matched.needs.recipe.training.lr == 0.02 * 1.5


@pytest.fixture
def found(monkeypatch):
    """The accuracies of full training with each rate and seed; fewer ones if trials diverge."""
    accuracies: dict[float, list[float]] = {}

    def compared(recipe, folder, *, seeds, **options):
        if len(accuracies[float(folder.name)]) < seeds:
            raise TrainingDiverged("a run diverged")

    def read(folders):
        found = accuracies[float(folders[0].name)]
        return [SimpleNamespace(summary=made_summary(accuracy_last=one)) for one in found]

    monkeypatch.setattr(tuning, "compare", compared)
    monkeypatch.setattr(tuning, "read_runs", read)
    return accuracies


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
def test_the_smaller_of_the_best_rates_is_chosen(accuracies, chosen, found, tmp_path):
    for factor, accuracy in zip(FACTORS, accuracies, strict=True):
        found[factor] = [] if accuracy is None else [accuracy]
    assert tuned_rates(small(), tmp_path, seeds=1, arms=["full"]) == {"full": chosen}


def test_several_seeds_decide_and_say_what_may_be_chance(found, tmp_path):
    found |= {1.0: [0.70, 0.72, 0.74], 1.5: [0.73, 0.72, 0.74], 2.0: [0.60, 0.61, 0.64]}
    lines: list[str] = []
    arms = ["full", "watched", "second"]
    noted = lambda line, done, total: lines.append(line)  # noqa: E731
    rates = tuned_rates(small(), tmp_path, seeds=3, arms=arms, on_progress=noted)
    assert rates == dict.fromkeys(("full", "watched", "second"), 1.5)
    (line,) = lines
    start = "tuning: full: 1.5 times the learning rate, 73.00% on 16 held-out samples (seeds: 3)"
    assert line.startswith(start)
    assert "; 1 times: -1.00\N{NO-BREAK SPACE}±4.30 points" in line
    assert line.endswith("; 2 times: -11.33\N{NO-BREAK SPACE}±3.79 points")


def test_an_arm_that_diverges_at_every_rate_ends_the_comparison(tmp_path):
    with pytest.raises(RunError, match=r"'full' diverged with 1, 1.5, 2 times the learning rate"):
        tune(tmp_path / "c", "training.lr=1e30", arms=("full",))
    assert not (tmp_path / "c/compare.json").exists()


def test_a_comparison_goes_on_with_tuning_or_without_it_as_it_began(copied):
    before = {path: path.read_bytes() for path in copied.glob("*.*")}
    with pytest.raises(InputError, match=r"expected --tune, as when .* got none: give the same"):
        compare(small(), copied, title="t", arms=ARMS)
    assert {path: path.read_bytes() for path in copied.glob("*.*")} == before
    content = json.loads((copied / "compare.json").read_text())
    (copied / "compare.json").write_text(json.dumps({**content, "tuned": False}))
    with pytest.raises(InputError, match=r"expected no --tune, as when .* got it: give the same"):
        tune(copied)


def test_data_that_cannot_be_held_out_are_refused_before_the_training(tmp_path):
    data = {"name": "test_own_data:noisy", "validation": 0}
    recipe = make_recipe({**RECIPE, "data": data})
    with pytest.raises(InputError, match="random transforms only"):
        tuned_rates(recipe, tmp_path / "c", seeds=1, arms=ARMS)
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
    rows = json.loads(printed("report", tuned, "--out", out, "--json"))["rows"]
    factors = {run.summary.arm: run.rate_factor for run in read_runs([tuned])}
    assert {row["arm"]: row["rate_factor"] for row in rows} == factors
    chosen = ", ".join(f"{factor:g} ({arm})" for arm, factor in factors.items())
    sentence = f"that of the recipe times {chosen}, chosen on held-out samples"
    said = " ".join(printed("report", tuned, "--out", out).split())
    assert f"lenet on digits: the learning rate is {sentence}" in said
    page = out.read_text(encoding="utf-8")
    assert f"<dt>Learning rates</dt><dd>{sentence}</dd>" in page
