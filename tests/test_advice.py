"""Which means of saving the advice names, what they cost, and where its figures come from."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fineprune.labels.advice import FullCost, advice_of_losses
from typer.testing import CliRunner

import fineprune as fp
from fineprune.cli.main import app
from fineprune.training.loop import train
from fineprune.training.recipe import make_recipe

RESULTS = Path(__file__).parents[1] / "docs/results"
N, CLASSES, EPOCHS = 600, 3, 20
COST = FullCost(30, 2340, 600.0)
SKIP = "Best here, judging by our measurements: skip the samples that contradict"


def watch_with(wrong, *, visits=EPOCHS, strength=6.0, wavering=0.0, lost=0):
    """Return the evidence of a network that knows the true classes, with a share of wrong ones.

    For the first samples, the share ``wavering``, it gives the wrong label in every third visit. In
    the first visits, ``lost`` of them, it gives neither the label nor the true class.
    """
    true = torch.arange(N) % CLASSES
    labels = torch.where(torch.arange(N) < wrong * N, (true + 1) % CLASSES, true)
    watch = fp.LabelWatch(N, CLASSES)
    for visit in range(visits):
        misled = (torch.arange(N) < wavering * N) & (visit % 3 == 1)
        seeming = torch.where(misled, labels, true)
        if visit < lost:
            seeming = (true + 2) % CLASSES
        watch.record(torch.arange(N), strength * F.one_hot(seeming, CLASSES), labels)
    return watch


@pytest.mark.parametrize(
    ("wrong", "best"),
    [
        (0.0, "Best here, judging by our measurements: the shorter schedule"),
        (0.1, "Such a share of wrong labels was not measured"),
        (0.3, SKIP),
    ],
)
def test_the_share_of_wrong_labels_decides(wrong, best):
    said = watch_with(wrong).advice(cost=COST)
    chosen = [line for line in said if line.startswith(("Best here", "Such a share"))]
    assert len(chosen) == 1
    assert chosen[0].startswith(best)


def test_without_losses_near_zero_it_counts_that_most_samples_are_answered_as_labelled():
    """As in a network that is uncertain, because many labels are wrong."""
    said = watch_with(0.3, strength=1.5).advice()
    assert any(line.startswith("0% of the samples were learned") for line in said)
    assert any("skip the samples that contradict" in line for line in said)


@pytest.mark.parametrize(("lost", "little"), [(5, False), (7, True)])
def test_with_most_labels_wrong_it_counts_that_the_others_are_answered_as_labelled(lost, little):
    """In more than 70 % of 20 visits. Few samples can be answered as they are labelled."""
    said = watch_with(0.6, strength=1.5, lost=lost).advice()
    answers = "for only 40% of the samples, it predicts the given label"
    assert any(answers in line for line in said) == little
    assert said[-1].startswith("It is too early") == little
    assert any(SKIP in line for line in said) != little


def test_a_network_that_answers_all_as_labelled_may_have_learned_mistakes_by_heart():
    by_heart = "The network predicts the given label for 100% of the samples. If labels are wrong"
    assert any(line.startswith(by_heart) for line in watch_with(0.0).advice())
    assert not any("it has memorised them" in line for line in watch_with(0.1).advice())


@pytest.mark.parametrize(
    ("visits", "wavering", "unclear", "best"),
    [
        (15, 0.1, 60, SKIP),
        (15, 0.2, 120, "Such a share of wrong labels was not measured"),
        (15, 0.27, 180, "Best here, judging by our measurements: the shorter schedule"),
        (EPOCHS, 0.1, 0, SKIP),
    ],
)
def test_suspects_over_which_an_early_network_wavers_do_not_count(visits, wavering, unclear, best):
    said = watch_with(0.3, visits=visits, wavering=wavering).advice()
    assert any("1.1 to 2.4 times the true number" in line for line in said) == (visits < EPOCHS)
    assert any(best in line for line in said)
    assert any("without_suspects" in line for line in said) == (best == SKIP)
    told = [line.split()[0] for line in said if "of the suspects are not clear" in line]
    assert told == ([str(unclear)] if unclear else [])


def test_suspects_of_classes_that_were_not_learned_do_not_decide_on_the_means():
    """All of a class look wrong to a network that does not know it, a sixth of the samples."""
    labels = torch.arange(N) % CLASSES
    labels[labels == 2] *= torch.arange(N)[labels == 2] % 2
    logits = 6.0 * F.one_hot(labels, CLASSES)
    logits[labels == 2] = torch.tensor([6.0, 0.0, 0.0])
    watch = fp.LabelWatch(N, CLASSES)
    for _ in range(EPOCHS):
        watch.record(torch.arange(N), logits, labels)
    said = watch.advice()
    assert "are in classes that the network has not learned (2)" in " ".join(said)
    assert any(
        line.startswith("Best here, judging by our measurements: the shorter") for line in said
    )
    assert not any("without_suspects" in line for line in said)


def test_an_early_estimate_is_no_sign_of_correct_labels():
    for visits in (15, EPOCHS):
        said = watch_with(0.1, visits=visits).advice()
        assert any(line.startswith("Such a share of wrong labels was not") for line in said)


def test_a_second_training_is_named_if_many_labels_are_wrong():
    said = [" ".join(watch_with(wrong).advice()) for wrong in (0.1, 0.3)]
    assert ["without_suspects" in text for text in said] == [False, True]


def test_each_means_is_named_with_its_cost():
    said = "\n".join(watch_with(0.3).advice(cost=COST))
    assert "20 of 30 epochs, 67% of the steps (1,560 of 2,340)" in said
    assert "at best 400 of 600 s" in said
    assert said.count("65% of the steps (1,521 of 2,340)") == 2
    assert "fp.shorter(rates, save=0.35): 65% of the steps." in "\n".join(watch_with(0.3).advice())


@pytest.mark.parametrize("arguments", [{"visits": 3}, {"strength": 0.0}])
def test_early_or_without_learned_samples_no_means_is_named(arguments):
    said = watch_with(0.3, **arguments).advice(cost=COST)
    assert said[-1].startswith("It is too early to say which way")
    assert not any("fp." in line for line in said)


def test_samples_that_were_never_recorded_are_counted():
    watch = fp.LabelWatch(N, CLASSES)
    index = torch.arange(N - 191)  # A framework may hold out a part without saying so.
    watch.record(index, 6.0 * F.one_hot(index % CLASSES, CLASSES), index % CLASSES)
    said = "191 of 600 samples were never recorded with a label and a finite loss, so nothing is"
    assert said in " ".join(watch.advice())
    assert "never recorded" not in " ".join(watch_with(0.0).advice())


def test_every_measured_figure_is_in_the_results():
    pages = [
        " ".join((RESULTS / name).read_text(encoding="utf-8").split())
        for name in ("adaptive.md", "labels.md", "resnet9.md")
    ]
    said = [line for wrong in (0, 0.3) for line in watch_with(wrong).advice()]
    said += advice_of_losses(90, N, 5)
    figures = set(re.findall(r"-?\d\.\d\d ±\d\.\d\d|\d+\.\d %", " ".join(said)))
    assert len(figures) == 12
    for figure in figures:
        assert any(figure in page for page in pages), figure


def test_a_pruner_gives_the_advice_in_its_summary_and_records_on_undisturbed():
    labels = torch.arange(N) % CLASSES
    logits = 6.0 * F.one_hot(labels, CLASSES)

    def states(look):
        pruner = fp.Pruner(N, fp.FullData(EPOCHS), batch_size=50, seed=1)
        for _ in pruner.epochs():
            for index in pruner.sampler.order().split(50):
                losses = F.cross_entropy(logits[index], labels[index], reduction="none")
                pruner.record(index, losses, logits[index] + 0.1 * index[:, None], labels[index])
                if look and 7 in index:
                    json.dumps(pruner.summary())
        return pruner, pruner.state_dict()["watch"]["evidence"]["sums"]

    (pruner, looked), (_, undisturbed) = states(True), states(False)
    assert all(torch.equal(looked[name], undisturbed[name]) for name in looked)
    said = " ".join(pruner.summary()["advice"])
    assert "Best here, judging by our measurements: the shorter schedule" in said
    assert "13 of 20 epochs, 65% of the steps (156 of 240)" in said


def test_a_pruner_names_classes_as_its_data_set_does():
    class Pictures(list[int]):
        classes = ("cat", "dog")

    pruner = fp.Pruner(Pictures([0] * 90 + [1] * 110), fp.FullData(1), batch_size=50)
    labels = torch.arange(200) >= 90
    logits = 6.0 * F.one_hot((torch.arange(200) >= 100).long(), 2)
    for _ in pruner.epochs():
        for index in pruner.sampler.order().split(50):
            losses = F.cross_entropy(logits[index], labels[index].long(), reduction="none")
            pruner.record(index, losses, logits[index], labels[index].long())
    assert "dog that may be cat" in " ".join(pruner.summary()["advice"])


@pytest.mark.parametrize(("high", "best"), [(0, "the shorter schedule"), (90, "skip the samples")])
def test_adaptive_gives_advice_from_losses_alone(high, best):
    pruner = fp.Pruner(N, fp.Adaptive(6, save=0, patience=3, chance=1.0), batch_size=50)
    for epoch in pruner.epochs():
        if epoch < 3:
            assert pruner.summary()["advice"] == []
        for index in pruner.sampler.order().split(50):
            pruner.record(index, torch.where(index < high, 2.0, 0.5))
    said = " ".join(pruner.summary()["advice"])
    assert f"Best here, judging by our measurements: {best}" in said
    assert ("This applies to classifiers only." in said) == bool(high)
    if high:
        assert "90 of 600 samples (15.0%) stayed above chance" in said


def test_without_evidence_there_is_no_advice():
    pruner = fp.Pruner(N, fp.FullData(2), batch_size=50)
    assert pruner.summary()["advice"] == []


# -- fineprune plan RUN ----------------------------------------------------------------------------


def recipe(*changes):
    sections = {
        "data": {"name": "digits", "train_size": 128},
        "training": {"epochs": 2, "batch_size": 32},
        "run": {"device": "cpu", "threads": 1, "precision": "float32"},
    }
    return make_recipe(sections, changes)


def test_plan_gives_the_advice_for_a_finished_run(tmp_path):
    train(recipe(), tmp_path / "run")
    shown = CliRunner().invoke(app, ["plan", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    assert "of 128 labels" in shown.stdout
    assert "It is too early to say" in shown.stdout
    as_json = CliRunner().invoke(app, ["plan", str(tmp_path / "run"), "--json"])
    assert json.loads(as_json.stdout)["advice"] == shown.stdout.splitlines()
    for options in (["--save", "0.3"], ["--samples", "0"], ["training.epochs=3"]):
        result = CliRunner().invoke(app, ["plan", str(tmp_path / "run"), *options])
        assert result.exit_code == 2
        assert "expected the folder of a run without other options" in result.stderr


def test_plan_needs_a_finished_run_with_evidence(tmp_path):
    train(recipe("run.history=false"), tmp_path / "bare")
    (tmp_path / "empty").mkdir()
    for folder, message in (("bare", "a run with evidence.pt"), ("empty", "a finished run")):
        result = CliRunner().invoke(app, ["plan", str(tmp_path / folder)])
        assert result.exit_code == 2
        assert f"expected {message}" in result.stderr
        assert len(result.stderr.splitlines()) == 1
