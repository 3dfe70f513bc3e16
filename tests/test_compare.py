"""Comparisons, whose processes end with them and which continue after an interruption."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from processes import in_session, wait_until_ended
from resuming import train_through
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.errors import InputError, TrainingDiverged
from fineprune.experiments.compare import compare, plan_runs
from fineprune.experiments.controls import make_arms
from fineprune.report.comparison import write_report
from fineprune.report.facts import cautions
from fineprune.runs.comparison import read_comparison
from fineprune.runs.files import read_metrics, whole_lines
from fineprune.runs.run import diverged_runs, read_run, read_runs
from fineprune.training.data import load_data
from fineprune.training.hardware import resolved
from fineprune.training.recipe import make_recipe, read_recipe
from fineprune.training.trainer import train

pytestmark = pytest.mark.usefixtures("fast_spawn")

RECIPE = {
    "data": {"name": "digits", "train_size": 256},
    "training": {
        "epochs": 24,
        "batch_size": 64,
        "lr": 0.02,
        "evaluate_every": 12,
        "evaluate_last": 1,
    },
    "pruning": {"policy": "fine-pruning", "window": 2, "start": 1, "prune": 64},
    "run": {"device": "cpu", "checkpoint_every": 10, "checkpoint_steps": 3},
}
ARMS = ("full", "fine-pruning")
# The control is named before the method that must be trained first.
MATCHED_ARMS = ("matched", "full", "fine-pruning")
ALL_TRAINED = ("full", "fine-pruning", "random", "matched")

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def small(*changes):
    return make_recipe(RECIPE, changes)


def planned(recipe, folder, seeds, names):
    data = load_data(resolved(recipe))
    return plan_runs(recipe, folder, seeds, make_arms(recipe, names, data.num_samples), data)


def launched(folder, recipe, arms):
    """Start a comparison in a new session, and return its process."""
    file = folder.parent / "recipe.toml"
    file.write_text(recipe.to_toml())
    command = [sys.executable, "-m", "fineprune", "compare", str(file), "--out", str(folder)]
    return subprocess.Popen(
        [*command, "--arms", ",".join(arms), "--jobs", "2"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def started(folder, recipe, arms=ARMS):
    """Start a comparison, and return its process when the first two arms are training."""
    process = launched(folder, recipe, arms)
    deadline = time.monotonic() + 120
    while not all(whole_lines(folder / f"{arm}-0/metrics.jsonl") for arm in ARMS):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def results(folder, arms=None):
    """Return the metrics of arms without times, which must not depend on interruptions."""
    times = ("seconds", "bookkeeping_seconds", "evaluate_seconds")
    return {
        run.summary.arm: [
            {key: value for key, value in line.items() if key not in times} for line in run.metrics
        ]
        for run in read_runs([folder])
        if arms is None or run.summary.arm in arms
    }


def listed(folder):
    """Return the paths of the runs that a comparison lists."""
    return [run["path"] for run in json.loads((folder / "compare.json").read_text())["runs"]]


@pytest.fixture(scope="module")
def said():
    """The progress of ``whole``."""
    return []


@pytest.fixture(scope="module")
def whole(tmp_path_factory, said):
    folder = tmp_path_factory.mktemp("compared") / "whole"
    told = lambda *progress: said.append(progress)  # noqa: E731
    recipe = small("run.threads=1")
    compare(recipe, folder, title="whole", arms=ALL_TRAINED, jobs=2, on_progress=told)
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def unmatched(copied):
    """A copy of the comparison in which the control is the only arm that is not trained."""
    shutil.rmtree(copied / "matched-0")
    return copied


def compare_matched(folder, *changes):
    compare(small("run.threads=1", *changes), folder, title="matched", arms=MATCHED_ARMS)


@pytest.mark.long
@on_linux
@pytest.mark.parametrize(
    ("number", "arms"), [(signal.SIGKILL, MATCHED_ARMS), (signal.SIGTERM, ARMS)]
)
def test_a_stopped_comparison_ends_its_processes_and_continues_with_the_same_result(
    number, arms, tmp_path, whole
):
    """The arm ``matched`` has not started when the comparison is stopped, and waits again."""
    process = started(tmp_path / "c", small("run.threads=1"), arms)
    before = {arm: len(read_metrics(tmp_path / f"c/{arm}-0/metrics.jsonl")) for arm in ARMS}
    os.kill(process.pid, number)
    assert process.wait(30) == (-9 if number == signal.SIGKILL else 128 + 15)
    assert not wait_until_ended(process.pid)
    if number == signal.SIGTERM:
        lines = process.stderr.read().splitlines()
        stopped = "fineprune: stopped by SIGTERM with 2 runs to go; run the same command again"
        assert lines[-1].startswith(stopped)
    process.stderr.close()
    assert all(before.values())
    compare(small("run.threads=1"), tmp_path / "c", title="c", arms=arms, jobs=1)
    assert results(tmp_path / "c") == results(whole, arms)


@pytest.mark.long
@on_linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_is_told_as_such(number, tmp_path, monkeypatch):
    """SIGTERM also kills runs that are just starting and do not handle signals yet."""
    # What the Python with torch starts is in another session.
    monkeypatch.setattr(sys, "executable", f"{sys.prefix}/bin/python")
    process = launched(tmp_path / "c", small("run.threads=1"), ARMS)
    while len(in_session(process.pid)) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number, told
    assert f"stopped by {number.name} with 2 runs to go" in told
    assert "Traceback" not in told


@pytest.mark.long
@on_linux
def test_a_killed_run_ends_its_comparison_with_an_error(tmp_path, whole):
    process = started(tmp_path / "c", small("run.threads=1"))
    victim = int((tmp_path / "c/full-0/.lock").read_text().split()[0])
    os.kill(victim, signal.SIGKILL)
    assert process.wait(60) == 1
    assert "full-0 was killed by SIGKILL" in process.stderr.read()
    process.stderr.close()
    assert not wait_until_ended(process.pid)
    compare(small("run.threads=1"), tmp_path / "c", title="c", arms=ARMS, jobs=1)
    assert results(tmp_path / "c") == results(whole, ARMS)


def test_a_finished_comparison_is_not_changed_by_other_threads_or_data_settings(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.glob("*-0/*")}
    for changed in (small("run.threads=2"), small("data.download=true")):
        compare(changed, whole, title="whole", arms=ARMS, jobs=1)
    assert {path: path.stat().st_mtime_ns for path in whole.glob("*-0/*")} == before
    # It has written the recipe that repeats it.
    assert not read_recipe(whole / "recipe.toml").differences(small())
    assert listed(whole) == [f"{arm}-0" for arm in ALL_TRAINED]


@pytest.mark.parametrize("arms", [ARMS, ["shorter"]])
def test_another_recipe_is_refused_with_the_difference(arms, whole):
    before = (whole / "compare.json").read_text(), (whole / "recipe.toml").read_text()
    with pytest.raises(InputError, match=r"training.lr is 0.02 and 0.5"):
        compare(small("training.lr=0.5"), whole, title="whole", arms=arms)
    with pytest.raises(InputError, match=r"data\.validation is 0 and 64"):
        compare(small("data.validation=64"), whole, title="whole", arms=arms)
    assert ((whole / "compare.json").read_text(), (whole / "recipe.toml").read_text()) == before


def test_a_recipe_of_another_version_is_named_by_its_file(copied):
    file = copied / "recipe.toml"
    file.write_text(file.read_text().replace("[run]", "[run]\nwatch = true"))
    with pytest.raises(InputError, match=r"this version of fineprune wrote in .*recipe\.toml"):
        compare(small(), copied, title="whole", arms=ARMS)


def test_an_arm_that_would_skip_nothing_is_refused_before_the_others_are_trained(tmp_path):
    recipe = make_recipe(
        {**RECIPE, "pruning": {"policy": "adaptive", "save": 0.35}}, ["training.batch_size=128"]
    )
    with pytest.raises(InputError, match=r"arm 'rs2': .* expected a larger prune or save, or a"):
        compare(recipe, tmp_path / "c", title="c", arms=["full", "adaptive", "rs2"])
    assert not (tmp_path / "c").exists()


def test_the_progress_says_which_runs_finished_with_which_accuracy(whole, said):
    lines = {line for line, _, _ in said if line}
    results = {line.partition(", saved")[0] for line in lines}
    assert results == {
        f"finished {arm}, seed 0, accuracy {read_run(whole / f'{arm}-0').summary.accuracy_last:.2%}"
        for arm in ALL_TRAINED
    }
    # Full training is finished before the last of four runs, two of which train at a time.
    assert any(", saved " in line and " of the time (predicted " in line for line in lines)
    assert said[-1][1:] == (96, 96)


def test_arms_and_seeds_are_added_to_a_comparison(copied):
    before = {path: path.stat().st_mtime_ns for path in copied.glob("*-0/*")}
    recipe = small("run.threads=1")
    for run in planned(recipe, copied, 2, ["shorter"]):
        train(run.recipe, run.folder)  # In this process, which takes less time than a new one.
    compare(recipe, copied, title="more", arms=["shorter"], seeds=2)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    kept = [f"{arm}-0" for arm in ALL_TRAINED]
    assert listed(copied) == [*kept, "shorter-0", "shorter-1"]
    arms = ["full", "fine-pruning", "random", "matched", "shorter"]
    assert [arm.name for arm in read_comparison(copied).arms] == arms
    assert {run.title for run in read_runs([copied])} == {"more"}
    # Without its summary, the run is not finished, and a report could not read it.
    (copied / "random-0/summary.json").unlink()
    compare(recipe, copied, title="fewer", arms=["full"])
    kept.remove("random-0")
    assert listed(copied) == [*kept, "shorter-0", "shorter-1"]
    assert len(read_runs([copied])) == 5
    (copied / "compare.json").write_text("{")
    compare(recipe, copied, title="fewer", arms=ARMS)
    assert listed(copied) == [f"{arm}-0" for arm in ARMS]


def test_an_arm_that_train_resumes_keeps_its_name(tmp_path):
    run = planned(small("training.epochs=2", "run.threads=1"), tmp_path, 1, ["shorter"])[0]
    train_through(0, run.recipe, run.folder)
    without_arm = read_recipe(run.folder / "recipe.toml").replaced("run", arm=None)
    train(without_arm, run.folder, resume=True)
    assert read_run(run.folder).summary.arm == "shorter"


def test_the_matched_control_of_a_schedule_is_random_skipping(whole, tmp_path):
    metrics = results(whole)
    assert list(metrics) == list(ALL_TRAINED)
    assert metrics["matched"] == metrics["random"] != metrics["fine-pruning"]
    train(read_recipe(whole / "matched-0/recipe.toml"), tmp_path / "alone")
    assert results(tmp_path / "alone")["matched"] == metrics["matched"]


def test_a_matched_control_continues_as_the_only_unfinished_arm(whole, unmatched):
    recipe = read_recipe(whole / "matched-0/recipe.toml")
    train_through(11, recipe, unmatched / "matched-0")
    before = {path: path.stat().st_mtime_ns for path in unmatched.glob("fine-pruning-0/*")}
    compare_matched(unmatched)
    assert {path: path.stat().st_mtime_ns for path in unmatched.glob("fine-pruning-0/*")} == before
    assert results(unmatched)["matched"] == results(whole)["matched"]


def test_a_matched_control_of_other_numbers_or_another_recipe_is_refused(unmatched, whole):
    recipe = read_recipe(whole / "matched-0/recipe.toml")
    numbers = [number - 1 for number in recipe.pruning.arguments["numbers"]]
    (unmatched / "matched-0").mkdir()
    other = recipe.replaced("pruning", numbers=numbers).to_toml()
    (unmatched / "matched-0/recipe.toml").write_text(other)
    with pytest.raises(InputError, match=r"or remove this folder to begin again"):
        compare_matched(unmatched)
    shutil.copytree(whole / "matched-0", unmatched / "new/matched-0")
    with pytest.raises(InputError, match=r"training.lr is 0.02 and 0.5"):
        compare_matched(unmatched / "new", "training.lr=0.5")
    assert not (unmatched / "new/fine-pruning-0").exists()  # The method is not trained before.


FRAGILE = """
import torch
from torch import nn

