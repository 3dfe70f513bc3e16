"""The facts that the evidence on the labels states, and the commands that show them."""

import json

import pytest
import torch
import torch.nn.functional as F
from commands import printed

import fineprune as fp
from fineprune.errors import InputError
from fineprune.inspection.inspected import facts_of_run
from fineprune.runs.comparison import Comparison, ListedRun, write_comparison
from fineprune.runs.run import read_run
from fineprune.training.recipe import make_recipe
from fineprune.training.trainer import train

N, CLASSES, EPOCHS = 600, 6, 20
NAMES = ["cat", "dog", "elk", "fox", "gnu", "hen"]


def watched(wrong, visits=10, answered=4.0):
    """Return a watch of a network that answers all samples right, some with wrong labels."""
    true = torch.arange(N) % CLASSES
    labels = torch.where(torch.arange(N) < wrong, (true + 1) % CLASSES, true)
    watch = fp.LabelWatch(N, CLASSES)
    for _ in range(visits):
        watch.record(torch.arange(N), answered * F.one_hot(true, CLASSES), labels)
    return watch


def test_they_say_how_many_labels_contradict_and_how_much_was_learned():
    watch = watched(60)
    first, second, third = watch.facts(NAMES)
    assert (
        first == "60 of 600 labels (10.0%) are suspected: they contradict what the network learned."
    )
    assert "predicts the given label for 90% of the samples, over 10 visits each" in second
    assert third.startswith("The most frequent suspected mistakes: ")
    assert third.count("that may be") == 3
    assert "dog that may be cat (10)" in third or "cat that may be hen (10)" in third
    assert (
        watch.ranking().num_suspects
        == 60
        == int(watch.ranking().joint.sum() - watch.ranking().joint.trace())
    )


def test_they_name_classes_that_were_not_learned_and_samples_that_were_not_recorded():
    labels = torch.arange(N) % CLASSES
    logits = 4.0 * F.one_hot(labels.masked_fill(labels == 5, 0), CLASSES)
    watch = fp.LabelWatch(N + 3, CLASSES)
    watch.record(torch.arange(N), logits, labels)
    said = " ".join(watch.facts(NAMES))
    assert "less than half of the samples of some classes: hen." in said
    assert "3 of 603 samples were never recorded" in said


def test_a_network_that_has_learned_nothing_is_told_to_train_longer():
    watch = fp.LabelWatch(N, CLASSES)
    logits = torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(0))
    watch.record(torch.arange(N), logits, torch.arange(N) % CLASSES)
    first, *_ = watch.facts()
    assert first.startswith("The network has hardly learned these labels")
    assert "train longer" in first
    assert not any("hardly learned these labels" in fact for fact in watched(60).facts())


def test_without_a_suspect_no_pair_of_classes_is_named():
    assert [fact for fact in watched(0).facts() if "mistakes" in fact] == []
    with pytest.raises(InputError, match=r"expected the names of 6 classes, .* got 1"):
        watched(0).facts(["cat"])


# -- fineprune plan RUN ----------------------------------------------------------------------------


def recipe(*changes):
    sections = {
        "data": {"name": "digits", "train_size": 128},
        "training": {"epochs": 2, "batch_size": 32},
        "run": {"device": "cpu", "threads": 1, "precision": "float32"},
    }
    return make_recipe(sections, changes)


def test_plan_gives_them_for_a_finished_run(tmp_path):
    train(recipe(), tmp_path / "run")
    shown = printed("plan", tmp_path / "run")
    assert "of 128 labels" in shown
    (told,) = json.loads(printed("plan", tmp_path / "run", "--json"))
    assert told == {"run": str(tmp_path / "run"), "facts": shown.splitlines()}


def test_plan_gives_them_for_the_runs_of_a_comparison_that_kept_evidence(tmp_path):
    names = ("full-0", "watched-0")
    for name, history in zip(names, ("false", "true"), strict=True):
        train(recipe(f"run.history={history}"), tmp_path / name)
    runs = tuple(ListedRun(arm=name[:-2], seed=0, path=name) for name in names)
    write_comparison(tmp_path, Comparison(title="c", sha256={}, arms=(), runs=runs))
    shown = printed("plan", tmp_path)
    assert shown.splitlines() == facts_of_run(read_run(tmp_path / "watched-0"))
