"""Evaluation: the accuracies of a classifier, and the mode that it is left in."""

import pytest
import torch
from resuming import small_recipe
from torch import nn

from fineprune.runs.files import read_metrics
from fineprune.runs.run import read_run
from fineprune.training.evaluate import evaluate
from fineprune.training.network import precision
from fineprune.training.settings import RunSettings
from fineprune.training.trainer import train

AUTOCAST = precision(RunSettings(device="cpu", precision="float32"))


def batches(classes, samples=64, size=24):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, classes, generator=generator)
    y = torch.randint(0, classes, (samples,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.mark.parametrize("classes", [11, 40])
def test_top5_counts_the_labels_among_the_five_largest_logits(classes):
    model = nn.Identity().train()
    evaluation = evaluate(model, batches(classes), "cpu", AUTOCAST, classes)
    x, y = (torch.cat(parts) for parts in zip(*batches(classes), strict=True))
    place = [
        row.argsort(descending=True).tolist().index(label) for row, label in zip(x, y, strict=True)
    ]
    assert evaluation.top5 == sum(rank < 5 for rank in place) / len(place)
    assert evaluation.accuracy == sum(rank == 0 for rank in place) / len(place)
    assert evaluation.top5 is not None
    assert 0 < evaluation.accuracy < evaluation.top5 < 1
    assert model.training


def test_with_ten_classes_there_is_no_top5():
    assert evaluate(nn.Identity(), batches(10), "cpu", AUTOCAST, 10).top5 is None


@pytest.mark.parametrize("classes", [10, 11])
def test_a_sample_with_nan_among_its_logits_is_not_right(classes):
    made = batches(classes)
    expected = evaluate(nn.Identity(), made, "cpu", AUTOCAST, classes)
    for x, y in made:
        right = x.argmax(1) == y
        x[:, 0].masked_fill_(right, torch.nan)
        y.masked_fill_(right, 0)  # NaN is taken for the largest.
    found = evaluate(nn.Identity(), made, "cpu", AUTOCAST, classes)
    assert expected.accuracy > found.accuracy == 0
    assert int((found.predictions == -1).sum()) == round(64 * expected.accuracy)
    assert (found.top5 is None) == (classes == 10)
    if found.top5 is not None and expected.top5 is not None:
        assert found.top5 == pytest.approx(expected.top5 - expected.accuracy)


@pytest.mark.parametrize(("classes", "validation"), [(10, 0), (12, 0), (12, 24)])
def test_a_run_says_its_top5_if_it_has_more_than_ten_classes(classes, validation, tmp_path):
    data = {"name": "synthetic", "train_size": 96, "validation": validation}
    settings = ("training.epochs=2", "training.batch_size=24", "pruning.policy=full")
    network = {"name": "resnet18", "classes": classes}
    summary = train(small_recipe(*settings, data=data, network=network), tmp_path / "run")
    name = "validation_top5" if validation else "test_top5"
    first, last = read_metrics(tmp_path / "run/metrics.jsonl")
    assert not {"test_top5", "validation_top5"} & set(first)
    assert {key for key in last if "top5" in key} == ({name} if classes > 10 else set())
    assert summary.top5_last == last.get(name)
    if classes > 10:
        assert summary.accuracy_last <= (summary.top5_last or 0) <= 1
    assert read_run(tmp_path / "run").summary == summary