class Fragile(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.last = nn.Linear(channels * 1024, classes)
        self.broken = torch.initial_seed() == 1

    def forward(self, x):
        return self.last(x.flatten(1)) * (float("nan") if self.broken else 1.0)
"""


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path, monkeypatch):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "c"
    recipe = small("network.name=fragile:Fragile", "training.epochs=4", "pruning.prune=128")
    lines = []

    def start(seeds):
        arms = ["matched", "full", "fine-pruning"]
        told = lambda line, *_: lines.append(line)  # noqa: E731
        compare(recipe, folder, title="t", seeds=seeds, arms=arms, on_progress=told)

    for _ in range(2):  # A run that has diverged is not trained again.
        with pytest.raises(TrainingDiverged) as caught:
            start(3)
        message = str(caught.value)
        assert message.startswith(f"full, seed 1 ({folder / 'full-1'}): the mean loss of epoch 1")
        assert "(1 more diverged, too)" in message
    assert lines.count("full, seed 1 diverged") == 1
    finished = {path.parent.name for path in folder.glob("*/summary.json")}
    assert finished == {f"{arm}-{n}" for arm in ("full", "fine-pruning", "matched") for n in (0, 2)}
    read = read_runs([folder])
    assert {run.path.name for run in read} == finished
    write_report(read, tmp_path / "report.html", 0.004)
    page = (tmp_path / "report.html").read_text()
    assert "A run is missing: full, seed 1 (" in page
    assert sum("A run is missing" in sentence for sentence in cautions(read)) == 2
    start(1)  # The runs that were not named stay as they are.
    assert list(diverged_runs(folder)) == ["full-1", "fine-pruning-1"]


@pytest.mark.parametrize("command", ["compare quick", "scale quick one"])
def test_experiments_refuse_to_be_started_by_torchrun(command, tmp_path, monkeypatch):
    """Their runs would take the launcher's ranks for their own."""
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, [*command.split(), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert f"fineprune {command.split()[0]} without torchrun, got 2 processes" in done.stderr
    assert not (tmp_path / "out").exists()


def test_full_training_pays_for_no_records(tmp_path):
    """What a method saves is relative to a loop that records nothing."""
    for asked in (True, False):
        runs = planned(small(f"run.history={str(asked).lower()}"), tmp_path, 1, ("full", "watched"))
        assert [run.recipe.run.history for run in runs] == [False, True]
