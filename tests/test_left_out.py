"""Second trainings: data.without leaves out what a first run suspects."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from resuming import outcome, small_recipe, train_through
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.datasets.digits import load_digits
from fineprune.errors import InputError
from fineprune.experiments.compare import compare
from fineprune.inspection.inspected import read_inspected
from fineprune.inspection.shown_samples import shown_samples
from fineprune.runs.history import read_evidence
from fineprune.runs.run import read_run, read_runs
from fineprune.runs.training_set import UNKNOWN, read_training_set
from fineprune.training.data import load_data
from fineprune.training.data.labels import without_suspects
from fineprune.training.hardware import resolved
from fineprune.training.trainer import train

N = 512


def digits():
    """User-defined data with wrong labels and without keys."""
    first, test = load_digits(N)
    labels = first.labels.clone()
    labels[::4] = (labels[::4] + 1) % 10
    parts = [TensorDataset(part.images.float() / 255, part.labels) for part in (first, test)]
    parts[0].tensors = (parts[0].tensors[0], labels)
    return parts


def recipe(*changes):
    settings = [f"data.train_size={N}", "data.label_noise=0.3", "training.epochs=10"]
    settings += ["training.batch_size=32", "training.lr=0.05", "training.milestones=[8]"]
    return small_recipe(*settings, "training.evaluate_every=12", *changes, pruning={})


def second(run, *changes):
    return recipe(f"data.without={run}", *changes)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "run"
    train(recipe(), folder)
    return folder


@pytest.fixture(scope="module")
def again(first, tmp_path_factory):
    folder = tmp_path_factory.mktemp("second") / "run"
    train(second(first), folder)
    return folder


def kept_by(run, samples=N):
    return read_evidence(run, samples)[0].without_suspects()


def test_the_second_training_is_one_on_the_subset_of_the_others(first, again):
    kept, run = kept_by(first), read_run(again)
    assert 0.5 * N < len(kept) < 0.85 * N
    assert run.summary.train_samples == len(kept)
    assert run.summary.steps == 10 * -(-len(kept) // 32)
    before, after = read_training_set(first, N), read_training_set(again, len(kept))
    np.testing.assert_array_equal(after.index, before.index[kept])
    np.testing.assert_array_equal(after.trained_labels, before.trained_labels[kept])
    np.testing.assert_array_equal(after.labels, before.labels)
    data = load_data(resolved(second(first)))
    whole = load_data(resolved(recipe()))
    assert (data.num_samples, data.digests["data"]) == (len(kept), whole.digests["data"])
    assert whole.train.labels is not None
    np.testing.assert_array_equal(data.train.labels, whole.train.labels[kept])
    assert data.wrong is not None
    assert whole.wrong is not None
    np.testing.assert_array_equal(data.wrong, whole.wrong[kept])
    assert data.wrong.mean() < 0.5 * whole.wrong.mean()


def test_its_samples_are_shown_by_their_index_and_without_the_first_run(first, again, tmp_path):
    recipe_file = (again / "recipe.toml").read_text().replace(str(first), str(tmp_path / "gone"))
    shutil.copytree(again, tmp_path / "moved")
    (tmp_path / "moved/recipe.toml").write_text(recipe_file)
    show = shown_samples(read_inspected([read_run(tmp_path / "moved")]), own_data=False)
    pictures = load_digits(N)[0].images[kept_by(first)].numpy()
    for sample in (0, 1, len(pictures) - 1):
        np.testing.assert_array_equal(np.asarray(show(sample)), pictures[sample].transpose(1, 2, 0))
    table = tmp_path / "labels.csv"
    page = str(tmp_path / "page.html")
    command = ["inspect", str(tmp_path / "moved"), "--out", page, "--labels", str(table)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    listed = [line.split(",") for line in table.read_text().splitlines()[1:]]
    labels = read_training_set(first, N).labels
    assert {int(line[1]): int(line[2]) for line in listed} == dict(enumerate(labels.tolist()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.train_size=480", "whose 512 samples or their labels differ from these 480"),
        ("data.label_noise_seed=1", "or their labels differ"),
        ("data.label_noise=none", "or their labels differ"),
    ],
)
def test_a_run_on_other_samples_or_labels_is_refused_at_the_start(first, tmp_path, change, message):
    with pytest.raises(InputError, match=message) as caught:
        train(second(first, change), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_labels_that_the_data_hide_are_not_compared(first):
    data = load_data(resolved(recipe()))
    shown, known = data.training_set(), data.digests["data"] or ""
    hidden = replace(shown, labels=np.full_like(shown.labels, UNKNOWN))
    assert without_suspects(first, hidden, known).tolist() == kept_by(first)
    moved = replace(shown, index=shown.index + 1, labels=np.append(shown.labels, 0))
    with pytest.raises(InputError, match="samples or their labels differ"):
        without_suspects(first, moved, known)
    with pytest.raises(InputError, match="samples or their labels differ"):
        without_suspects(first, shown, "0" * 64)


def test_a_run_without_evidence_or_suspects_is_refused(first, tmp_path):
    with pytest.raises(InputError, match="expected a finished run"):
        train(second(tmp_path / "none"), tmp_path / "run")
    train(
        recipe("training.epochs=1", "training.milestones=[]", "run.history=false"),
        tmp_path / "bare",
    )
    with pytest.raises(InputError, match=r"history = true|with evidence"):
        train(second(tmp_path / "bare"), tmp_path / "run")
    shutil.copytree(first, tmp_path / "unsuspicious")
    watch, _ = read_evidence(first, N)
    sure = type(watch)(N, 10)
    sure.record(
        torch.arange(N), 9.0 * torch.eye(10)[watch.ranking().labels], watch.ranking().labels
    )
    torch.save(sure.state_dict(), tmp_path / "unsuspicious/history/evidence.pt")
    with pytest.raises(InputError, match="which suspects none: leave out"):
        train(second(tmp_path / "unsuspicious"), tmp_path / "run")


def test_it_is_resumed_bit_for_bit_and_only_without_the_same_samples(first, again, tmp_path):
    shutil.copytree(first, tmp_path / "first")
    chosen = second(tmp_path / "first")
    train_through(1, chosen, tmp_path / "run")
    with pytest.raises(InputError, match="the suspects with which the run began"):
        train(chosen.replaced("data", without=None), tmp_path / "run", resume=True)
    shutil.copytree(tmp_path / "run", tmp_path / "later")
    # The folder may be another one, if it leaves out the same samples.
    train(second(first), tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(again)
    shutil.rmtree(tmp_path / "first")
    train(recipe("training.epochs=9"), tmp_path / "first")
    for folder in ("later", "run"):  # One is unfinished, the other finished.
        with pytest.raises(InputError, match=r"began, .*: restore that run, or"):
            train(chosen, tmp_path / folder, resume=True)
    with pytest.raises(InputError, match="the suspects with which the run began"):
        train(chosen.replaced("data", without=None), tmp_path / "run", resume=True)


def test_user_defined_data(tmp_path):
    own = ["data.name=test_left_out:digits", "data.train_size=none", "data.label_noise=none"]
    own += ["network.classes=10", "data.workers=1"]
    train(recipe(*own), tmp_path / "first")
    made = second(tmp_path / "first", *own)
    summary = train(made, tmp_path / "second")
    kept = kept_by(tmp_path / "first")
    assert summary.train_samples == len(kept) < 0.9 * N
    assert read_training_set(tmp_path / "second", len(kept)).index.tolist() == kept
    fetch = load_data(resolved(made)).train.open().batch
    x, y = fetch(torch.arange(20), 0)
    everything = digits()[0]
    torch.testing.assert_close(x, everything.tensors[0][kept[:20]])
    assert y.tolist() == everything.tensors[1][kept[:20]].tolist()


def test_a_plan_needs_the_number_of_samples(first):
    command = ["plan", "quick", f"data.without={first}"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "expected --samples with data.without = " in refused.stderr
    shown = CliRunner().invoke(app, [*command, "--samples", "1024", "--json"])
    assert json.loads(shown.stdout)["num_samples"] == 1024


def compared(folder):
    lines = []
    compare(
        recipe("pruning.policy=adaptive", "pruning.save=0.3"),
        folder,
        title="second",
        arms=["second", "watched"],
        seeds=2,
        jobs=2,
        on_progress=lambda line, done, total: lines.append(line),
    )
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory, fast_spawn):
    folder = tmp_path_factory.mktemp("compared") / "compared"
    assert len(compared(folder)) == 4
    return folder


@pytest.mark.usefixtures("fast_spawn")
def test_compare_trains_the_first_one_and_then_the_second_of_each_seed(comparison, tmp_path):
    runs = {run.path.name: run for run in read_runs([comparison])}
    for number in (0, 1):
        first, again = runs[f"watched-{number}"], runs[f"second-{number}"]
        assert again.recipe["data"]["without"] == str(first.path)
        assert first.summary.seed == again.summary.seed
        assert again.summary.train_samples == len(kept_by(first.path))
    # Nothing is trained again, also if the comparison has moved.
    shutil.copytree(comparison, tmp_path / "moved")
    assert compared(tmp_path / "moved") == []


def test_the_report_shows_the_cost_of_both(comparison, tmp_path):
    result = CliRunner().invoke(app, ["report", str(comparison), "--out", str(tmp_path / "r.html")])
    assert result.exit_code == 0, result.output
    both = sum(run.summary.samples_trained for run in read_runs([comparison])) // 2
    assert re.search(rf"with\s+the\s+first\s+training:\s+{both:,}\s+sample-steps", result.stdout)
    page = (tmp_path / "r.html").read_text()
    assert f"<td>{both:,}</td>" in page
    assert "sample-steps of both" in page
    shown = CliRunner().invoke(app, ["inspect", str(comparison), "--out", str(tmp_path / "i.html")])
    assert shown.exit_code == 0, shown.output
