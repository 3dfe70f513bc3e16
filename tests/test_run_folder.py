"""The folder of a run: a single writer, files that belong together, and no lost results."""

import dataclasses
import errno
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from resuming import small_recipe, train_through, untimed
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.errors import InputError, RunError, Stopped, TrainingDiverged
from fineprune.runs.files import append_metrics, read_metrics, write_json
from fineprune.runs.lock import only_writer
from fineprune.runs.run import read_run
from fineprune.training.checkpoint import load_checkpoint, save_checkpoint
from fineprune.training.recipe import read_recipe
from fineprune.training.stop import stop_requests
from fineprune.training.trainer import train
from fineprune.writing import cannot_write


def small(*changes):
    return small_recipe("training.milestones=[2]", *changes)


def content(folder):
    """Return the bytes of all files in a folder, except its lock file."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def stopped(folder, epochs, *changes):
    """Train a run, and stop it after the given number of epochs."""
    train_through(epochs - 1, small(*changes), folder)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(small(), folder)
    return folder


@pytest.fixture
def finished(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "finished")


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    return stopped(tmp_path_factory.mktemp("runs") / "half", 2)


@pytest.fixture
def unfinished(half, tmp_path):
    return shutil.copytree(half, tmp_path / "unfinished")


# A finished run


def test_resuming_a_finished_run_changes_nothing_and_returns_its_summary(finished):
    before = content(finished)
    summary = json.loads((finished / "summary.json").read_text())
    assert dataclasses.asdict(train(small(), finished, resume=True)) == summary
    assert content(finished) == before


def test_a_finished_run_without_its_checkpoint_is_still_finished(finished):
    (finished / "checkpoint.pt").unlink()
    before = content(finished)
    train(small(), finished, resume=True)
    with pytest.raises(InputError, match=r"training.lr is 0.02 and 0.5"):
        train(small("training.lr=0.5"), finished, resume=True)
    assert content(finished) == before


@pytest.mark.parametrize("name", ["checkpoint.pt", "summary.json", "metrics.jsonl", "recipe.toml"])
def test_a_new_run_is_refused_if_the_folder_holds_any_file_of_a_run(name, finished):
    for path in finished.iterdir():
        if path.name not in (name, ".lock"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = content(finished)
    with pytest.raises(InputError, match=f"holds {name}"):
        train(small(), finished)
    assert content(finished) == before


# Files that do not belong together


def written(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "change", "changes", "said"),
    [
        ("metrics.jsonl", lambda lines: [], (), r"metrics of 2 epochs .* got .* epochs \[\]"),
        ("metrics.jsonl", lambda lines: lines[:1], (), r"of 2 epochs .* got .* epochs \[0\]"),
        (
            "metrics.jsonl",
            lambda lines: [line.replace('"samples": ', '"samples": 1') for line in lines],
            (),
            r"metrics in .* with which checkpoint\.pt was written, got others: restore",
        ),
        ("metrics.jsonl", lambda lines: lines[:1] + lines, (), r"of the epochs \[0, 0\]"),
        ("metrics.jsonl", lambda lines: ["{}\n"], (), "expected epoch in line 1 of .*, got none"),
        ("metrics.jsonl", lambda lines: ["nonsense\n"], (), "expected JSON in line 1 of"),
        ("checkpoint.pt", None, (), "which holds the metrics of 2 epochs, found none"),
        ("recipe.toml", None, (), "expected recipe.toml of a run, got"),
        (
            "recipe.toml",
            lambda lines: [line.replace("momentum = 0.9", "momentum = 0.0") for line in lines],
            ("training.momentum=0.0",),
            r"got one of another recipe \(training.momentum is 0.9",
        ),
        (".lock", lambda lines: [], ("run.arm=second",), r'run.arm is null and "second"'),
    ],
)
def test_files_that_do_not_belong_together_are_not_continued(
    name, change, changes, said, unfinished
):
    file = unfinished / name
    if change is None:
        file.unlink()
    else:
        file.write_text("".join(change(file.read_text().splitlines(keepends=True))))
    before = content(unfinished)
    with pytest.raises(InputError, match=said):
        train(small(*changes), unfinished, resume=True)
    assert content(unfinished) == before


def test_metrics_behind_the_checkpoint_may_be_damaged(unfinished):
    with (unfinished / "metrics.jsonl").open("a") as file:
        file.write("nonsense\n")
    train(small(), unfinished, resume=True)
    assert [line["epoch"] for line in untimed(unfinished)] == list(range(4))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("metrics.jsonl", lambda text: text.rpartition(b"{")[0], "each of the 4 epochs .* 3 lines"),
        ("metrics.jsonl", lambda text: text.replace(b'"steps": 3', b'"steps": 5', 1), "steps"),
        ("metrics.jsonl", lambda text: b"\n" + text, "JSON in line 1"),
        ("summary.json", lambda text: b"{}", "expected arm in"),
        ("summary.json", lambda text: text[:-9], "expected JSON in"),
        (
            "summary.json",
            lambda text: text.replace(b'"seed": 0', b'"seed": 7'),
            "seed = 7 .* got 0",
        ),
        ("recipe.toml", lambda text: b"[data", "recipe of a run"),
        ("counts/epoch-0002.npy", lambda text: b"", "counts|integers"),
        ("counts/epoch-0002.npy", lambda text: b"not an array", "counts|integers"),
        ("counts/epoch-0002.npy", lambda text: written(np.zeros(3)), "counts|integers"),
    ],
)
def test_a_damaged_run_is_refused(finished, name, change, message):
    text = (finished / name).read_bytes()
    assert change(text) != text
    (finished / name).write_bytes(change(text))
    with pytest.raises(InputError, match=message):
        read_run(finished).counts()


# Resuming


def test_a_resumed_run_keeps_its_arm_and_its_resolved_settings(tmp_path):
    kept = ("run.arm=control", "run.threads=1", "run.rate_factor=0.5")
    folder = stopped(tmp_path / "run", 1, *kept)
    summary = train(small("run.threads=0", "run.device=auto"), folder, resume=True)
    assert (summary.arm, summary.hardware.threads) == ("control", 1)
    assert read_recipe(folder / "recipe.toml") == small(*kept)


def test_a_run_can_be_resumed_with_another_data_folder(unfinished):
    changes = ("data.download=true", "data.dir=elsewhere", "run.history=false")
    summary = train(small(*changes), unfinished, resume=True)
    assert summary.epochs == 4
    assert read_recipe(unfinished / "recipe.toml") == small(*changes)


def test_a_history_cannot_begin_in_the_middle_of_a_run(tmp_path):
    folder = stopped(tmp_path / "run", 1, "run.history=false")
    with pytest.raises(InputError, match=r"run\.history is false and true"):
        train(small(), folder, resume=True)


def test_the_counts_of_an_earlier_start_are_removed(tmp_path):
    folder = stopped(tmp_path / "run", 2, "run.checkpoint_every=4", "pruning.window=1")
    assert sorted(p.name for p in (folder / "counts").iterdir()) == [
        "epoch-0001.npy",
        "epoch-0002.npy",
    ]
    (folder / "recipe.toml").write_text(small("run.checkpoint_every=4").to_toml())
    train(small("run.checkpoint_every=4"), folder, resume=True)
    assert set(read_run(folder).counts()) == {2, 4}


# The lock


def hold(folder, held, release):
    with only_writer(folder):
        held.set()
        release.wait(60)


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize(
    "number", [None, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get
)
def test_the_error_of_a_second_writer_names_the_first_one(number, tmp_path, monkeypatch):
    """Also on a file system without locks, on which the file is the lock."""
    if number is not None:
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(number, os.strerror(number))))
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path / "run", held, release))
    process.start()
    held.wait(60)
    said = rf"got process {process.pid}: wait until .*, remove .*\.lock"
    with pytest.raises(InputError, match=said):
        train(small(), tmp_path / "run")
    process.kill()
    process.join()
    with only_writer(tmp_path / "run"):
        pass


def test_a_lock_is_writable_for_the_group_that_shares_the_folder(tmp_path):
    with only_writer(tmp_path):
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o664


def test_a_lock_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()  # Like a file of another user, which root could open.
    with pytest.raises(InputError, match=r"cannot lock .*\.lock: Is a directory: give another"):
        only_writer(tmp_path).__enter__()


def test_a_new_folder_is_removed_if_nothing_is_written_to_it(tmp_path):
    with pytest.raises(InputError), only_writer(tmp_path / "a" / "b"):
        raise InputError
    assert not (tmp_path / "a").exists()


# Signals and failures


def command(folder):
    recipe = str(folder.parent / "recipe.toml")
    return ["-m", "fineprune", "train", recipe, "--out", str(folder), "--resume"]


def test_a_run_stopped_by_a_signal_writes_a_checkpoint(tmp_path, python):
    recipe = small("training.epochs=400")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    folder = tmp_path / "run"
    process = subprocess.Popen([*python, *command(folder)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(read_metrics(folder / "metrics.jsonl")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    lines = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 128 + signal.SIGINT
    assert "fineprune: stopped by SIGINT in epoch" in lines[-1]
    assert "Traceback" not in lines
    saved = load_checkpoint(folder / "checkpoint.pt")
    # The checkpoint is in the epoch after those in the metrics, so no batch is trained twice.
    trained = len(read_metrics(folder / "metrics.jsonl"))
    assert saved["pruner"]["epoch"] == trained
    assert saved["epoch_so_far"]["batches"] > 0


def test_a_run_stopped_twice_and_resumed_has_the_same_result(whole, tmp_path, monkeypatch):
    votes = []

    def says_stop(self, requested):
        votes.append(requested)
        return len(votes) in (2, 9)

    monkeypatch.setattr("fineprune.distributed.all_reduce.StopVote.says_stop", says_stop)
    for place in ("in epoch 1, after batch 2", "in epoch 3, after batch 2"):
        with pytest.raises(Stopped, match=f"^stopped by SIGTERM {place}, and wrote a checkpoint$"):
            train(small(), tmp_path / "run", resume=True)
    train(small(), tmp_path / "run", resume=True)
    assert untimed(tmp_path / "run") == untimed(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_loading_of_data_at_once(number, tmp_path, monkeypatch):
    def slow(recipe, *rest):
        try:
            signal.raise_signal(number)
            time.sleep(1)
        except Stopped as stopped:  # As in code that explains what goes wrong in a library.
            raise InputError("expected the library to be installed") from stopped
        raise AssertionError("the signal did not end it")

    monkeypatch.setattr("fineprune.training.trainer.load_data", slow)
    with pytest.raises(Stopped, match=f"stopped by {number.name} before the first epoch"):
        train(small(), tmp_path / "run")


def test_a_full_disk_leaves_the_last_checkpoint_and_no_temporary_files(unfinished):
    """A limit on the size of files takes the place of a full disk."""
    (unfinished.parent / "recipe.toml").write_text(small().to_toml())
    before = (unfinished / "checkpoint.pt").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        done = CliRunner().invoke(app, command(unfinished)[2:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line == f"fineprune: cannot write {unfinished}/checkpoint.pt: File too large"
    assert (unfinished / "checkpoint.pt").read_bytes() == before
    assert not list(unfinished.rglob("*.tmp"))
    assert train(small(), unfinished, resume=True).epochs == 4


def fail_to_save(state, file):
    """Fail as ``torch.save`` does on a full disk: closing its archive, it raises another error."""
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    finally:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


def test_what_torch_saves_names_the_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.save", fail_to_save)
    said = re.escape(f"cannot write {tmp_path / 'checkpoint.pt'}: No space left on device")
    with pytest.raises(RunError, match=f"^{said}$"):
        save_checkpoint(tmp_path / "checkpoint.pt", {})


def test_an_error_of_numpy_without_a_number_says_what_it_says(tmp_path):
    error = cannot_write(tmp_path, OSError("100000 requested and 3968 written"))
    assert str(error) == f"cannot write {tmp_path}: 100000 requested and 3968 written"


def test_a_training_that_diverges_ends_with_an_error(tmp_path):
    with pytest.raises(TrainingDiverged, match=r"mean loss of epoch 1 is nan: .* smaller"):
        train(small("training.lr=1e30"), tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_folder_of_a_comparison_takes_no_run(tmp_path):
    (tmp_path / "compare.json").write_text("{}")
    (tmp_path / "recipe.toml").write_text(small().to_toml())
    with pytest.raises(InputError, match="which holds a comparison: give another --out"):
        train(small(), tmp_path, resume=True)
    with pytest.raises(InputError, match="got a comparison: give one of its runs"):
        read_run(tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_before_the_first_checkpoint_a_run_begins_anew_and_says_so(tmp_path, caplog):
    recipe = small("run.checkpoint_every=60")
    append_metrics(tmp_path / "metrics.jsonl", {"epoch": 0})
    append_metrics(tmp_path / "metrics.jsonl", {"epoch": 1})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    train(small("run.checkpoint_every=1"), tmp_path, resume=True)
    assert f"{tmp_path} holds no checkpoint to resume: the run begins anew" in caplog.text
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == recipe.training.epochs


# The lock


def test_a_folder_that_is_renamed_and_replaced_is_not_written_to(tmp_path):
    """Its lock is on the file, and what is written goes to the name."""
    folder = tmp_path / "run"
    with only_writer(folder):
        append_metrics(folder / "metrics.jsonl", {"epoch": 0})
        folder.rename(tmp_path / "moved")
        with pytest.raises(RunError, match="was renamed, removed or replaced while this process"):
            append_metrics(folder / "metrics.jsonl", {"epoch": 1})
        folder.mkdir()
        (folder / ".lock").write_text("1\nelsewhere\n")
        for write in (append_metrics, write_json):
            with pytest.raises(RunError, match="resume where the folder is now"):
                write(folder / "metrics.jsonl", {"epoch": 1})
    assert [line["epoch"] for line in read_metrics(tmp_path / "moved/metrics.jsonl")] == [0]
    assert not (folder / "metrics.jsonl").exists()
    append_metrics(folder / "metrics.jsonl", {"epoch": 0})  # Who holds no lock is not checked.


def test_a_current_folder_that_is_removed_is_told_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    with only_writer(Path("run")):
        shutil.rmtree(tmp_path / "current")
        with pytest.raises(RunError, match="run was renamed, removed or replaced while this"):
            append_metrics(Path("run/metrics.jsonl"), {"epoch": 0})


def test_the_lock_of_another_host_is_named_with_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "")))
    (tmp_path / ".lock").write_text("7\nnode3\n")
    said = rf"got process 7 on node3: .* if it runs no more, remove {tmp_path / '.lock'}"
    with pytest.raises(InputError, match=said), only_writer(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_fsync_is_no_error(number, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(number, os.strerror(number))))
    append_metrics(tmp_path / "metrics.jsonl", {"epoch": 0})
    write_json(tmp_path / "x.json", {"a": float("nan")})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": null\n}\n'


@pytest.mark.parametrize(
    ("number", "handler"),
    [
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGUSR1, signal.SIG_DFL),
        # A terminal that is closed sends it, and nohup lets it be ignored.
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_IGN),
    ],
)
def test_a_signal_stops_a_run_unless_it_is_ignored(number, handler):
    before = signal.signal(number, handler)
    try:
        with stop_requests() as stop:
            assert signal.getsignal(number) != signal.SIG_DFL  # It would end this process.
            signal.raise_signal(number)
        assert stop.number == (None if handler == signal.SIG_IGN else number)
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)
