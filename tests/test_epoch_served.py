"""Recipes trained with parameter servers have the results of one process and resume exactly."""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from logged_events import on_events

import fineprune as fp
from fineprune.errors import InputError, Stopped
from fineprune.training.own_code import code_digest
from fineprune.training.recipe import Recipe, read_recipe
from fineprune.training.recipe_replica import RecipeReplica
from fineprune.training.trainer import train

pytest.importorskip("ray")

from fineprune.distributed.parameter_servers.processes import EventKind, ProcessKind
from fineprune.distributed.parameter_servers.training import Training
from fineprune.distributed.strategy import Strategy
from fineprune.errors import RayLost


def recipe(epochs=4, batch_size=64, run=None, **distributed):
    """Return a recipe for the digits, with windows of four epochs, two of which are pruned."""
    settings = {
        "data": {"name": "digits", "train_size": 512},
        "training": {
            "epochs": epochs,
            "batch_size": batch_size,
            "lr": 0.02,
            "milestones": (),
            "evaluate_every": 2,
            "evaluate_last": 1,
        },
        "pruning": {"policy": "fine-pruning", "window": 4, "start": 2, "prune": 128, "block": 1},
        "run": {
            "threads": 1,
            "device": "cpu",
            "precision": "float32",
            "checkpoint_every": 1,
            **(run or {}),
        },
        "distributed": distributed,
    }
    result = Recipe()
    for section, values in settings.items():
        result = result.replaced(section, **values)
    return result


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    model = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    return torch.cat([tensor.flatten() for tensor in model.values()])


def learned(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["pruner"]["learned"]


def watch_of(folder):
    state = torch.load(folder / "checkpoint.pt", weights_only=True)["pruner"]["watch"]
    watch = fp.LabelWatch(512, 10)
    watch.load_state_dict(state)
    return watch


def counts(folder):
    return [np.load(path) for path in sorted((folder / "counts").iterdir())]


@pytest.mark.usefixtures("running_ray")
@pytest.mark.parametrize(
    "pruning",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"policy": "adaptive", "save": 0.3, "first_epoch": 1},
        # It weights the losses.
        pytest.param({"policy": "infobatch", "prune": 0.5, "anneal": 0.0}, marks=pytest.mark.long),
    ],
    ids=["fine-pruning", "adaptive", "infobatch"],
)
def test_one_asynchronous_worker_gives_the_same_bits_as_one_process(tmp_path, pruning):
    train(recipe().replaced("pruning", **pruning), tmp_path / "alone")
    served_recipe = recipe(strategy="async", workers=1, servers=2).replaced("pruning", **pruning)
    train(served_recipe, tmp_path / "served")
    assert torch.equal(weights(tmp_path / "served"), weights(tmp_path / "alone"))
    served_policy, alone_policy = (learned(tmp_path / name) for name in ("served", "alone"))
    torch.testing.assert_close(served_policy, alone_policy, rtol=0, atol=0)
    for served, alone in zip(
        metrics(tmp_path / "served"), metrics(tmp_path / "alone"), strict=True
    ):
        for name in ("samples", "skipped", "pruned", "steps", "test_accuracy", "test_loss"):
            assert served[name] == alone[name]
    for served, alone in zip(
        watch_of(tmp_path / "served").suspects(),
        watch_of(tmp_path / "alone").suspects(),
        strict=True,
    ):
        assert torch.equal(served, alone)
    assert any(epoch["pruned"] for epoch in metrics(tmp_path / "served"))


