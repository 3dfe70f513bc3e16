"""The benchmarks run on little data. Their measurements are not tested."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from made_images import write_folder

from fineprune.datasets.image_files import ImageFiles, View
from fineprune.datasets.image_index import load_index
from fineprune.datasets.synthetic import make_synthetic
from fineprune.labels.evidence import Evidence
from fineprune.runs.history import read_evidence
from fineprune.runs.run import read_run
from fineprune.training.loop import train
from fineprune.training.recipe import make_recipe

pytestmark = pytest.mark.long


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


def test_throughput_compares_three_loops(run):
    done = run("throughput.py", "--samples", 512, "--rounds", 2, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [set(line) for line in result["rounds"]] == 2 * [{"ours", "plain", "limit"}]
    assert result["summary"]["ours_to_plain"] > 0


def test_images_measures_decoding_loading_and_the_index(
    run,
):
    arguments = ["--images", 12, "--rounds", 1, "--batch", 4, "--files", 20, "--listed", 50]
    done = run("images.py", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["decoding"]["pipeline to plain"] > 0
    assert 0 <= result["loading"]["share of time waited"] < 1
    assert result["index"]["list, s per million images"] > 0


def test_streams_measures_passes_over_shards(run):
    done = run("streams.py", "--images", 100, "--size", 32, "--rounds", 1, "--json")
    assert done.returncode == 0, done.stderr
    medians = json.loads(done.stdout)["medians"]
    assert len(medians) == 4
    assert all(seconds > 0 for seconds in medians.values())


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_cifar_can_be_written_as_files_and_as_shards(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images, _ = make_synthetic(30, size=8)
    program = runpy.run_path("benchmarks/cifar_as_files.py")
    program["write_folders"](images, kind, tmp_path / "folders")
    program["write_shards"](images, kind, tmp_path / "shards", 4)
    assert len(list((tmp_path / "shards").iterdir())) == 4
    whole = torch.arange(len(images))
    # Folders are in the order of the classes.
    orders = {"folders": images.labels.argsort(stable=True), "shards": whole}
    for form, order in orders.items():
        index = load_index(tmp_path / form)
        assert index.classes == images.classes
        samples = ImageFiles(index, index.labels, View(8, 8))
        assert len(samples) == len(images)
        for sample, number in enumerate(order):
            _, pixels, label = samples[0, sample]
            assert label == images.labels[number]
            if kind == "PNG":
                assert torch.equal(torch.as_tensor(pixels), images.images[number])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_trainings_on_image_files_end_as_if_undisturbed(run, tmp_path):
    write_folder(tmp_path / "train", 64)
    write_folder(tmp_path / "test", 8)
    options = ["--kills", 2, "--epochs", 2, "--workers", 1, "--checkpoint-steps", 1]
    small = ["--set", "training.batch_size=2", "pruning.policy=full", "pruning.save=none"]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run("image_kills.py", tmp_path, *options, *small, environment=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal bit for bit: 1 kill, 1 term all" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_image_memory_measures_the_training_and_its_loaders(run, tmp_path):
    write_folder(tmp_path / "train", 16)
    write_folder(tmp_path / "test", 4)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    options = ["--epochs", 2, "--workers", 1, "--json"]
    done = run("image_memory.py", tmp_path, *options, environment=cache)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["loaders"] for row in rows] == [1, 1]
    assert all(row["PSS"] > 0 and row["their PSS"] > 0 for row in rows)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resnet50_strategies_trains_from_the_command_line(run):
    small = ["--images", 4, "--size", 32, "--network", "lenet", "--only", "one process", "--json"]
    done = run("resnet50_strategies.py", *small)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["steps"] == 2
    assert row["memory, GB"] > 0


def test_backup_workers_compares_delayed_workers_with_and_without_a_backup(
    run,
    preloaded_ray_workers,
):
    pytest.importorskip("ray")
    arguments = ["--updates", 5, "--rounds", 1, "--json"]
    done = run("backup_workers.py", *arguments, environment=preloaded_ray_workers)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    strategies, kinds = ("1 backup", "no backup"), ("undisturbed", "held up")
    measured = {f"{strategy}, {kind}" for strategy in strategies for kind in kinds}
    assert [set(line) for line in result["rounds"]] == [measured]
    assert result["summary"]["1 backup, kept"] > 0


def test_the_queue_stops_when_its_time_is_up_and_continues_when_called_again(
    tmp_path, monkeypatch, capsys
):
    """With the digits instead of CIFAR-10 and no time left, each call trains one epoch."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    text = Path("recipes/digits.toml").read_text()
    (recipes / "small.toml").write_text(text.replace("epochs = 200", "epochs = 2"))
    changes = [
        "data.train_size=256",
        "training.milestones=[1]",
        "pruning.window=2",
        "pruning.start=0",
        "run.threads=1",
        "run.checkpoint_every=1",
        "training.batch_size=64",
        "pruning.prune=64",
    ]
    arguments = ["--recipes", recipes, "--networks", "small", "--out", tmp_path / "out"]
    arguments += ["--minutes", 0, *(part for change in changes for part in ("--set", change))]
    monkeypatch.setattr(sys, "argv", ["paper_queue.py", *map(str, arguments)])
    main = runpy.run_path("benchmarks/paper_queue.py")["main"]
    statuses: list[int] = []
    printed: list[str] = []
    while 0 not in statuses and len(statuses) < 10:
        statuses.append(main())
        printed.append(capsys.readouterr().out)
    assert "1 of 2 epochs" in printed[0]
    assert len(statuses) > 4
    assert set(statuses) == {75, 0}
    assert printed[-1].count("2 of 2 epochs") == 2
    for arm in ("full", "fine-pruning"):
        assert len(read_run(tmp_path / "out" / f"small-{arm}").metrics) == 2


