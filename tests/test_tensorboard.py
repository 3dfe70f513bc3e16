"""``run.tensorboard`` writes each epoch once into an event file, or says what is missing."""

import sys
from pathlib import Path

import pytest

from fineprune.errors import InputError
from fineprune.runs.files import read_metrics
from fineprune.runs.folder import RunFolder
from fineprune.training.recipe import read_recipe
from fineprune.training.tensorboard import event_file
from fineprune.training.trainer import train

RECIPE = Path(__file__).parents[1] / "recipes/quick.toml"
TENSORBOARD = ["run.tensorboard=true", "training.epochs=4", "training.milestones=[2]"]


def test_a_missing_package_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'fineprune\[tensorboard\]'"):
        train(read_recipe(RECIPE, TENSORBOARD), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_event_file_holds_each_epoch_once_also_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(read_recipe(RECIPE, TENSORBOARD), tmp_path)
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert len(metrics) == 4
    num_samples = metrics[0]["samples"] + metrics[0]["skipped"]
    for resumed in (False, True):
        if resumed:
            with event_file(RunFolder(tmp_path), num_samples):
                pass
        assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
        events = EventAccumulator(str(tmp_path)).Reload()
        losses = [(event.step, event.value) for event in events.Scalars("train_loss")]
        assert losses == [
            (number, pytest.approx(epoch["train_loss"])) for number, epoch in enumerate(metrics, 1)
        ]
        saved = sum(epoch["skipped"] for epoch in metrics) / (4 * num_samples)
        assert events.Scalars("saved")[-1].value == pytest.approx(saved)