@pytest.mark.usefixtures("running_ray")
def test_servers_fine_tune_pretrained_weights_like_one_process(tmp_path, monkeypatch):
    """The file is gone when the run is resumed, and its frozen weights are not on any server."""
    monkeypatch.chdir(tmp_path)
    train(recipe(epochs=1), tmp_path / "pretrained")
    (tmp_path / "pretrained/checkpoint.pt").rename("weights.pt")

    def tuned(**distributed):
        made = recipe(run={"seed": 3}, **distributed)
        return made.replaced("network", weights="weights.pt", freeze=("features.0",))

    def stop(line):
        if line["epoch"] == 1:
            raise KeyboardInterrupt

    train(tuned(), tmp_path / "alone")
    served = tuned(strategy="async", workers=1, servers=2)
    with pytest.raises(KeyboardInterrupt):
        train(served, tmp_path / "served", on_epoch=stop)
    first = torch.load("weights.pt", weights_only=True)["model"]["features.0.weight"]
    (tmp_path / "weights.pt").unlink()
    train(served, tmp_path / "served", resume=True)
    assert torch.equal(weights(tmp_path / "served"), weights(tmp_path / "alone"))
    saved = torch.load(tmp_path / "served/checkpoint.pt", weights_only=True)["model"]
    assert torch.equal(saved["features.0.weight"], first)


@pytest.mark.usefixtures("running_ray")
@pytest.mark.parametrize(
    ("distributed", "pruning"),
    [
        ({"strategy": "sync", "workers": 2, "servers": 2, "placement": "dedicated"}, {}),
        (
            {"strategy": "mixed", "workers": 2, "group": 2},
            {"policy": "infobatch", "prune": 0.0, "anneal": 0.0},
        ),
    ],
    ids=["sync", "mixed-with-weights"],
)
def test_two_workers_train_like_one_process_with_twice_the_batch_size(
    tmp_path, distributed, pruning
):
    train(recipe(batch_size=128).replaced("pruning", **pruning), tmp_path / "alone")
    train(recipe(**distributed).replaced("pruning", **pruning), tmp_path / "served")
    torch.testing.assert_close(
        weights(tmp_path / "served"), weights(tmp_path / "alone"), rtol=1e-3, atol=1e-4
    )
    for served, alone in zip(
        metrics(tmp_path / "served"), metrics(tmp_path / "alone"), strict=True
    ):
        assert served["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-4)
        assert served["samples"] == alone["samples"]
        assert len(served["distributed"]["staleness"]) == 1
    summary = json.loads((tmp_path / "served/summary.json").read_text())
    assert summary["ranks"] == 2


@pytest.fixture(scope="module")
def synchronous(running_ray, tmp_path_factory):
    """A recipe, and the folder of its undisturbed run."""
    served = recipe(strategy="sync", workers=2, servers=2)
    folder = tmp_path_factory.mktemp("served") / "whole"
    train(served, folder)
    return served, folder


def at_version(version, react):
    """Return a context in which a function is called when the parameters get this version."""

    def note(event):
        if event.kind is EventKind.UPDATED and event.version == version:
            react()

    return on_events(note, logging.DEBUG)


def at_the_first_start(react):
    """Return a context in which a function is called when the first process has started."""
    done: list[Any] = []

    def note(event):
        if event.kind is EventKind.STARTED and not done:
            done.append(event)
            react()

    return on_events(note)


@contextlib.contextmanager
def process_ids():
    """Yield the process ID of the last process of each kind that started."""
    pids = {}

    def note(event):
        if event.kind in (EventKind.STARTED, EventKind.RESTARTED):
            pids[event.process] = event.pid

    with on_events(note):
        yield pids


def test_a_run_stopped_inside_an_epoch_gives_the_same_bits_after_resuming(synchronous, tmp_path):
    served, undisturbed = synchronous
    terminate = functools.partial(signal.raise_signal, signal.SIGTERM)
    # Epochs have 4, 4, 3 and 3 updates.
    with (
        at_version(6, terminate),
        pytest.raises(Stopped, match=r"after update \d, and wrote a checkpoint$"),
    ):
        train(served, tmp_path / "parts")
    train(served, tmp_path / "parts", resume=True)
    assert torch.equal(weights(tmp_path / "parts"), weights(undisturbed))
    for part, whole in zip(counts(tmp_path / "parts"), counts(undisturbed), strict=True):
        assert np.array_equal(part, whole)
    for part, whole in zip(metrics(tmp_path / "parts"), metrics(undisturbed), strict=True):
        for name in ("train_loss", "samples", "steps", "lr", "test_accuracy"):
            assert part[name] == whole[name]


@pytest.mark.long
def test_a_stop_before_the_first_update_leaves_no_staleness(synchronous, tmp_path):
    served, undisturbed = synchronous

    def terminate(metrics):
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped):
        train(served, tmp_path / "parts", on_epoch=terminate)
    saved = torch.load(tmp_path / "parts/checkpoint.pt", weights_only=True)
    report = saved["epoch_so_far"]["distributed"]
    assert (report["staleness"], report["applied"]) == ([], 0)
    train(served, tmp_path / "parts", resume=True)
    assert torch.equal(weights(tmp_path / "parts"), weights(undisturbed))
    for part, whole in zip(metrics(tmp_path / "parts"), metrics(undisturbed), strict=True):
        assert part["distributed"]["staleness"] == whole["distributed"]["staleness"]


