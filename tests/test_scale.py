"""Scaling experiments: configurations, measures, figures and the command."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from commands import invoke, printed
from made_runs import made_scaled, three_scaled, with_summary
from test_report import parse_strictly

from fineprune.errors import InputError, RunError
from fineprune.experiments.configurations import configuration, configured
from fineprune.experiments.jobs import run_jobs
from fineprune.experiments.planned_run import PlannedRun
from fineprune.experiments.scale import scale
from fineprune.experiments.scale_table import Scaling, loss_curve, read_scaling, scale_rows
from fineprune.launch.follow_parent import PARENT_VARIABLE, end_with_parent, follow_parent_if_told
from fineprune.report.scaling.figures import draw_loss
from fineprune.report.scaling.page import scale_caveats
from fineprune.report.scaling.tables import scale_tables
from fineprune.training.recipe import make_recipe

# Configurations


@pytest.mark.parametrize(
    ("text", "workers", "servers", "nodes"),
    [
        ("one", 1, 0, 1),
        ("all-reduce 3", 3, 0, 1),
        ("async 4+3", 4, 3, 4),
        ("async 4+3 shared", 4, 3, 4),
        ("async  4+3  dedicated", 4, 3, 7),
        ("sync 4+1 backup=1", 4, 1, 4),
        ("mixed 4+2 dedicated group=2 bound=3", 4, 2, 4),
        ("mixed 16+3 group=4", 16, 3, 4),
        ("all-reduce 8 group=4", 8, 0, 2),
        ("async 4+1 lr=0.05", 4, 1, 4),
        ("one lr=.5", 1, 0, 1),
    ],
)
def test_a_configuration_is_parsed(text, workers, servers, nodes):
    parsed = configuration(text)
    assert (parsed.workers, parsed.servers, parsed.nodes) == (workers, servers, nodes)
    assert configuration(parsed.text) == parsed


@pytest.mark.parametrize("text", ["one", "all-reduce 2", "async 2+1", "sync 3+1 backup=1"])
def test_a_configuration_replaces_the_strategy_of_the_recipe(text):
    """Or else, the single process that all others are compared with would have workers."""
    plain, chosen = make_recipe({}), configuration(text)
    kept = {"gradients": "bfloat16", "silence_seconds": 9.0}
    expected = configured(plain.replaced("distributed", **kept), chosen)
    for others in (
        {"strategy": "sync", "workers": 4, "servers": 2, "backup": 1, "placement": "dedicated"},
        {"strategy": "mixed", "workers": 4, "group": 2, "staleness_bound": 3},
        {"simulate": 3, "simulate_as": "async", "step_seconds": (1.0, 2.0, 1.0)},
    ):
        recipe = plain.replaced("distributed", **kept, **others)
        assert configured(recipe, chosen) == expected


def test_a_configuration_changes_the_recipe():
    recipe = make_recipe({"data": {"name": "digits"}, "training": {"batch_size": 64}})
    changed = configured(
        recipe, configuration("mixed 4+2 dedicated group=2 bound=3"), same_update=True
    )
    made = changed.distributed
    assert (made.strategy, made.workers, made.servers, made.group) == ("mixed", 4, 2, 2)
    assert (made.staleness_bound, made.placement) == (3, "dedicated")
    assert changed.training.batch_size == 32
    sizes = {
        text: configured(recipe, configuration(text), same_update=True).training.batch_size
        for text in ("one", "all-reduce 2", "async 2+1", "sync 2+1", "sync 5+1 backup=1")
    }
    assert list(sizes.values()) == [64, 32, 64, 32, 16]
    assert configured(recipe, configuration("sync 2+1")).training == (recipe.training)
    assert configured(recipe, configuration("one lr=0.05")).training.lr == 0.05


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("async 2+1 near", "expected a configuration such as"),
        ("all-reduce 1", "expected at least two processes"),
        ("sync 2+1 speed=3", "expected one of group, backup, bound, lr, got 'speed'"),
        ("one backup=1", "expected one of lr, got 'backup'"),
        ("all-reduce 4 group=3", "expected group= to divide the 4 processes"),
        ("async 2+1 bound=2.5", "expected a whole number as bound=, got '2.5'"),
        ("one lr=1-2", "expected a number as lr="),
        ("one lr=1 lr=2", "expected each option once"),
        ("async 0+1", "expected distributed.workers to be at least 1, got 0"),
        ("sync 1+0", "expected distributed.servers to be at least 1, got 0"),
        ("async 2+1 group=0", "expected distributed.group to be at least 1, got 0"),
        ("sync 2+1 backup=2", "expected distributed.backup below distributed.workers"),
    ],
)
def test_an_invalid_configuration_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        configuration(text)


# Measures


@pytest.fixture
def made_runs():
    return three_scaled()


def test_measures_are_those_of_the_paper(made_runs):
    one, reduced, served = scale_rows(made_runs)
    assert (one.throughput, one.speedup, one.efficiency) == (25, 1, 1)
    assert (reduced.throughput, reduced.speedup, reduced.efficiency) == (50, 2, 1)
    # The throughput is the median of 50, 40 and 25. Two of the four nodes are servers.
    assert (served.throughput, served.throughput_low, served.throughput_high) == (40, 32.5, 45)
    assert (served.speedup, served.efficiency) == (1.6, 0.4)


def test_the_first_configuration_is_the_baseline(made_runs):
    reduced, one, served = scale_rows([made_runs[1], made_runs[0], made_runs[2]])
    assert (one.speedup, reduced.speedup, served.speedup) == (0.5, 1, 0.8)
    # Per accelerator of the baseline, which has two: half as many, as many, and twice as many.
    assert (one.efficiency, reduced.efficiency, served.efficiency) == (1, 1, 0.4)
    assert served.speedup_to_target == pytest.approx(14 / 17.5)


def test_runs_with_several_seeds_are_one_row(made_runs):
    report = {"staleness": [4, 1], "seconds": {"compute": 1.0}}
    pair = [
        made_scaled(
            "async 2+1", [9, 2, 4], [3, 2, loss], distributed=report, accuracy_last=last, seed=seed
        )
        for seed, loss, last in ((0, 0.5, 0.5), (1, 0.7, 0.6))
    ]
    *_, row = scale_rows([*made_runs, *pair], target_loss=1.0)
    assert (row.seeds, row.throughput) == (2, 37.5)
    assert row.accuracy_last == pytest.approx(0.55)
    assert row.accuracy_deviation == pytest.approx(0.0707, abs=1e-4)
    # The loss falls from 2 to 0.5 and 0.7 between 11 and 15 s.
    between = (1 / 1.5 + 1 / 1.3) / 2
    assert row.epochs_to_target == pytest.approx(2 + between)
    assert row.seconds_to_target == pytest.approx(11 + 4 * between)
    assert row.updates == 30
    assert row.staleness == (24, 6)
    assert row.phases == {"compute": 0.1}
    assert ("55.00 ± 7.07 (n = 2)") in [line[1] for line in table_lines([row])]
    *_, row = scale_rows([*made_runs, *pair], target_loss=0.6)
    assert row.seconds_to_target is None  # One of the two runs never reaches it.
    assert draw_loss(pair, None) is not None


def test_a_slow_worker_is_seen(made_runs):
    workers = [
        {"samples": 80, "staleness": [0, 8], "seconds": {"compute": 0.4, "wait": 0.1}},
        {"samples": 20, "staleness": [0, 0, 0, 2], "seconds": {"compute": 0.5}},
    ]
    report = {"staleness": [0, 8, 0, 2], "seconds": {"compute": 0.9}, "workers": workers}
    (row,) = scale_rows([made_scaled("async 2+1", [4, 4], [2, 1], distributed=report)])
    fast, slow = row.each
    assert (fast.share, slow.share) == (0.8, 0.2)
    assert (fast.staleness_mean, slow.staleness_mean) == (1, 3)
    assert fast.phases == {"compute": 0.05, "wait": 0.0125}
    assert slow.phases == {"compute": 0.25}
    assert ("async 2+1", "1", "20.0", "3.00", "250.00", "0.00") in table_lines([row])
    assert scale_rows(made_runs)[2].each == ()


def test_the_time_to_a_loss_counts_epochs_on_all_data_only(made_runs):
    one, reduced, served = scale_rows(made_runs)
    # The default target is the loss that all runs reach. The loss 0.5 is that of a pruned epoch.
    assert one.target_loss == 0.9
    # Between two epochs, it is interpolated.
    assert one.epochs_to_target == pytest.approx(3.2)
    assert one.seconds_to_target == pytest.approx(17.8)
    assert reduced.epochs_to_target == pytest.approx(3.5)
    assert reduced.seconds_to_target == pytest.approx(14)
    assert (served.epochs_to_target, served.seconds_to_target) == (4, 17.5)
    assert served.samples_to_target == 400
    assert served.speedup_to_target == pytest.approx(17.8 / 17.5)
    expected = [(1, 100, 9, 3), (3, 300, 13.5, 2), (4, 400, 17.5, 0.9)]
    assert loss_curve(made_runs[2].run) == expected
    *_, served = scale_rows(made_runs, target_loss=0.6)
    assert served.seconds_to_target is None
    assert served.speedup_to_target is None


def test_staleness_dropped_gradients_and_phases(made_runs):
    one, _, served = scale_rows(made_runs)
    assert (one.staleness, one.staleness_mean, one.dropped, one.phases) == ((), None, None, {})
    assert served.staleness == (8, 24, 8)
    assert (served.staleness_mean, served.staleness_p95, served.staleness_max) == (1, 2, 2)
    # 400 samples in batches of 10 give 40 gradients, and 8 more gradients were dropped.
    assert served.dropped == 8 / 48
    assert served.phases == {"compute": 0.05, "pull": 0.025, "apply": 0.0125}


def test_the_loss_is_noted_several_times_per_epoch():
    scaled = made_scaled("one", [4, 4], [3, 2])
    run = scaled.run
    for line, parts in zip(run.metrics, ([4, 2], [2.5, 1.5]), strict=True):
        line["losses"] = parts
    # The mean over as many batches as an epoch has.
    assert loss_curve(run) == [
        (0.5, 50, 2, 4), (1, 100, 4, 3), (1.5, 150, 6, 2.25), (2, 200, 8, 2),
    ]  # fmt: skip
    (row,) = scale_rows([scaled], target_loss=2.5)
    assert row.seconds_to_target == pytest.approx(4 + 2 * 0.5 / 0.75)


def table_lines(rows):
    """Return the lines of all tables, without their headers."""
    return [tuple(line) for table in scale_tables(rows) for line in table.lines]


# The command


SMALL = """
data = {name = "digits", train_size = 256}
training = {epochs = 2, batch_size = 32, lr = 0.02, evaluate_every = 2, evaluate_last = 1}
run = {threads = 1, device = "cpu"}
"""


def test_scale_trains_and_reports_and_keeps_finished_runs(tmp_path, fast_runs):
    pytest.importorskip("ray")
    recipe = tmp_path / "small.toml"
    recipe.write_text(SMALL)
    out = tmp_path / "out"
    command = ["scale", recipe, "one", "all-reduce 2", "async 1+2", "--out", out, "--json"]
    one, reduced, served = json.loads(printed(*command))["rows"]
    assert one["speedup"] == 1
    assert reduced["workers"] == 2
    assert reduced["updates"] == one["updates"] / 2
    # Training with one asynchronous worker equals training in one process.
    assert served["accuracy_last"] == one["accuracy_last"]
    assert served["staleness"] == [16]
    assert set(served["phases"]) >= {"compute", "pull", "apply"}
    page = (out / "report.html").read_text()
    parse_strictly(page)
    assert page.count("<svg") == 3  # No update was stale, so there is no figure of the staleness.
    assert "async 1+2" in page

    before = {path: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}
    assert len(before) == 3
    printed(*command)
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/summary.json")} == before
    assert len(read_scaling(out).runs) == 3
    changed = invoke(*command, "training.lr=0.01")
    assert changed.exit_code == 2
    assert "give another --out" in changed.stderr


NODES = """
import sys
from pathlib import Path

