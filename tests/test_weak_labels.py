"""Recipes with label noise or label files: what is trained, and what is found."""

import functools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_runs import make_compare, with_summary
from resuming import small_recipe, train_through, untimed
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.datasets.image_set import ImageSet
from fineprune.datasets.label_file import read_labels
from fineprune.errors import InputError
from fineprune.experiments.arm_table import grouped
from fineprune.report.comparison import write_report
from fineprune.report.comparison_table import found_rows
from fineprune.runs.files import read_metrics
from fineprune.runs.run import read_runs
from fineprune.runs.summary import Detection
from fineprune.training.data import load_data
from fineprune.training.data import memory as training_data
from fineprune.training.recipe_replica import RecipeReplica
from fineprune.training.served_epochs import with_absolute_paths
from fineprune.training.trainer import train

ROOT = Path(__file__).parent.parent


def small(*changes):
    plain = ("data.crop_padding=0", "data.flip=false", "training.evaluate_every=6")
    return small_recipe(*plain, "training.epochs=6", *changes)


def labels_of(data):
    """The labels that a run trains on."""
    return data.train.open().batch(torch.arange(data.num_samples), 0)[1].numpy()


def wrong_of(data):
    """Which of these labels are known to be wrong."""
    assert data.wrong is not None
    return data.wrong


def evaluated(data):
    return torch.cat([y for _, (_, y) in data.evaluation]).numpy()


# -- label noise -----------------------------------------------------------------------------------


def test_noise_changes_the_training_labels_only_and_not_with_the_seed_of_the_run():
    held_out = "data.validation=56"
    clean, noisy = load_data(small(held_out)), load_data(small(held_out, "data.label_noise=0.3"))
    assert clean.wrong is None
    wrong = labels_of(noisy) != labels_of(clean)
    assert np.array_equal(wrong, wrong_of(noisy))
    assert wrong.sum() == round(0.3 * 200)
    assert np.array_equal(evaluated(clean), evaluated(noisy))
    other = load_data(small(held_out, "data.label_noise=0.3", "run.seed=7"))
    assert np.array_equal(labels_of(noisy), labels_of(other))
    reseeded = load_data(small(held_out, "data.label_noise=0.3", "data.label_noise_seed=7"))
    assert not np.array_equal(labels_of(noisy), labels_of(reseeded))


def test_a_map_changes_the_mapped_classes_only():
    clean = labels_of(load_data(small()))
    data = load_data(small("data.label_noise=0.5", 'data.label_noise_map=["3->5", "5->3"]'))
    noisy = labels_of(data)
    for source, target in ((3, 5), (5, 3)):
        members = clean == source
        assert set(noisy[members]) == {source, target}
        assert (noisy[members] == target).sum() == round(0.5 * members.sum())
    assert wrong_of(data).sum() == (noisy != clean).sum()


def test_workers_of_parameter_servers_train_the_same_labels():
    recipe = small("data.label_noise=0.3")
    _, y = RecipeReplica(recipe, rank=1).load((0, 0), torch.arange(256))
    assert np.array_equal(y.numpy(), labels_of(load_data(recipe)))
    placed = with_absolute_paths(small("data.labels=folder/labels.txt"))
    assert placed.data.labels == str(Path.cwd() / "folder/labels.txt")
    assert with_absolute_paths(recipe).data.labels is None


# -- label files -----------------------------------------------------------------------------------


@pytest.fixture
def given_labels(tmp_path):
    """The labels of 256 digits, of which every tenth is wrong and every eighth is left out."""
    own = labels_of(load_data(small()))
    given = own.copy()
    given[::10] = (given[::10] + 1) % 10
    given[::8] = -1
    lines = ["drop" if label < 0 else str(label) for label in given]
    (tmp_path / "labels.txt").write_text("\n".join(lines) + "\n")
    np.save(tmp_path / "labels.npy", given.astype(np.int16))
    return own, given


@pytest.mark.parametrize("name", ["labels.txt", "labels.npy"])
def test_a_file_gives_the_labels_and_leaves_samples_out(name, given_labels, tmp_path):
    own, given = given_labels
    kept = given >= 0
    data = load_data(small(f"data.labels={tmp_path / name}"))
    assert np.array_equal(labels_of(data), given[kept])
    assert data.num_samples == kept.sum()
    assert data.wrong is None
    known = load_data(small(f"data.labels={tmp_path / name}", "data.true_labels=dataset"))
    assert np.array_equal(wrong_of(known), (given != own)[kept])
    assert wrong_of(known).any()


def test_the_images_of_the_labels_that_are_kept_stay_theirs(given_labels, tmp_path):
    _, given = given_labels
    own = load_data(small())
    data = load_data(small(f"data.labels={tmp_path / 'labels.txt'}"))
    ((x, _),) = [own.train.open().batch(torch.from_numpy(np.flatnonzero(given >= 0)), 0)]
    ((other, _),) = [data.train.open().batch(torch.arange(data.num_samples), 0)]
    # Each set is normalised by its own mean and deviation, so pixels differ by a linear function.
    assert np.corrcoef(x.flatten(), other.flatten())[0, 1] == pytest.approx(1, abs=1e-5)