def test_what_each_worker_did_is_in_the_metrics(synchronous):
    _, undisturbed = synchronous
    for line in metrics(undisturbed):
        report = line["distributed"]
        assert len(report["workers"]) == 2
        assert sum(worker["samples"] for worker in report["workers"]) == line["samples"]
        for worker in report["workers"]:
            assert worker["staleness"][0] > 0
            assert {"data", "compute", "pull", "wait"} <= set(worker["seconds"])
        assert [set(server) for server in report["servers"]] == [{"apply"}] * 2
        both = sum(worker["seconds"]["compute"] for worker in report["workers"])
        assert report["seconds"]["compute"] == pytest.approx(both)


@pytest.mark.usefixtures("running_ray")
def test_the_rate_of_synchronous_workers_follows_the_updates(tmp_path):
    """Seven batches of two workers are four updates, the last of which has one batch."""

    def cosine(**settings):
        made = recipe(**settings).replaced("data", train_size=7 * 64)
        made = made.replaced("training", schedule="cosine", gamma=None)
        return made.replaced("pruning", policy="full")

    train(cosine(batch_size=128), tmp_path / "alone")
    train(cosine(strategy="sync", workers=2), tmp_path / "served")
    torch.testing.assert_close(
        weights(tmp_path / "served"), weights(tmp_path / "alone"), rtol=1e-4, atol=1e-6
    )
    both = zip(metrics(tmp_path / "served"), metrics(tmp_path / "alone"), strict=True)
    for served, alone in both:
        assert (served["lr"], served["steps"]) == (alone["lr"], alone["steps"])


def dropping(**distributed):
    made = recipe(epochs=3, **distributed)
    return made.replaced("network", name="dropping_network:dropping_network")


@pytest.mark.usefixtures("running_ray")
def test_one_asynchronous_worker_drops_the_same_units_as_one_process(tmp_path):
    train(dropping(), tmp_path / "alone")
    train(dropping(strategy="async", workers=1), tmp_path / "served")
    assert torch.equal(weights(tmp_path / "served"), weights(tmp_path / "alone"))


@pytest.mark.long
@pytest.mark.usefixtures("running_ray")
def test_dropout_goes_on_after_a_resume(tmp_path):
    served = dropping(strategy="sync", workers=2)
    train(served, tmp_path / "whole")
    terminate = functools.partial(signal.raise_signal, signal.SIGTERM)
    with at_version(6, terminate), pytest.raises(Stopped):  # in the second epoch
        train(served, tmp_path / "parts")
    train(served, tmp_path / "parts", resume=True)
    assert torch.equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


