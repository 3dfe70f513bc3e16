"""Data parallelism by all-reduce: two ranks train like one process with twice the batch size."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo_group import free_port, gloo_group, launched
from resuming import Stop, checkpoint_number, small_recipe, train_until
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import fineprune as fp
from fineprune.distributed.all_reduce import RankGroup, joined
from fineprune.errors import InputError, RunError
from fineprune.runs.files import read_metrics
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.trainer import Trainer, train

N, EPOCHS = 96, 6
POLICY = fp.FinePruning(fp.Schedule(EPOCHS, window=3, start=1), prune=32)


def samples():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (N,), generator=generator)


def new_model():
    generator = torch.Generator().manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float64, generator=generator) / 2)
    return model


def users_loop(model, batch_size):
    """Train a model in a user's own loop with ``Pruner``, and return the counts."""
    x, y = samples()
    pruner = fp.Pruner(N, POLICY, batch_size=batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in pruner.epochs():
        for index in pruner.sampler.order().split(batch_size):
            losses = F.cross_entropy(model(x[index]), y[index], reduction="none")
            pruner.record(index, losses).backward()
            optimizer.step()
            optimizer.zero_grad()
    return pruner.counts


def ranks_main(rank, folder):
    with gloo_group(rank, folder):
        model = new_model()
        counts = users_loop(DistributedDataParallel(model), 8)
        torch.save({"model": model.state_dict(), "counts": counts}, f"{folder}/rank{rank}.pt")


def test_two_ranks_train_like_one_process_with_twice_the_batch_size(spawned):
    model = new_model()
    counts = users_loop(model, 16)
    for saved in spawned(ranks_main, 2):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(saved["model"][name], value, rtol=1e-9, atol=1e-12)
        assert torch.equal(saved["counts"], counts)
    assert counts.any()


def small(*changes):
    return small_recipe("training.batch_size=32", "training.milestones=[3]", *changes)


NOISE = "data.label_noise=0.2"


@pytest.fixture(scope="module")
def torchrun_command(python, python_file):
    """Returns the command that trains in several ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHON_EXEC", python_file)
        yield functools.partial(command_of_ranks, python)


def command_of_ranks(python, folder, ranks, *changes, resume=False, restarts=0):
    text = small(*changes).to_toml()
    recipe = folder.parent / f"{folder.name}.toml"
    recipe.write_text(text)
    command = [*python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += [f"--max-restarts={restarts}"]
    # A store of this run alone, on a port that is free.
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["-m", "fineprune", "train", str(recipe), "--out", str(folder), "--json"]
    return [*command, "--resume"] if resume else command


@pytest.fixture(scope="module")
def torchrun(torchrun_command):
    """Trains in several ranks."""

    def torchrun(*arguments, **options):
        command = torchrun_command(*arguments, **options)
        return subprocess.run(command, capture_output=True, text=True)

    return torchrun


@pytest.fixture(scope="module")
def two_ranks(torchrun, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "two"
    return folder, torchrun(folder, 2, NOISE)


def test_torchrun_trains_a_recipe_like_one_process(two_ranks, tmp_path):
    folder, done = two_ranks
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)  # Only rank 0 prints.
    assert summary["ranks"] == 2
    alone = train(small("training.batch_size=64", NOISE), tmp_path / "one")
    assert summary["samples_trained"] == alone.samples_trained
    assert summary["steps"] == alone.steps
    one, two = (read_metrics(f / "metrics.jsonl") for f in (tmp_path / "one", folder))
    for line, other in zip(one, two, strict=True):
        assert line["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)
    first, second = (load_checkpoint(f / "checkpoint.pt") for f in (tmp_path / "one", folder))
    for name, value in first["model"].items():
        torch.testing.assert_close(second["model"][name], value, rtol=1e-2, atol=1e-3)
    assert len(second["random"]) == 2
    # Only rank 0 measures the suspicion. Few losses are so near a mean that rounding marks them.
    found, known = summary["suspicion"], vars(alone.suspicion)
    assert found["wrong"] == known["wrong"] == 51
    assert found["roc_area"] == pytest.approx(known["roc_area"], abs=0.02)


def test_ranks_that_a_signal_stops_write_one_checkpoint_after_the_same_step(
    torchrun_command, tmp_path
):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        torchrun_command(folder, 2, "training.epochs=4000"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(read_metrics(folder / "metrics.jsonl")) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)  # torchrun passes the signal on to the ranks.
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert "stopped by SIGTERM in epoch" in stderr
    saved = load_checkpoint(folder / "checkpoint.pt")
    assert len(saved["random"]) == 2
    assert saved["pruner"]["epoch"] == len(read_metrics(folder / "metrics.jsonl"))
    assert sum(saved["epoch_so_far"]["part_samples"]) == 2 * 32 * saved["epoch_so_far"]["batches"]


def test_signals_end_a_process_that_waits_for_other_ranks(tmp_path, monkeypatch):
    """A handler of Python would not be called, because torch waits outside of Python."""
    handlers: list[object] = []

    def meet(url):
        handlers.extend(map(signal.getsignal, (signal.SIGTERM, signal.SIGINT)))
        raise Stop

    monkeypatch.setattr("fineprune.distributed.all_reduce.rendezvous", meet)
    for name, value in launched(0, 0).items():
        monkeypatch.setenv(name, value)
    # Tests that run in the background of a shell ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Stop):
            train(small(), tmp_path / "run")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [signal.SIG_DFL, signal.SIG_DFL]


@pytest.mark.parametrize(
    ("batches", "ranks", "changes", "trained", "steps", "samples"),
    [
        # After the last batch of epoch 1, before the epoch has ended.
        (14, 2, (), 256, [6, 8, 3, 4], [192, 256, 192, 256]),
        # After 4 of the 6 batches of epoch 2, which two ranks continue with one batch each.
        pytest.param(
            *(18, 2, (), 128, [6, 8, 4 + 1, 4], [192, 256, 192, 256]), marks=pytest.mark.long
        ),
        # Three steps of two batches in epoch 1, of which two ranks have one batch each left.
        (
            *(5, 2, ("training.accumulation=2", "pruning.prune=128"), 192),
            *([2, 3 + 1, 1, 2], [128, 256, 128, 256]),
        ),
        # Each of three ranks trains 65 of the 192 samples that are left. These repeat three, so
        # that all ranks have equally many.
        pytest.param(*(8, 3, (), 64, [6], [192, 64 + 3 * 65]), marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_can_be_resumed_with_another_number_of_ranks(
    batches, ranks, changes, trained, steps, samples, torchrun, tmp_path, monkeypatch
):
    """One process writes the checkpoint. Several then need fewer steps per epoch."""
    folder = tmp_path / "run"
    recipe = small("run.checkpoint_steps=1", *changes)
    train_until(checkpoint_number(batches), recipe, folder, monkeypatch)
    so_far = load_checkpoint(folder / "checkpoint.pt")["epoch_so_far"]
    assert sum(so_far["part_samples"]) == trained
    done = torchrun(folder, ranks, *changes, resume=True)
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [line["epoch"] for line in metrics] == [0, 1, 2, 3]
    assert [line["steps"] for line in metrics[: len(steps)]] == steps
    assert [line["samples"] for line in metrics[: len(samples)]] == samples
    size = 64 if changes else 32
    said = f"continues with {ranks} processes after 1, so a step has {ranks * size} samples after"
    assert done.stderr.count(f"{said} {size}, and the learning") == 1


def test_an_error_on_rank_0_is_reported_by_all_ranks(two_ranks, torchrun):
    folder, _ = two_ranks
    done = torchrun(folder, 2)
    assert done.returncode != 0
    assert done.stderr.count("expected a new folder for the run") == 2


@pytest.mark.long
def test_ranks_that_are_restarted_continue(torchrun_command, tmp_path):
    """The process that is killed is rank 0, whose number is in the lock of the folder."""
    folder = tmp_path / "run"
    command = torchrun_command(folder, 2, "training.epochs=60", resume=True, restarts=2)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    killed = 0
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        if killed < 2 and len(read_metrics(folder / "metrics.jsonl")) > 15 * (killed + 1):
            os.kill(int((folder / ".lock").read_text().split()[0]), signal.SIGKILL)
            killed += 1
    try:
        assert (killed, process.poll()) == (2, 0)
    finally:
        process.terminate()
        process.wait()
    assert [line["epoch"] for line in read_metrics(folder / "metrics.jsonl")] == list(range(60))


def leave_before_the_model(rank, port):
    """Leave the group while a model wrapped by DDP still exists."""
    os.environ.update(launched(rank, port))
    model = nn.Linear(1, 1)
    with joined("cpu") as ranks:
        group = weakref.ref(dist.group.WORLD)
        replicated = ranks.replicate(model, model)
        ranks.from_main(lambda: None)
    del replicated
    # If this had deleted the group, it would have waited forever in one of fifty cases.
    assert group() is not None


def test_the_group_outlives_a_model_that_ddp_wrapped(fast_spawn):
    spawn(leave_before_the_model, args=(free_port(),), nprocs=2)


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_wait_for_rank_0_longer_than_a_collective_may_take(fails, monkeypatch):
    store, ended = HashStore(), []
    store.set_timeout(timedelta(milliseconds=1))
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)

    def other():
        with RankGroup(1, 2).wait_for_main("work"):
            pass
        ended.append(1)

    thread = threading.Thread(target=other)
    with contextlib.suppress(Stop), RankGroup(0, 2).wait_for_main("work"):
        thread.start()
        thread.join(0.1)
        ended.append(0)
        if fails:
            raise Stop
    thread.join(60)
    assert ended == [0, 1]


def test_the_ranks_wait_for_the_evaluation_before_their_next_collective(tmp_path, monkeypatch):
    done = []

    @contextlib.contextmanager
    def wait_for_main(self, work):
        yield
        done.append(work)

    def write_results(self, metrics, seen):
        done.append("evaluated")

    def state_dict(self, totals):
        raise Stop

    monkeypatch.setattr(RankGroup, "wait_for_main", wait_for_main)
    monkeypatch.setattr(Trainer, "_write_results", write_results)
    monkeypatch.setattr(Trainer, "state_dict", state_dict)
    with pytest.raises(Stop):
        train(small(), tmp_path / "run")
    assert done == ["evaluated", "epoch 0"]


COMPLETE = dict.fromkeys(("RANK", "MASTER_ADDR", "MASTER_PORT"), "0") | {"WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("device", "values", "said"),
    [
        ("cpu", {**COMPLETE, "RANK": "", "MASTER_ADDR": ""}, "2 without RANK, MASTER_ADDR: start"),
        ("cuda", COMPLETE, "WORLD_SIZE=2 without LOCAL_RANK: start"),
        ("cuda:1", {**COMPLETE, "LOCAL_RANK": "0"}, "got 'cuda:1': set run.device=cuda"),
        ("cpu", {"RANK": "1"}, "got RANK=1 without WORLD_SIZE: start it with torchrun, or unset"),
        ("cpu", {**COMPLETE, "RANK": "2"}, "expected RANK below WORLD_SIZE=2, got 2"),
        ("cpu", {"WORLD_SIZE": "two"}, "WORLD_SIZE to be a whole number, .* got 'two'"),
        ("cpu", {"WORLD_SIZE": "-1"}, "WORLD_SIZE to be a whole number, .* got '-1'"),
    ],
)
def test_the_environment_of_a_launcher_is_checked(device, values, said, monkeypatch):
    for name in (*COMPLETE, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=said) as error:
        joined(device).__enter__()
    assert "\n" not in str(error.value)


def join_over_no_device(rank, port):
    os.environ.update(launched(rank, port), GLOO_SOCKET_IFNAME="nowhere0")
    with pytest.raises(RunError, match=r"^rank \d cannot join the others: .*nowhere0"):
        joined("cpu").__enter__()


def test_ranks_that_cannot_connect_say_so_in_one_line(fast_spawn):
    spawn(join_over_no_device, args=(free_port(),), nprocs=2)
