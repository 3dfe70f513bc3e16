"""What may differ between runs: one definition for resuming, comparisons and reports."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import invoke, printed
from made_images import write_folder
from made_runs import table_rows
from resuming import train_through

from fineprune.errors import InputError, RunError
from fineprune.experiments.compare import compare, plan_runs
from fineprune.experiments.configurations import configuration, configured
from fineprune.experiments.controls import make_arms
from fineprune.experiments.scale import scale
from fineprune.runs.files import write_json
from fineprune.runs.run import read_run, read_runs
from fineprune.training.data import load_data
from fineprune.training.hardware import resolved
from fineprune.training.network import recipe_network
from fineprune.training.recipe import make_recipe, read_recipe
from fineprune.training.trainer import train

pytestmark = pytest.mark.usefixtures("fast_spawn")

RECIPE = {
    "data": {"name": "digits", "train_size": 96},
    "training": {
        "epochs": 2,
        "batch_size": 32,
        "lr": 0.02,
        "evaluate_last": 1,
        "evaluate_every": 2,
    },
    "pruning": {"policy": "fine-pruning", "window": 2, "start": 1, "prune": 32},
    "run": {"device": "cpu", "threads": 1, "precision": "float32", "compile": "off"},
}
ARMS = ("full",)


def planned(recipe, folder, seeds):
    data = load_data(resolved(recipe))
    return plan_runs(recipe, folder, seeds, make_arms(recipe, ARMS, data.num_samples), data)


def trained(recipe, folder, seeds=1):
    """Train a comparison in this process, which takes less time than new ones."""
    for run in planned(recipe, folder, seeds):
        train(run.recipe, run.folder, resume=True)
    compare(recipe, folder, title="c", seeds=seeds, arms=ARMS)


def write_labels(file, shift):
    np.save(file, (np.arange(96) + shift) % 10)


def write_weights(file, seed):
    recipe = make_recipe(RECIPE)
    torch.manual_seed(seed)
    torch.save(recipe_network(recipe, load_data(recipe)).state_dict(), file)


def with_labels(folder):
    write_labels(folder / "labels.npy", 0)
    recipe = make_recipe(RECIPE, [f"data.labels={folder}/labels.npy"])
    return recipe, lambda: write_labels(folder / "labels.npy", 1)


def with_weights(folder):
    write_weights(folder / "weights.pth", 0)
    recipe = make_recipe(RECIPE, [f"network.weights={folder}/weights.pth"])
    return recipe, lambda: write_weights(folder / "weights.pth", 1)


def with_images(folder):
    for part, number in (("train", 48), ("test", 8)):
        write_folder(folder / part, number)
    data = {"name": "images", "image_size": 32}
    data |= {part: str(folder / part) for part in ("train", "test")}
    recipe = make_recipe({**RECIPE, "data": data}, ["pruning.prune=16", "training.batch_size=16"])
    moved = next((folder / "test").rglob("*.*"))
    return recipe, lambda: moved.rename(moved.with_stem("renamed"))


def own():
    order = np.random.default_rng(int(Path("seed").read_text())).permutation(128)
    samples = [(torch.full((1, 32, 32), float(number)), int(number) % 10) for number in order]
    return samples[:96], samples[96:]


def with_own_data(folder):
    Path("seed").write_text("0")
    data = {"name": f"{__name__}:own"}
    recipe = make_recipe({**RECIPE, "data": data}, ["network.classes=10"])
    return recipe, lambda: Path("seed").write_text("1")


SOURCES = [
    ("labels", with_labels),
    ("weights", with_weights),
    ("data", with_images),
    ("data", with_own_data),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(("what", "source"), SOURCES)
def test_a_comparison_does_not_go_on_with_other_labels_weights_or_data(what, source, tmp_path):
    """Nor does a table show runs that were added to it in spite of that."""
    recipe, change = source(tmp_path)
    trained(recipe, tmp_path / "c")
    file = tmp_path / "c/compare.json"
    before = file.read_text()
    compare(recipe, tmp_path / "c", title="c", arms=ARMS)
    assert file.read_text() == before
    change()
    with pytest.raises(InputError, match=f"expected the {what} with which the runs in"):
        compare(recipe, tmp_path / "c", title="c", seeds=2, arms=ARMS)
    assert file.read_text() == before
    assert not (tmp_path / "c/full-1").exists()
    added = planned(recipe, tmp_path / "c", 2)[1]
    train(added.recipe, added.folder)
    listing = json.loads(before)
    seed = added.recipe.run.seed
    listing["runs"].append({"arm": "full", "seed": seed, "path": added.folder.name})
    write_json(file, listing)
    with pytest.raises(InputError, match=rf"full-0 and full-1, in which sha256\.{what} is"):
        table_rows(read_runs([tmp_path / "c"]))


@pytest.mark.parametrize(("what", "source"), [SOURCES[0], SOURCES[-1]])
def test_scale_does_not_go_on_with_other_labels_weights_or_data(what, source, tmp_path):
    recipe, change = source(tmp_path)
    one, folder = configuration("one"), tmp_path / "s"
    train(resolved(configured(recipe, one)), folder / "one")
    scale(recipe, folder, [one], title="s")
    before = (folder / "scale.json").read_text()
    change()
    with pytest.raises(InputError, match=f"expected the {what} with which the runs in"):
        scale(recipe, folder, [one, configuration("one lr=0.01")], title="s")
    assert (folder / "scale.json").read_text() == before


def test_a_scaling_experiment_is_reported_again_from_its_folder(tmp_path):
    recipe, folder = make_recipe(RECIPE), tmp_path / "s"
    one = configuration("one")
    for seed, own in ((0, "one"), (1, "one-seed-2")):
        seeded = recipe.replaced("run", seed=seed)
        train(resolved(configured(seeded, one)), folder / own)
    scale(recipe, folder, [one], title="s", seeds=2)
    command = ["report", folder, "--out", tmp_path / "page.html"]
    assert "Throughput" in printed(*command)
    assert "Throughput" in (tmp_path / "page.html").read_text(encoding="utf-8")
    (row,) = json.loads(printed(*command, "--json"))["rows"]
    assert (row["configuration"], row["seeds"]) == ("one", 2)
    assert "of 96 labels" in printed("plan", folder)
    assert "of 96 labels" in printed("inspect", folder, "--out", tmp_path / "labels.html")
    both = invoke(*command, folder)
    assert "expected one folder of a scaling experiment, got 2 folders" in both.stderr


def test_a_finished_run_is_not_resumed_with_other_labels(tmp_path):
    recipe, change = with_labels(tmp_path)
    finished = train(recipe, tmp_path / "run")
    assert train(recipe, tmp_path / "run", resume=True) == finished
    change()
    with pytest.raises(InputError, match="the labels with which the run began, got different ones"):
        train(recipe, tmp_path / "run", resume=True)
    assert read_run(tmp_path / "run").summary == finished


def test_a_file_that_changes_while_a_comparison_trains_ends_it(tmp_path):
    recipe, change = with_weights(tmp_path)
    run = planned(recipe, tmp_path / "c", 1)[0]
    train_through(0, run.recipe, run.folder)
    change()
    with pytest.raises(RunError, match="the weights changed while runs trained: remove"):
        compare(recipe, tmp_path / "c", title="c", arms=ARMS)


def test_the_digests_do_not_depend_on_where_the_files_are(tmp_path):
    for source, name in ((with_images, "data_sha256"), (with_weights, "weights_sha256")):
        digests = []
        for place in ("here", "there"):
            (tmp_path / name / place).mkdir(parents=True)
            recipe, _ = source(tmp_path / name / place)
            summary = train(recipe, tmp_path / name / place / "run")
            digests.append(getattr(summary, name))
        assert digests[0] == digests[1] is not None


# Settings that say where and how a run is carried out, which all of them let differ.
def places(folder):
    shutil.copytree(folder / "train", folder / "elsewhere")
    return [
        f"data.train={folder}/elsewhere",
        "data.broken_limit=0.5",
        "data.workers=1",
        "run.checkpoint_every=2",
    ]


def test_what_a_comparison_accepts_can_be_resumed_and_reported(tmp_path):
    recipe, _ = with_images(tmp_path)
    trained(recipe, tmp_path / "c")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    changed = read_recipe(tmp_path / "recipe.toml", places(tmp_path))
    trained(changed, tmp_path / "c", seeds=2)
    (row,) = json.loads(printed("report", tmp_path / "c", "--json"))["rows"]
    assert row["seeds"] == 2
    train_through(0, recipe, tmp_path / "resumed")
    train(changed, tmp_path / "resumed", resume=True)
    before = read_run(tmp_path / "c/full-0").summary.digests
    assert read_run(tmp_path / "resumed").summary.digests == before


def test_time_limits_of_servers_may_change():
    recipe = make_recipe(RECIPE, ["distributed.strategy=async"])
    changes = [f"distributed.{name}=900" for name in ("silence_seconds", "snapshot_every")]
    raised = make_recipe(recipe.as_dict(), [*changes, "distributed.placement=dedicated"])
    assert recipe.differences(raised) == []
    assert recipe.differences(recipe.replaced("distributed", workers=4))