@pytest.mark.usefixtures("running_ray")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_users_dataset_is_loaded_as_in_one_process(workers, tmp_path):
    """Its transforms draw from the generators of torch, NumPy and Python, and the network too."""

    def own(**distributed):
        made = dropping(**distributed).replaced("pruning", prune=32)
        name = "test_own_data:noisy"
        return made.replaced("data", name=name, train_size=None, workers=workers)

    train(own(), tmp_path / "alone")
    train(own(strategy="async", workers=1), tmp_path / "served")
    assert torch.equal(weights(tmp_path / "served"), weights(tmp_path / "alone"))


@pytest.mark.long
def test_a_signal_stops_a_run_while_its_processes_start(synchronous, tmp_path):
    served, undisturbed = synchronous
    terminate = functools.partial(signal.raise_signal, signal.SIGTERM)
    with at_the_first_start(terminate), pytest.raises(Stopped, match="before the first epoch"):
        train(served, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(served, tmp_path / "run", resume=True)
    assert torch.equal(weights(tmp_path / "run"), weights(undisturbed))


@pytest.mark.usefixtures("running_ray")
def test_a_request_to_stop_that_ends_ray_too_is_what_is_reported(tmp_path, monkeypatch):
    def lose(*arguments, **settings):
        signal.raise_signal(signal.SIGTERM)
        raise RayLost("Ray's process raylet ended with status 0")

    monkeypatch.setattr(Training, "run_epoch", lose)
    with pytest.raises(Stopped, match="by SIGTERM together with its Ray, without another"):
        train(recipe(strategy="sync"), tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("running_ray")
def test_deaths_between_two_epochs_are_counted(tmp_path, monkeypatch):
    """That of a worker is noticed by a checkpoint, that of a server by the next update."""
    calls: Counter[str] = Counter()
    kills = {
        ("load_into", 1): ProcessKind.SERVER,
        ("state", 2): ProcessKind.WORKER,
        ("load_into", 4): ProcessKind.SERVER,  # after the last epoch, which needs no server
    }
    with process_ids() as pids:

        def kill_before(name):
            method = getattr(Training, name)

            def killing(training, *arguments):
                calls[name] += 1
                if kind := kills.get((name, calls[name])):
                    os.kill(pids[kind], signal.SIGKILL)
                return method(training, *arguments)

            monkeypatch.setattr(Training, name, killing)

        kill_before("load_into")
        kill_before("state")
        train(recipe(strategy="async", workers=1), tmp_path)
    reports = [line["distributed"] for line in metrics(tmp_path)]
    assert [report["server_deaths"] for report in reports] == [0, 1, 0, 0]
    assert [report["worker_deaths"] for report in reports] == [0, 0, 1, 0]
    assert [report["undone"] > 0 for report in reports] == [False, True, False, False]


@pytest.mark.usefixtures("running_ray")
def test_resuming_with_another_number_of_servers_is_refused(tmp_path):
    train(recipe(epochs=1, strategy="async", workers=1), tmp_path)
    with pytest.raises(ValueError, match="expected a checkpoint of this recipe"):
        train(recipe(epochs=1, strategy="async", workers=1, servers=2), tmp_path, resume=True)


@pytest.mark.usefixtures("running_ray")
def test_more_servers_than_parameters_are_refused(tmp_path):
    with pytest.raises(ValueError, match="servers"):
        train(recipe(strategy="async", workers=1, servers=100_000_000), tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"strategy": "sinc"}, "expected distributed.strategy to be one of"),
        ({"strategy": "sync", "workers": 2, "backup": 2}, "distributed.backup below .* got 2 of 2"),
        ({"strategy": "mixed", "workers": 3, "group": 2}, "to be a multiple of distributed.group"),
        ({"strategy": "async", "workers": 2, "group": 2}, "with strategy mixed only, .*'async'"),
        ({"strategy": "async", "backup": 1}, "distributed.backup with strategy sync"),
        ({"strategy": "sync", "staleness_bound": 1}, "distributed.staleness_bound with strategy"),
        ({"strategy": "sync", "rate_by_staleness": True}, "distributed.rate_by_staleness with"),
        ({"strategy": "sync", "simulate": 2}, "distributed.simulate with strategy none"),
        ({"strategy": "sync", "workers": 0}, "distributed.workers"),
        ({"strategy": "sync", "servers": 0}, "distributed.servers"),
        ({"strategy": "async", "staleness_bound": -1}, "distributed.staleness_bound"),
        ({"strategy": "sync", "gradients": "int8"}, "expected distributed.gradients to be one of"),
        ({"strategy": "sync", "placement": "here"}, "expected distributed.placement to be one of"),
    ],
)
def test_incompatible_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        recipe(**wrong)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"workers": 8, "gradients": "bfloat16"},
            "distributed.workers, distributed.gradients; set",
        ),
        ({"workers": 8, "simulate": 4}, "workers; distributed.simulate is the number of"),
        ({"workers": 8, "strategy": "sync"}, None),
        ({}, None),
    ],
)
def test_settings_of_servers_without_servers_have_no_effect(settings, said):
    told = Strategy(**settings).without_effect
    assert (told is None) if said is None else (said in str(told))


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("training", "accumulation", 2),
        ("training", "drop_last", True),
        ("run", "checkpoint_steps", 5),
        ("run", "compile", "on"),
        ("run", "device", "cuda:1"),
    ],
)
def test_settings_that_servers_do_not_support_are_refused(section, name, value):
    with pytest.raises(ValueError, match=rf"{section}\.{name} .* with distributed.strategy 'sync'"):
        recipe(strategy="sync").replaced(section, **{name: value})