@pytest.mark.parametrize("statuses", [[75, 75, 0], [75, 1], [1]])
def test_the_loop_around_the_queue_stops_when_all_is_done_and_at_an_error(run, statuses, tmp_path):
    """The loop of the documentation, with a command that exits with these statuses."""
    text = Path("docs/results/paper.md").read_text(encoding="utf-8")
    (loop,) = re.findall(r"^.*paper_queue\.py.*done$", text, re.MULTILINE)
    (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    python = "python() { read -r status <&3 || exit 2; echo started; return $status; }"
    command = f"{python}; {{ {loop}; }} 3<{tmp_path / 'statuses'}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("started")) == (0, len(statuses))


def test_wrong_input_of_the_queue_is_one_line(run, tmp_path):
    done = run("paper_queue.py", "--networks", "lenet", "--out", tmp_path, "--set", "data.dir=no")
    assert done.returncode == 1
    assert done.stderr.startswith("paper_queue.py: expected CIFAR-10 ")
    assert done.stderr.count("\n") == 1


def test_the_times_of_the_networks_are_ratios_within_a_run(tmp_path, monkeypatch, capsys):
    """With the digits; the second call shows what the first one has trained."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "lenet.toml").write_text(Path("recipes/digits.toml").read_text())
    arguments = ["--recipes", recipes, "--networks", "lenet", "--out", tmp_path / "out"]
    arguments += ["--epochs", 3, "--set", "data.train_size=512", "run.threads=1"]
    arguments += ["data.validation=0"]
    monkeypatch.setattr(sys, "argv", ["network_times.py", *map(str, arguments)])
    monkeypatch.syspath_prepend("benchmarks")
    main = runpy.run_path("benchmarks/network_times.py")["main"]
    main()
    shown = capsys.readouterr().out
    names, _, row = (line.strip("| ").split(" | ") for line in shown.splitlines()[:3])
    found = dict(zip(names, row, strict=True))
    metrics = read_run(tmp_path / "out" / "lenet").metrics
    assert [epoch["samples"] for epoch in metrics] == [512, 384, 512]
    assert found["samples skipped, %"] == "25"
    saved = 1 - metrics[1]["seconds"] / metrics[2]["seconds"]
    assert float(found["time saved per share skipped"]) == pytest.approx(saved / 0.25, rel=0.01)
    main()
    assert capsys.readouterr().out == shown


def test_uneven_labels_are_found_by_the_watch_and_by_the_loss(run, tmp_path):
    done = run("uneven_labels.py", "--seeds", 1, "--json", tmp_path / "runs.json")
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert len(runs) == done.stdout.count("\n| ") - 1 == 10
    assert all(one["watch_roc_area"] > 0.93 and one["loss_roc_area"] > 0.85 for one in runs)


def test_small_classes_are_lost_by_the_losses_alone(monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    small = runpy.run_path("benchmarks/small_classes.py")
    case = small["CASES"]["digits, five rare classes, 20 % wrong"](0)
    logits, losses = (small["train"](case, arm, 0)["accuracy"] for arm in ("logits", "losses"))
    assert logits > losses + 5


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_label_overhead_measures_steps_and_memory(run):
    done = run("label_overhead.py", "--steps", 20, "--samples", 2000, "--classes", 10, 100)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\| lenet \| [\d.]+", done.stdout)
    assert re.search(r"\| 2,000 \| 100 \| 0.172 \|", done.stdout)


def test_device_overhead_measures_any_device(run):
    few = ["--networks", "lenet", "--steps", 4, "--rounds", 1]
    done = run("device_overhead.py", "--device", "cpu", *few)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\| lenet \| plain \| \S+ \| 0 \| 0 \| 0 \|", done.stdout)
    assert {"Pruner.record", "LabelWatch.record"} <= set(re.findall(r"\w+\.record", done.stdout))


def test_updates_measures_their_cost_and_loading_that_overlaps(run):
    pytest.importorskip("ray")
    done = run("updates.py", "--rounds", 1, "--updates", 5, "--elements", 1000, "--json")
    assert done.returncode == 0, done.stderr
    (line,) = json.loads(done.stdout)["rounds"]["this checkout"]
    assert all(value > 0 for value in line.values())


def test_the_simulated_cluster_continues_and_makes_its_table(tmp_path, run):
    small = ["data.train_size=256", "training.epochs=2", "training.milestones=[]"]
    small += ["run.device=cpu", "run.threads=1", "run.history=false", "training.batch_size=8"]
    command = [tmp_path / "runs", "--recipe", "recipes/digits.toml", "--only", "slow"]
    command += ["--seeds", 2, "--set", *small]
    done = run("simulated_cluster.py", *command)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| slow")]
    assert [row[0] for row in rows] == [
        *("| slow: async-8", "| slow: async-8-one-slow", "| slow: async-8-spread")
    ]
    assert all(0 < float(row[1]) < 100 for row in rows)
    again = run("simulated_cluster.py", *command)
    assert again.stdout == "\n" + done.stdout.partition("\n\n")[2]


def test_watched_runs_are_ranked(tmp_path, monkeypatch, capsys):
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
    expected = read_evidence(tmp_path / "run", 256)
    with np.load(file) as arrays:
        assert np.array_equal(arrays["labels"], expected.labels())
        assert len(arrays["order"]) == 6 * 256
        true = arrays["labels"].copy()
    true[:20] = (true[:20] + 1) % 10
    np.save(tmp_path / "true.npy", true)
    out = tmp_path / "ranking.json"
    arguments = ["", str(tmp_path / "runs"), str(tmp_path / "true.npy"), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path("benchmarks/label_ranking.py")["main"]()
    assert "| random | 5 |" in capsys.readouterr().out
    (run,) = json.loads(out.read_text())["runs"]
    assert run["wrong"] == 20
    assert {"watch", "loss", "AUM", "AlignPrune"} <= run["after"]["5"].keys()
