"""The command line: every verb, the commands of the page on them, and what wrong input says."""

import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from commands import invoke as run
from commands import printed

from fineprune.cli.main import app

pytestmark = pytest.mark.usefixtures("fast_spawn")

ROOT = Path(__file__).parent.parent

# The README's commands train for minutes; the same commands on less data take seconds.
LESS = shlex.split("""
data.train_size=128 training.batch_size=32 training.epochs=4 training.milestones=[2]
training.evaluate_every=4 training.evaluate_last=1 pruning.window=2 pruning.start=1
pruning.prune=0.5 run.threads=1
""")


def own(name):
    return [f"data.name={name}", "data.train_size=none"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# A plan without a recipe.
FINE_PRUNED = "plan training.epochs={epochs} pruning.window={window} pruning.start={start}"
PAPER = FINE_PRUNED.format(epochs=200, window=60, start=30) + " pruning.attenuation=2"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # The latter in the locale C.
def test_a_character_that_is_unknown_ends_no_command(errors, monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii", errors=errors))
    own = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(sys, "stderr", own)
    with pytest.raises(SystemExit):
        app(["--version"])
    print("1.0\xa0±0.5", flush=True)
    assert printed.getvalue().endswith(b"1.0??0.5\n")
    assert own.errors == "backslashreplace"  # A stream that has a way of its own keeps it.


def test_compare_and_report_of_the_command_line(folder, fast_runs):
    compared = folder / "runs/digits-compare"
    command = ["compare", "recipes/digits.toml", *LESS, "--arms", "full,shorter", "--json"]
    rows = json.loads(printed(*command))["rows"]
    assert [row["arm"] for row in rows] == ["full", "shorter"]
    # The same command again trains nothing.
    before = {path: path.stat().st_mtime_ns for path in compared.glob("*/metrics.jsonl")}
    assert len(before) == 2
    assert json.loads(printed(*command))["rows"] == rows
    assert {path: path.stat().st_mtime_ns for path in compared.glob("*/metrics.jsonl")} == before


def test_a_run_that_was_finished_already_is_not_said_to_be_written(folder):
    command = ["train", "recipes/digits.toml", *LESS, "--out", "r"]
    assert run(*command).stdout.endswith("; written to r\n")
    assert run(*command, "--resume").stdout.endswith("; r was finished already\n")


def test_a_file_and_no_folder_with_data_comes_before_a_packaged_recipe(folder):
    (folder / "quick").mkdir()
    assert json.loads(run("plan", "quick", "--json").stdout)["epochs"] == 20
    (folder / "quick/recipe.toml").touch()
    assert "expected a finished run" in run("plan", "quick").stderr
    shutil.rmtree(folder / "quick")
    text = (ROOT / "recipes/quick.toml").read_text(encoding="utf-8")
    (folder / "quick").write_text(text.replace("epochs = 20", "epochs = 18"))
    assert json.loads(run("plan", "quick", "--json").stdout)["epochs"] == 18


def test_a_training_that_diverges_is_one_line_and_exit_status_3(folder):
    result = run("train", "recipes/digits.toml", *LESS, "training.lr=1e30")
    assert result.exit_code == 3
    said = [line for line in result.stderr.splitlines() if line.startswith("fineprune: ")]
    assert len(said) == 1
    assert "diverged" in said[0]
    assert "training.lr" in said[0]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("attenuate", "pruned"), [("window", 97), ("epoch", 112)])
def test_plan_counts_both_readings(attenuate, pruned, tmp_path):
    options = f"{PAPER} pruning.block=3 pruning.count=2 pruning.attenuate={attenuate} --json"
    options += " --step-time 0.02 --overhead 0.02"
    result = run(*options.split(), "--svg", tmp_path / "plan.svg")
    answer = json.loads(result.stdout)
    assert answer["pruned_epochs"] == sum(answer["prunes"]) == pruned
    assert answer["closed_form_pruned_epochs"] == 54
    assert answer["clears_after"] == [60, 120, 180]
    assert answer["time"] == pytest.approx(answer["steps"] * 0.02 + pruned * 0.02)
    assert answer["saving"] == pytest.approx(1 - answer["time"] / (200 * 391 * 0.02))
    assert "<svg" in (tmp_path / "plan.svg").read_text(encoding="utf-8")


SYNC = "distributed.strategy=sync distributed.workers=4"
STEPS = FINE_PRUNED.format(epochs=100, window=10, start=5) + " --samples 4096"
SKIPS = FINE_PRUNED.format(epochs=10, window=5, start=2)
SKIPS += " --samples 100 training.batch_size=1 pruning.prune="


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (STEPS, "steps: 2,800 of 3,200 in batches of 128\n"),
        (f"{STEPS} --ranks 4", "steps: 700 of 800, each of 512 samples (4 x 128)\n"),
        (f"{STEPS} {SYNC}", "steps: 700 of 800, each of 512 samples (4 x 128)\n"),
        (f"{SKIPS}30", "(18.00% skipped"),
        (f"{SKIPS}0.3", "(18.00% skipped"),
        ("plan weak-labels", "samples per epoch, if none is skipped for its label:"),
        ("plan weak-labels", "also skipped, from epoch 6 on: samples whose labels have a score ab"),
    ],
)
def test_plan_says(command, said):
    assert said in run(*shlex.split(command)).stdout


def test_plan_shows_the_samples_of_policies_without_schedules():
    settings = ("pruning.policy=infobatch", "pruning.save=0.35", "pruning.anneal=0.1")
    result = run("plan", "recipes/digits.toml", "--json", *settings)
    kept = json.loads(result.stdout)["kept"]
    assert kept[-1] == 1024
    assert min(kept) < 1024