recipe, out = Path(sys.argv[4]), Path(sys.argv[6])
print(f" 0: fineprune: {recipe.parent == out.parent and recipe.is_file()}", file=sys.stderr)
sys.exit(1)
"""


def test_all_nodes_find_the_recipe_and_their_reason_is_told(tmp_path, monkeypatch):
    """Each node has a folder for temporary files of its own, and srun numbers the lines."""
    (tmp_path / "nodes.py").write_text(NODES)
    launcher = [sys.executable, str(tmp_path / "nodes.py")]
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "one.toml").write_text("a file of the user")
    run = PlannedRun("one", make_recipe({}), folder / "one")
    with pytest.raises(RunError, match="'one' failed: True"):
        list(run_jobs([run], {}, lambda line: None, launcher=lambda _: launcher))
    assert sorted(path.name for path in folder.iterdir()) == ["one.log", "one.toml"]


def test_the_error_names_the_failed_run_and_the_reason(tmp_path, fast_runs):
    recipe = tmp_path / "small.toml"
    recipe.write_text(SMALL.replace("lr = 0.02", "lr = 1e30"))
    done = invoke("scale", recipe, "one", "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert "'one' failed: the mean loss of epoch 1 is nan" in done.stderr


@pytest.mark.long
def test_a_signal_also_stops_the_current_run(tmp_path, python):
    recipe = tmp_path / "long.toml"
    recipe.write_text(SMALL.replace("epochs = 2", "epochs = 100000"))
    out = tmp_path / "out"
    command = [*python, "-m", "fineprune", "scale", str(recipe), "one", "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as scaling:
        while not (out / "one/metrics.jsonl").exists():
            assert scaling.poll() is None
            time.sleep(0.1)
        scaling.terminate()
        assert scaling.wait() == 128 + signal.SIGTERM
    epochs = (out / "one/metrics.jsonl").read_bytes()
    time.sleep(2)  # A running process would train many epochs in this time.
    assert (out / "one/metrics.jsonl").read_bytes() == epochs


def test_a_run_whose_experiment_died_while_it_was_imported_ends(monkeypatch):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    for parent in (dead.pid, os.getpid()):  # Another program may be between the two.
        monkeypatch.setenv(PARENT_VARIABLE, str(parent))
        follow_parent_if_told()
    monkeypatch.setenv(PARENT_VARIABLE, str(dead.pid))
    follow_parent_if_told(elsewhere=True)
    assert ended == [1]


def test_a_run_whose_experiment_ends_follows_it_where_the_parent_keeps_its_number(monkeypatch):
    ended = threading.Event()
    gone = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr("os._exit", lambda status: ended.set())
    monkeypatch.setattr("multiprocessing.parent_process", lambda: gone)
    end_with_parent(os.getppid())  # This one is alive, as it seems to be on Windows.
    assert ended.wait(5)


def test_a_schedule_that_prunes_every_epoch_has_no_time_to_a_loss():
    runs = [
        made_scaled("one", [9, 4], [3, 2], pruned=[0, 1]),
        made_scaled("all-reduce 2", [9, 2], [3, 2.5], pruned=[0, 1]),
    ]
    rows = scale_rows(runs)
    assert [row.target_loss for row in rows] == [None, None]
    assert any("never" in line for line in table_lines(rows))
    assert draw_loss(runs, None) is None
    assert [row.seconds_to_target for row in scale_rows(runs, 0.1)] == [None, None]


def test_settings_of_the_recipe_that_do_not_count_are_named(tmp_path, caplog, monkeypatch):
    def stop(*_, **__):
        raise InputError("stopped")

    monkeypatch.setattr("fineprune.experiments.scale.configured", stop)
    strategy = {"strategy": "sync", "workers": 3, "backup": 1, "silence_seconds": 9.0}
    recipe = make_recipe({"training": {"epochs": 2}, "distributed": strategy})
    with pytest.raises(InputError, match="stopped"):
        scale(recipe, tmp_path / "out", [configuration("one")], title="t")
    (message,) = caplog.messages
    assert message.startswith("distributed.backup of the recipe is ignored")
    assert "add backup=1 to each configuration" in message


def test_a_recipe_of_one_epoch_is_refused_before_the_training(tmp_path):
    recipe = make_recipe({"training": {"epochs": 1}})
    with pytest.raises(InputError, match="at least 2, the first of which is a warm-up"):
        scale(recipe, tmp_path / "out", [configuration("one")], title="t")
    assert not (tmp_path / "out").exists()


def test_runs_that_skip_samples_are_not_taken_for_those_of_the_paper(made_runs):
    def said(policy):
        runs = [
            dataclasses.replace(one, run=with_summary(one.run, policy=policy)) for one in made_runs
        ]
        return scale_caveats(Scaling("s", False, runs))

    assert said("adaptive")[0].startswith("The runs skip samples (adaptive), which those of the")
    assert not any("skip samples" in sentence for sentence in said("full"))
