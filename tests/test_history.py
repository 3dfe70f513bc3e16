"""The history of a run: one loss per sample and epoch."""

import itertools
import re
import shutil

import numpy as np
import pytest
import torch
from resuming import train_until

from fineprune.distributed.all_reduce import RankGroup
from fineprune.errors import InputError
from fineprune.runs.history import read_evidence, read_history
from fineprune.runs.run import read_run
from fineprune.training.epoch_totals import PARTS, EpochTotals
from fineprune.training.recipe import make_recipe
from fineprune.training.trainer import train

RECIPE = {
    "data": {"name": "digits", "train_size": 200},
    "training": {"epochs": 4, "batch_size": 8, "lr": 0.05, "evaluate_every": 4},
    "pruning": {"policy": "fine-pruning", "window": 4, "start": 2, "block": 1, "prune": 0.36},
    "run": {"device": "cpu", "threads": 1, "precision": "float32", "compile": "off"},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history") / "whole"
    train(make_recipe(RECIPE), folder)
    return folder


def test_each_epoch_has_the_losses_of_the_samples_that_it_trained(whole):
    history = read_history(whole, 200)
    assert history.epochs == [0, 1, 2, 3]
    for losses, line in zip(history.losses, read_run(whole).metrics, strict=True):
        trained = ~np.isnan(losses)
        assert trained.sum() == line["samples"] == 200 - line["skipped"]
        mean = losses[trained].astype(np.float64).mean()
        assert mean == pytest.approx(line["train_loss"], rel=1e-3)
    assert (~history.trained).any()


def test_a_run_stopped_inside_an_epoch_has_the_same_history(whole, tmp_path, monkeypatch):
    recipe = make_recipe(RECIPE, ["run.checkpoint_steps=10"])
    saved = itertools.count(1)
    train_until(lambda state: next(saved) == 4, recipe, tmp_path / "run", monkeypatch)
    assert len(list((tmp_path / "run" / "history").glob("epoch-*.npy"))) == 1
    train(recipe, tmp_path / "run", resume=True)
    for file in sorted((whole / "history").iterdir()):
        assert (tmp_path / "run" / "history" / file.name).read_bytes() == file.read_bytes()


def test_no_history_is_kept_if_the_recipe_turns_it_off(tmp_path, whole):
    train(make_recipe(RECIPE, ["run.history=false"]), tmp_path / "run")
    assert not (tmp_path / "run" / "history").exists()
    assert read_history(tmp_path / "run", 200) is None
    metrics = [
        [{k: v for k, v in line.items() if "seconds" not in k} for line in read_run(run).metrics]
        for run in (tmp_path / "run", whole)
    ]
    assert metrics[0] == metrics[1]


def test_losses_that_are_not_finite_or_too_large_are_infinite():
    totals = EpochTotals(torch.zeros(PARTS), torch.full((4,), -torch.inf, dtype=torch.float16))
    totals.add(torch.tensor([2, 0, 3]), torch.tensor([1.0, torch.nan, 1e6]), 1)
    stored = totals.merged_history(RankGroup(0, 1))
    assert stored.tolist() == [torch.inf, -torch.inf, 1.0, torch.inf]


@pytest.mark.parametrize("content", [b"no array", None])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "history").mkdir()
    file = tmp_path / "history" / "epoch-0001.npy"
    if content is None:
        np.save(file, np.zeros(5))
    else:
        file.write_bytes(content)
    with pytest.raises(InputError, match=r"epoch-0001\.npy"):
        read_history(tmp_path, 200)


@pytest.mark.parametrize("content", [b"no archive", None])
def test_damaged_evidence_is_refused_without_advice_to_run_its_code(tmp_path, content):
    file = tmp_path / "history" / "evidence.pt"
    file.parent.mkdir()
    if content is None:
        torch.save({"num_classes": InputError}, file)
    else:
        file.write_bytes(content)
    with pytest.raises(InputError, match="evidence on 200 labels") as error:
        read_evidence(tmp_path, 200)
    assert not re.search("weights.only|options", str(error.value))


def test_a_history_without_one_of_its_epochs_is_refused(whole, tmp_path):
    """The others would be taken for other epochs."""
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "history/epoch-0002.npy").unlink()
    with pytest.raises(InputError, match=r"got only those of the epochs 1, 3, .*: restore the oth"):
        read_history(folder, 200)