def test_the_held_out_images_keep_the_labels_of_the_dataset(given_labels, tmp_path):
    _, given = given_labels
    clean = load_data(small("data.validation=56"))
    data = load_data(small("data.validation=56", f"data.labels={tmp_path / 'labels.npy'}"))
    assert np.array_equal(evaluated(data), evaluated(clean))
    trained = Counter(labels_of(data).tolist())
    assert not trained - Counter(given[given >= 0].tolist())
    assert data.num_samples < 200


def test_text_labels_may_be_names_with_any_line_ends(tmp_path):
    file = tmp_path / "labels.txt"
    file.write_bytes("\ufeffcat\r\n 1 \r\ndrop\r\nbird".encode())
    assert read_labels(file, ("bird", "cat"), 4).tolist() == [1, 1, -1, 0]
    file.write_text("cat\n\nbird\n")
    with pytest.raises(InputError, match=r"in line 2 of .*, got ''"):
        read_labels(file, ("bird", "cat"), 3)


def test_a_run_is_not_resumed_with_other_labels(given_labels, tmp_path):
    file = tmp_path / "labels.txt"
    recipe = small(f"data.labels={file}", "training.epochs=2", "pruning.policy=full")
    train_through(0, recipe, tmp_path / "run")
    text = file.read_text()
    lines = text.splitlines()
    lines[1] = str((int(lines[1]) + 1) % 10)
    file.write_text("\n".join(lines))
    with pytest.raises(InputError, match="the labels with which the run began, got different ones"):
        train(recipe, tmp_path / "run", resume=True)
    file.write_text(text)
    summary = train(recipe, tmp_path / "run", resume=True)
    assert summary.suspicion is None  # It is not known which labels are wrong.


# -- what a run reports ----------------------------------------------------------------------------


NOISE = "data.label_noise=0.3"


def test_the_adaptive_policy_is_given_the_logits_without_a_history_too(tmp_path):
    adaptive = ("pruning.policy=adaptive", "pruning.save=0.35")
    for history in ("true", "false"):
        train(small(NOISE, *adaptive, f"run.history={history}"), tmp_path / history)
    assert untimed(tmp_path / "true") == untimed(tmp_path / "false")
    assert not [*(tmp_path / "false/history").glob("epoch-*")]


def test_runs_without_known_wrong_labels_report_nothing(tmp_path):
    short = "training.epochs=1"
    assert train(small(short), tmp_path / "clean").suspicion is None
    assert "suspicion" not in read_metrics(tmp_path / "clean/metrics.jsonl")[0]
    blind = ("pruning.policy=full", "run.history=false")
    full = train(small(NOISE, *blind, short), tmp_path / "full")
    assert full.suspicion is None
    assert "suspicion" not in read_metrics(tmp_path / "full/metrics.jsonl")[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "77 of 256 labels are wrong; of 192 suspects "),
        (["data.label_noise=0"], "0 of 256 labels are wrong; of "),
    ],
)
def test_train_says_in_one_line_what_was_found(changes, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(small(NOISE).to_toml())
    result = CliRunner().invoke(app, ["train", "small.toml", "training.epochs=1", *changes])
    assert result.exit_code == 0, result.output
    assert said in result.stdout
    assert result.stdout.count("\n") == 2


# -- the report ------------------------------------------------------------------------------------


def with_suspicion(run):
    """Invented figures, which differ between the seeds by 0.1."""
    add = 0.1 * (run.summary.seed % 3)
    figures: dict[str, Any] = {"wrong": 154, "wrong_share": 0.3}
    figures |= dict.fromkeys(("roc_area", "average_precision", "suspects", "precision", "recall"))
    figures["r_precision"] = None
    if run.summary.arm == "fine-pruning":
        figures |= {"roc_area": 0.7 + add, "average_precision": 0.6, "suspects": 1200 + 30 * add}
        figures |= {"precision": 0.5 + add, "recall": 0.4, "r_precision": 0.45}
    return with_summary(run, suspicion=Detection(**figures))


def test_the_report_shows_the_means_of_each_arm(tmp_path):
    runs = read_runs([make_compare(tmp_path / "c", arms=["full", "fine-pruning"])])
    assert not found_rows(*grouped(runs))
    write_report(runs, tmp_path / "clean.html")
    assert "Wrong labels found" not in (tmp_path / "clean.html").read_text()

    noisy = [with_suspicion(run) for run in runs]
    assert len({run.summary.suspicion.roc_area for run in noisy}) > 2
    full, pruned = found_rows(*grouped(noisy))
    assert (full["arm"], full["seeds"], full["roc_area"]) == ("full", 3, None)
    areas = [run.summary.suspicion.roc_area for run in noisy]
    known = [area for area in areas if area is not None]
    assert pruned["roc_area"] == pytest.approx(np.mean(known))
    write_report(noisy, tmp_path / "noisy.html")
    page = (tmp_path / "noisy.html").read_text()
    assert page.count("<h2>Wrong labels found</h2>") == 1
    assert f"<td>{pruned['roc_area']:.3f}</td>" in page
    assert "<td>40.0</td>" in page


def test_the_command_report_shows_the_table(tmp_path):
    found = train(small(NOISE), tmp_path / "run").suspicion
    out = ["--out", str(tmp_path / "report.html")]
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "run"), *out])
    assert shown.exit_code == 0, shown.output
    assert "Wrong labels found" in shown.stdout
    as_json = CliRunner().invoke(app, ["report", str(tmp_path / "run"), *out, "--json"])
    (row,) = json.loads(as_json.stdout)["wrong_labels"]
    assert row["arm"] == "fine-pruning"
    assert row["roc_area"] == found.roc_area


