"""Commands that cannot hurt: only own files are removed, and no output replaces an input."""

import os
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from commands import invoke, printed
from test_bad_input import state_of

from fineprune.runs.run import read_run
from fineprune.training.recipe import read_recipe
from fineprune.training.trainer import train
from fineprune.writing import write_atomically

RECIPE = """\
# Written by hand.
data = {name = "digits", train_size = 128}
training = {epochs = 3, batch_size = 32, lr = 0.02, evaluate_every = 3, evaluate_last = 1}
pruning = {policy = "fine-pruning", window = 3, start = 1, prune = 0.5}
run = {threads = 1, device = "cpu", precision = "float32", compile = "off"}
"""


def run(command):
    return invoke(*shlex.split(command))


def refused(result, message):
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("fineprune: ")
    assert result.stderr.count("\n") == 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.toml").write_text(RECIPE)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, whose labels come from a file."""
    home = tmp_path_factory.mktemp("finished")
    np.save(home / "labels.npy", np.arange(128) % 10)
    (home / "q.toml").write_text(RECIPE)
    changes = ["data.train_size=128", f"data.labels={home}/labels.npy"]
    train(read_recipe(home / "q.toml", changes), home / "done")
    return home


@pytest.fixture
def done(finished, tmp_path, monkeypatch):
    """The folder of a copy of this run, which is called done, in the current folder."""
    shutil.copytree(finished, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


# Only own files are removed


def test_training_keeps_everything_that_is_not_its_own(folder):
    out = folder / "mine"
    (out / "cache.tmp").mkdir(parents=True)
    theirs = ("notes.tmp", "recipe.toml.tmp", "draft.npy.tmp", "events.out.tfevents.1.host")
    for name in (*theirs, "cache.tmp/file"):
        (out / name).write_text("mine")
    before = state_of(out)
    result = run("train q.toml --out mine")
    assert result.exit_code == 0, result.output
    after = state_of(out)
    assert {name: after.get(name) for name in before} == before


def test_a_crash_before_the_summary_loses_nothing(done):
    """Nor does the training that writes it remove files with other names beside its own."""
    for name in ("counts/epoch-best.npy", "history/x.tmp"):
        (done / "done" / name).write_text("mine")
    before = state_of(done / "done")
    assert "history/evaluated.npy" in before
    (done / "done/summary.json").unlink()
    train(read_recipe(done / "done/recipe.toml"), done / "done", resume=True)
    changing = dict.fromkeys(("summary.json", ".lock"))
    assert state_of(done / "done") | changing == before | changing
    assert read_run(done / "done").counts().keys() == {3}


def test_a_lock_of_another_program_is_not_overwritten(folder):
    (folder / "mine").mkdir()
    (folder / "mine/.lock").write_text("locked by an editor")
    refused(run("train q.toml --out mine"), "expected no file .lock of another program in mine")
    assert (folder / "mine/.lock").read_text() == "locked by an editor"


# No output replaces an input


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("slurm --nodes 2 --out q.toml -- train q.toml", "--out not to be the input q.toml"),
        ("slurm --nodes 2 --out q.toml -- train digits", "--out to be a script, got q.toml"),
        ("plan q.toml --svg q.toml", "expected --svg not to be the input q.toml"),
        ("plan q.toml --svg ./x/../q.toml", "expected --svg not to be the input q.toml"),
        ("plan q.toml --samples 9 data.labels=labels.npy --svg labels.npy", "the input labels.npy"),
        ("report done --out done/summary.json", "expected --out not to be a file of a run"),
        ("report done --out done/recipe.toml", "expected --out not to be a file of a run"),
        ("report done --out done/counts/epoch-0003.npy", "expected --out not to be a file of"),
        ("report done --out done/history/evidence.pt", "expected --out not to be a file of"),
        ("inspect done --out done/metrics.jsonl", "expected --out not to be a file of a run"),
        ("inspect done --out {labels}", "expected --out not to be the input"),
        ("report done --out {labels}", "expected --out not to be the input"),
        ("inspect done --out x.csv --labels ./x.csv", "expected --out and --labels to be two"),
        ("compare q.toml --out .", "expected a folder for a comparison, got ., which holds"),
        ("scale q.toml one --out page", "expected a folder for scale, got page, which holds"),
    ],
)
def test_an_output_never_replaces_an_input(command, message, done, finished):
    (done / "report.html").write_text("mine")
    (done / "recipe.toml").write_text(RECIPE)
    (done / "page").mkdir()
    (done / "page/report.html").write_text("mine")
    before = state_of(done), state_of(finished)
    refused(run(command.format(labels=finished / "labels.npy")), message)
    assert (state_of(done), state_of(finished)) == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize(
    "command",
    [
        "report done --out pipe",
        "inspect done --out pipe",
        "plan q.toml --svg pipe",
        "slurm --nodes 2 --out pipe -- train q.toml",
        "report done --out link",
    ],
)
def test_a_device_or_a_pipe_is_never_replaced(command, done):
    (done / "q.toml").write_text(RECIPE)
    os.mkfifo(done / "pipe")
    (done / "link").symlink_to("pipe")
    refused(run(command), "which is a device or a pipe: give the name of a file")
    assert (done / "pipe").is_fifo()
    assert (done / "link").is_symlink()