def test_parameter_servers_under_torchrun_are_refused(tmp_path, monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="'sync' without torchrun, got 2 processes"):
        train(recipe(strategy="sync"), tmp_path)


def test_cores_are_shared_by_the_workers(monkeypatch):
    from fineprune.training import hardware

    monkeypatch.setattr(hardware, "available_cores", lambda: 8)
    served = recipe(strategy="sync", workers=3, run={"threads": 0})
    assert hardware.resolved(served).run.threads == 2
    alone = dataclasses.replace(served, distributed=recipe().distributed)
    assert hardware.resolved(alone).run.threads == 8


@pytest.mark.parametrize(
    ("distributed", "training", "said"),
    [
        ({"strategy": "async"}, {}, "a momentum of 0.9 with 2 asynchronous workers"),
        ({"strategy": "mixed", "workers": 4, "group": 2}, {}, "with 2 asynchronous workers"),
        ({"simulate": 3}, {"momentum": 0.8}, "a momentum of 0.8 with 3 asynchronous workers"),
        ({"strategy": "async"}, {"momentum": 0.7, "nesterov": False}, None),
        ({"strategy": "async"}, {"optimizer": "adam", "momentum": None}, None),
        ({"strategy": "async", "workers": 1}, {}, None),
        ({"strategy": "sync"}, {}, None),
        ({"simulate": 4, "simulate_as": "sync"}, {}, None),
        ({}, {}, None),
    ],
)
def test_stale_gradients_with_a_high_momentum_are_warned_of(distributed, training, said):
    told = recipe(**distributed).replaced("training", **training).stale_momentum
    assert (told is None) if said is None else (said in told)


def test_the_recipe_for_trials_of_strategies_is_fair():
    made = read_recipe(Path("strategies"))
    assert (made.training.optimizer, made.training.momentum) == ("rmsprop-tf", 0.0)
    assert made.pruning.policy == "full"
    assert made.replaced("distributed", strategy="async").stale_momentum is None


def test_a_worker_that_finds_another_source_of_the_network_is_refused(tmp_path, monkeypatch):
    """The file was changed after the run began."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "changing_network.py"
    file.write_text("from dropping_network import dropping_network\n")
    made = recipe().replaced("network", name="changing_network:dropping_network")
    began = made.replaced("run", code=code_digest(made))
    RecipeReplica(began, 0)
    file.write_text(f"{file.read_text()}# another one\n")
    with pytest.raises(InputError, match="expected the code"):
        RecipeReplica(began, 0)