# -- the size of the training set ------------------------------------------------------------------


@pytest.fixture
def sixty_images(monkeypatch):
    """Sixty images in place of the 50,000 of CIFAR-10, which need 150 MB."""
    rng = np.random.default_rng(0)

    def images(number):
        pixels = torch.from_numpy(rng.integers(0, 256, (number, 3, 32, 32), dtype=np.uint8))
        names = tuple(f"class {label}" for label in range(10))
        return ImageSet(pixels, torch.from_numpy(rng.integers(0, 10, number)), names)

    sets = images(60), images(20)
    monkeypatch.setattr(training_data, "load_cifar10", lambda directory, download: sets)
    return sets


def cifar(**data):
    return small_recipe(data={"name": "cifar10", "crop_padding": 0, "flip": False, **data})


def test_train_size_takes_the_first_images_that_are_not_held_out(sixty_images):
    own = sixty_images[0].labels.numpy()
    assert np.array_equal(labels_of(load_data(cifar())), own)
    assert np.array_equal(labels_of(load_data(cifar(train_size=13))), own[:13])
    rest = load_data(cifar(validation=20))
    part = load_data(cifar(validation=20, train_size=13))
    assert np.array_equal(labels_of(part), labels_of(rest)[:13])
    assert np.array_equal(evaluated(part), evaluated(rest))
    both = np.concatenate([labels_of(rest), evaluated(rest)])
    assert Counter(both.tolist()) == Counter(own.tolist())
    with pytest.raises(InputError, match=r"data\.train_size to be at most 40, .* got 41"):
        load_data(cifar(validation=20, train_size=41))


def test_labels_of_a_file_belong_to_the_whole_training_set(sixty_images, tmp_path):
    np.save(tmp_path / "labels.npy", np.arange(60) % 10)
    given = load_data(cifar(validation=20, train_size=13, labels=str(tmp_path / "labels.npy")))
    whole_set = load_data(cifar(validation=20, labels=str(tmp_path / "labels.npy")))
    assert np.array_equal(labels_of(given), labels_of(whole_set)[:13])
    assert np.array_equal(
        labels_of(load_data(cifar(labels=str(tmp_path / "labels.npy")))), np.arange(60) % 10
    )


def test_plan_knows_the_number_of_images():
    plan = functools.partial(CliRunner().invoke, app)
    recipe = str(ROOT / "recipes/paper/lenet.toml")
    for changes, samples in (
        ([], 50_000),
        (["data.validation=5000"], 45_000),
        (["data.validation=5000", "data.train_size=10000"], 10_000),
    ):
        shown = plan(["plan", recipe, *changes])
        assert f"{samples:,} per full epoch" in shown.stdout


def test_the_example_of_the_page_is_what_its_command_prints(tmp_path, one_thread_everywhere):
    page = (ROOT / "docs/weak-labels.md").read_text(encoding="utf-8")
    example = page.partition("## An example")[2].partition("##")[0]
    (command,) = re.findall(r"^fineprune (train .*) --out", example, re.MULTILINE)
    words = [str(ROOT / word) if "/" in word else word for word in command.split()]
    three = r"([\d.]+), ([\d.]+) and ([\d.]+)"
    shown = re.search(
        rf"there were {three} suspects .*? which {three} % were wrong, and they were {three} % "
        r".*? ROC area was ([\d.]+) each time",
        " ".join(example.split()),
    )
    assert shown
    *figures, roc_area = map(float, shown.groups())
    # The first seed stands for all: three would take three times as long.
    options = ["--out", str(tmp_path / "run"), "--json"]
    found = json.loads(CliRunner().invoke(app, [*words, *options]).stdout)["suspicion"]
    suspects, precision, recall = figures[::3]
    assert found["wrong"] == 307
    # Other processors and versions round differently.
    assert found["suspects"] == pytest.approx(suspects, rel=0.05)
    assert 100 * found["precision"] == pytest.approx(precision, abs=2)
    assert 100 * found["recall"] == pytest.approx(recall, abs=3)
    assert found["roc_area"] == pytest.approx(roc_area, abs=0.002)