def test_a_symbolic_link_stays_one_and_a_page_is_replaced(done):
    (done / "pages").mkdir()
    (done / "link.html").symlink_to("pages/page.html")
    for _ in range(2):
        for file in ("link.html", "done/report.html"):
            printed("report", "done", "--out", file)
        assert (done / "link.html").is_symlink()
        assert [path.name for path in (done / "pages").iterdir()] == ["page.html"]


@pytest.mark.parametrize("command", ["report {long}", "inspect done --labels a/{long}/b.csv"])
def test_a_path_that_cannot_be_used_is_one_line(command, done):
    (done / "q.toml").write_text(RECIPE)
    result = run(command.format(long=300 * "x"))
    assert result.exit_code in (1, 2)
    assert "File name too long" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.long
def test_a_comparison_whose_start_was_killed_is_continued(folder):
    """Its recipe is written after ``compare.json``, which says that the folder is ours."""
    command = "compare q.toml --out c --arms full"
    assert run(command).exit_code == 0
    (folder / "c/recipe.toml").unlink()
    assert run(command).exit_code == 0
    assert (folder / "c/recipe.toml").exists()


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "q.toml").write_text(RECIPE, encoding="utf-8-sig")
    assert read_recipe(tmp_path / "q.toml").training.epochs == 3


def test_own_data_that_exits_is_a_failure(folder):
    (folder / "leaving.py").write_text("import sys\n\ndef data():\n    sys.exit(0)\n")
    result = run("train q.toml data.name=leaving:data data.train_size=none")
    assert result.exit_code == 1
    assert "the code called sys.exit(0)" in result.stderr


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
sys.argv[1:] = "plan training.epochs=9 --save 0.3 --samples 1000000000".split()
from fineprune.__main__ import main
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_lack_of_memory_is_one_line(python):
    result = subprocess.run([*python, "-c", LIMITED], capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("fineprune: out of memory: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", ["recipes", "--help"])
def test_a_full_disk_under_the_output_is_one_line(python, arguments):
    with open("/dev/full", "w") as full:
        command = [*python, "-m", "fineprune", *arguments.split()]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("fineprune: no space left for the output: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command", ["slurm --nodes 1 --out f -- train q.toml", "plan q.toml --svg f"]
)
def test_a_full_disk_leaves_the_old_file(command, folder, monkeypatch):
    (folder / "f").write_text("#! old")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fineprune.writing.os.fsync", full)
    result = run(command)
    assert result.exit_code == 1
    assert result.stderr == "fineprune: cannot write f: No space left on device\n"
    assert (folder / "f").read_text() == "#! old"
    assert sorted(os.listdir(folder)) == ["f", "q.toml"]


def test_a_file_is_replaced_as_a_whole(tmp_path):
    """Who has the old file open, or another name for it, keeps all of it."""
    file, other = tmp_path / "f", tmp_path / "other"
    file.write_text("old")
    os.link(file, other)
    write_atomically(file, "new")
    assert (file.read_text(), other.read_text()) == ("new", "old")
