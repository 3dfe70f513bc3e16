"""The benchmarks run. The speeds that they measure are not tested; their quality has limits."""

import importlib
import json
import os
import pkgutil
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fineprune.labels.evidence import Evidence
from fineprune.runs.history import read_evidence
from fineprune.training.recipe import make_recipe
from fineprune.training.trainer import train

pytestmark = pytest.mark.long

SPEED = ("images", "loop", "record", "select", "streams", "watch")


@pytest.fixture(scope="session")
def run(python):
    """Runs a benchmark, whose warnings are errors."""

    def run(script, *arguments, environment=None):
        return subprocess.run(
            [*python, "-W", "error", Path("benchmarks") / script, *map(str, arguments)],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.parametrize("name", SPEED)
def test_what_asv_times_runs_with_its_first_and_last_parameters(name, monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    speed = importlib.import_module("speed")
    assert {module.name for module in pkgutil.iter_modules(speed.__path__)} == set(SPEED)
    module = importlib.import_module(f"speed.{name}")
    suites = [one for one in vars(module).values() if hasattr(one, "repeat")]
    assert suites
    for suite in suites:
        params = getattr(suite, "params", ())
        axes = params if params and isinstance(params[0], tuple) else [params] if params else []
        for values in (tuple(axis[0] for axis in axes), tuple(axis[-1] for axis in axes)):
            for method in (one for one in vars(suite) if one.startswith(("time_", "track_"))):
                instance = suite()
                instance.setup(*values)
                measured = getattr(instance, method)(*values)
                assert measured is None or measured > 0
                if hasattr(instance, "teardown"):
                    instance.teardown(*values)


def test_the_quality_is_above_its_limits(run):
    done = run("quality.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n| ") == 16


def test_two_commands_take_turns(run, tmp_path):
    log, result = tmp_path / "log", tmp_path / "rounds.json"
    command = f"echo $ROUND >>{log}; {sys.executable} -c 'sum(range({{}}))'"
    done = run(
        *("paired.py", "--rounds", 3, "--json", result),
        *(command.format(100), command.format(20_000_000)),
    )
    assert done.returncode == 0, done.stderr
    assert log.read_text().split() == ["0-b", "0-a", "1-a", "1-b", "2-b", "2-a", "3-a", "3-b"]
    rounds = json.loads(result.read_text())["rounds"]
    assert len(rounds) == 3
    assert all(pair["b"]["processor"] > pair["a"]["processor"] for pair in rounds)
    assert "n = 3" in done.stdout
    failed = run("paired.py", "true", "exit 3")
    assert failed.stderr == "'exit 3' in . ended with status 3\n"


def test_updates_measures_their_cost_and_loading_that_overlaps(run):
    pytest.importorskip("ray")
    done = run("updates.py", "--rounds", 1, "--updates", 5, "--elements", 1000, "--json")
    assert done.returncode == 0, done.stderr
    (line,) = json.loads(done.stdout)["rounds"]["this checkout"]
    assert all(value > 0 for value in line.values())


def test_watched_runs_are_ranked(tmp_path, monkeypatch):
    """The watched training is the one of ``fineprune train``, bit for bit."""
    changes = [
        "data.train_size=256",
        "data.label_noise=0.3",
        "training.epochs=6",
        "run.device=cpu",
        "run.threads=1",
        "run.precision=float32",
    ]
    recipe = make_recipe({"data": {"name": "digits"}, "network": {"name": "lenet"}}, changes)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    watched = runpy.run_path("benchmarks/watched_runs.py")["main"]
    file = tmp_path / "runs" / "random-0.npz"
    before = Evidence.record
    try:
        monkeypatch.setattr(sys, "argv", ["", str(file), str(tmp_path / "recipe.toml")])
        watched()
    finally:
        Evidence.record = before  # type: ignore[method-assign]
    train(recipe.replaced("pruning", policy="full"), tmp_path / "run")
    expected, _ = read_evidence(tmp_path / "run", 256)
    with np.load(file) as arrays:
        assert np.array_equal(arrays["labels"], expected.ranking().labels)
        assert len(arrays["order"]) == 6 * 256
        true = arrays["labels"].copy()
    true[:20] = (true[:20] + 1) % 10
    np.save(tmp_path / "true.npy", true)
    arguments = ["", str(tmp_path / "runs"), str(tmp_path / "true.npy"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.syspath_prepend("benchmarks")
    runpy.run_path("benchmarks/label_ranking.py")["main"]()
    area = json.loads((tmp_path / "labels-area.json").read_text())
    assert {"watch", "loss", "AUM", "AlignPrune"} <= area["columns"].keys()
    assert [row[:2] for row in area["rows"]] == [["random", "5"]]
    suspects = json.loads((tmp_path / "labels-suspects.json").read_text())
    assert suspects["rows"][0][2] == [20]