def test_plan_takes_windows_from_milestones():
    options = "training.epochs=200 training.milestones=[60,120,160] pruning.start=0.5"
    options += " pruning.windows_per_interval=2"
    answer = json.loads(run("plan", *options.split(), "--json").stdout)
    assert answer["clears_after"] == [30, 60, 90, 120, 140, 160, 180, 200]
    assert answer["closed_form_pruned_epochs"] is None


def test_no_verb_shows_the_help(folder):
    result = run()
    assert result.exit_code == 2
    assert "Usage: " in result.stdout
    assert all(f"\n  {verb} " in result.stdout for verb in ("train", "compare", "plan", "report"))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("ValueError('half a sentence')", "half a sentence"),
        ("OSError('\\ndisk on fire\\nput it out')", "disk on fire"),
        ("AssertionError", "AssertionError"),
    ],
)
def test_only_wrong_input_is_exit_status_2(error, line, folder, monkeypatch):
    """An error of the user's own code is no wrong input: its traceback must not be lost."""
    monkeypatch.syspath_prepend(folder)
    module = f"raises_{error.partition('(')[0]}"
    (folder / f"{module}.py").write_text(f"def data():\n    raise {error}\n")
    result = run("train", "recipes/digits.toml", *LESS, *own(f"{module}:data"))
    assert result.exit_code == 1
    assert "Traceback (most recent call last):" in result.stderr
    assert f'{module}.py", line 2, in data' in result.stderr
    assert result.stderr.splitlines()[-1] == f"fineprune: failed while running: {line}"


@pytest.mark.parametrize(
    ("verb", "said"),
    [("train", "add --resume to continue"), ("compare", "run the same command again to continue")],
)
def test_ctrl_c_says_how_to_continue(verb, said, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    (folder / "interrupted.py").write_text("def data():\n    raise KeyboardInterrupt\n")
    changes = [*own("interrupted:data"), "network.classes=10"]
    result = run(verb, "recipes/digits.toml", *LESS, *changes)
    assert result.exit_code == 130
    assert result.stderr.startswith("fineprune: stopped")
    assert result.stderr.endswith(f"; {said}\n")
    assert result.stderr.count("\n") == 1


def test_ctrl_c_while_the_command_line_is_imported_is_one_line(folder, python):
    (folder / "typer.py").write_text("raise KeyboardInterrupt")
    command = [*python, "-m", "fineprune", "plan", "recipes/digits.toml"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "fineprune: stopped\n")


def test_a_reader_that_leaves_ends_the_command_quietly(folder, python):
    options = FINE_PRUNED.format(epochs=20_000, window=20, start=10).split()
    command = [*python, "-m", "fineprune", *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (1, "")


def test_recipes_are_listed_and_printed_by_their_names():
    files = {
        path.relative_to(ROOT / "recipes").with_suffix("").as_posix(): path
        for path in (ROOT / "recipes").rglob("*.toml")
    }
    lines = printed("recipes").splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(files)
    listed = {entry["name"]: entry for entry in json.loads(printed("recipes", "--json"))}
    text = files["paper/lenet"].read_text(encoding="utf-8")
    assert listed["paper/lenet"]["toml"] == printed("recipes", "paper/lenet") == text
    about = "LeNet on CIFAR-10, one column of the paper's Tables 1 and 2"
    assert listed["paper/lenet"]["about"] == about
    assert any(re.fullmatch(rf"paper/lenet +{about}", line) for line in lines)


def test_an_installed_wheel_has_the_recipes(tmp_path):
    """The build backend puts files into the wheel as ``pyproject.toml`` says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel["packages"]:
        shutil.copytree(ROOT / package, tmp_path / Path(package).name)
    for source, target in wheel["force-include"].items():
        shutil.copytree(ROOT / source, tmp_path / target)
    result = subprocess.run(
        [sys.executable, "-m", "fineprune", "plan", "paper/lenet"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "pruned epochs: 97 of 200" in result.stdout


def test_the_quick_recipe_learns(tmp_path, monkeypatch, one_thread_everywhere):
    monkeypatch.chdir(tmp_path)
    summary = json.loads(run("train", "quick", "--json").stdout)
    assert summary["accuracy_last"] > 0.85
    # It finds the wrong labels, and skips what the steps that it saves would have trained.
    assert summary["suspicion"]["precision"] > 0.8
    assert summary["suspicion"]["recall"] > 0.8
    assert summary["skipped_share"] == pytest.approx(0.35, abs=0.01)


# The tests of an integration run its example, and those of label examples and of files theirs.
ELSEWHERE = """
accelerate_loop cifar_as_files ddp fsdp2 label_watch label_watch_cleanlab lightning_trainer
tabular_suspects text_suspects trainer_image trainer_text trl_sft
"""
EXAMPLES = [path for path in (ROOT / "examples").glob("*.py") if path.stem not in ELSEWHERE.split()]


@pytest.mark.parametrize("example", sorted(EXAMPLES), ids=lambda p: p.stem)
def test_the_examples_run(example, capsys):
    runpy.run_path(str(example), run_name="__main__")
    assert float(re.findall(r"accuracy ([\d.]+)%", capsys.readouterr().out)[-1]) > 85


def test_what_is_said_on_a_closed_standard_error_is_not_on_standard_output():
    code = (
        "import atexit, sys; from fineprune.__main__ import main; "
        "atexit.register(lambda: print('epoch 1', file=sys.stderr)); main()"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" --version 2>&-', sys.executable, code]
    result = subprocess.run(command, capture_output=True, text=True)
    assert re.fullmatch(r"fineprune [\d.]+\n", result.stdout)
