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
from typer.testing import CliRunner

from fineprune.cli.main import VERBS, app

pytestmark = pytest.mark.usefixtures("fast_spawn")

ROOT = Path(__file__).parent.parent

# The README's commands train for minutes; the same commands on less data take seconds.
LESS = [
    "data.train_size=128",
    "training.batch_size=32",
    "training.epochs=4",
    "training.evaluate_every=4",
    "training.evaluate_last=1",
    "training.milestones=[2]",
    "pruning.window=2",
    "pruning.start=1",
    "pruning.prune=0.5",
    "run.threads=1",
]


def own(name):
    return [f"data.name={name}", "data.train_size=none"]


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown_commands():
    text = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    return re.findall(r"^fineprune (.*?)(?:\s+#.*)?$", text, re.MULTILINE)


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


def test_the_page_shows_every_verb():
    assert {command.split()[0] for command in shown_commands()} == {*VERBS}


def test_the_commands_of_the_page_work_one_after_another(folder, fast_runs):
    for command in shown_commands():
        verb, *rest = shlex.split(command)
        if verb == "scale":
            continue  # It starts Ray; test_scale.py runs it.
        trains = verb not in ("report", "inspect", "recipes")
        result = run(verb, *rest, *(LESS if trains else []))
        assert result.exit_code == 0, result.output
    assert (folder / "runs/first/summary.json").exists()
    assert "<svg" in (folder / "report.html").read_text(encoding="utf-8")
    compared = folder / "runs/digits-compare"
    listed = json.loads((compared / "compare.json").read_text())
    assert len(listed["runs"]) == 12
    assert {run["seed"] for run in listed["runs"]} == {0, 1, 2}
    # The same command again trains nothing, and another recipe is refused.
    before = {path: path.stat().st_mtime_ns for path in compared.glob("*/metrics.jsonl")}
    again = run("compare", "recipes/digits.toml", *LESS, "--json")
    assert again.exit_code == 0, again.output
    rows = [row["arm"] for row in json.loads(again.stdout)["rows"]]
    assert rows == ["full", "fine-pruning", "random", "shorter"]
    other = run("compare", "recipes/digits.toml", *LESS, "training.lr=0.5")
    assert other.exit_code == 2
    assert "recipe.toml differs" in other.stderr
    assert {path: path.stat().st_mtime_ns for path in compared.glob("*/metrics.jsonl")} == before


def test_a_run_that_was_finished_already_is_not_said_to_be_written(folder):
    command = ["train", "recipes/digits.toml", *LESS, "training.epochs=2", "--out", "r"]
    assert run(*command, "training.milestones=[]").stdout.endswith("; written to r\n")
    again = run(*command, "training.milestones=[]", "--resume")
    assert again.exit_code == 0, again.output
    assert again.stdout.endswith("; r was finished already\n")


def test_a_folder_with_data_does_not_hide_a_packaged_recipe(folder):
    (folder / "quick").mkdir()
    planned = run("plan", "quick", "--samples", "1024")
    assert planned.exit_code == 0, planned.output
    assert "predicted saving" in planned.stdout
    (folder / "quick/recipe.toml").touch()
    assert "expected a finished run" in run("plan", "quick").stderr


def test_settings_of_servers_without_servers_are_said(folder):
    (folder / "file").touch()
    refused = run("train", "quick", "distributed.workers=8", "--out", "file")
    assert "no effect without parameter servers: distributed.workers; set" in refused.stderr
    assert "no effect" not in run("train", "quick", "--out", "file").stderr


def test_plan_takes_changes_after_one_set_too(folder):
    plain = json.loads(run("plan", "recipes/digits.toml", "--json").stdout)
    changes = ["pruning.block=2", "pruning.count=1"]
    result = run("plan", "recipes/digits.toml", "--json", *changes)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["pruned_epochs"] < plain["pruned_epochs"]
    options = [*PAPER.split(), "pruning.prune=0.625", "--json", *changes]
    assert json.loads(run(*options).stdout)["prunes"] == json.loads(result.stdout)["prunes"]


def test_a_training_that_diverges_is_one_line_and_exit_status_3(folder):
    result = run("train", "recipes/digits.toml", *LESS, "training.lr=1e30")
    assert result.exit_code == 3
    said = [line for line in result.stderr.splitlines() if line.startswith("fineprune: ")]
    assert len(said) == 1
    assert "diverged" in said[0]
    assert "training.lr" in said[0]
    assert "Traceback" not in result.stderr


def test_the_command_of_the_method_page_works():
    text = (ROOT / "docs/method.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^fineprune (plan .*)$", text, re.MULTILINE)
    result = run(*shlex.split(command))
    assert result.exit_code == 0
    assert "97 of 200" in result.output
    assert "the paper's closed form, formula 3 or 4, gives 54" in result.output


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


def test_only_wrong_input_is_exit_status_2(folder, monkeypatch):
    """A ValueError of the user's own code is no wrong input: its traceback must not be lost."""
    monkeypatch.syspath_prepend(folder)
    (folder / "own_data.py").write_text("def data():\n    raise ValueError('half a sentence')\n")
    result = run("train", "recipes/digits.toml", *LESS, *own("own_data:data"))
    assert result.exit_code == 1
    assert "Traceback (most recent call last):" in result.stderr
    assert 'own_data.py", line 2, in data' in result.stderr
    said = "fineprune: failed while running: half a sentence"
    assert result.stderr.splitlines()[-1] == said


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("OSError('\\ndisk on fire\\nput it out')", "disk on fire"),
        ("AssertionError", "AssertionError"),
    ],
)
def test_the_last_line_of_a_failure_is_short(error, line, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    module = f"raises_{error.partition('(')[0]}"
    (folder / f"{module}.py").write_text(f"def data():\n    raise {error}\n")
    result = run("train", "recipes/digits.toml", *LESS, *own(f"{module}:data"))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"fineprune: failed while running: {line}"


INTERRUPTED = """
import signal, torch
from torch.utils.data import TensorDataset

def data():
    # Python ignores the signal if its parent does, as those in the background of a script do.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)
    images = TensorDataset(torch.zeros(64, 3, 32, 32), torch.zeros(64, dtype=torch.int64))
    return images, images
"""


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("train", "add --resume to continue"),
        ("compare", "run the same command again to continue"),
    ],
)
def test_ctrl_c_says_how_to_continue(verb, said, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    (folder / "interrupted.py").write_text(INTERRUPTED)
    changes = [*own("interrupted:data"), "network.classes=10"]
    result = run(verb, "recipes/digits.toml", *LESS, *changes)
    assert result.exit_code == 130
    assert result.stderr.startswith("fineprune: stopped")
    assert result.stderr.endswith(f"; {said}\n")
    assert result.stderr.count("\n") == 1


PRESSED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.raise_signal(signal.SIGINT)
"""


def test_ctrl_c_while_the_command_line_is_imported_is_one_line(folder, python):
    (folder / "typer.py").write_text(PRESSED)
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


def test_a_download_without_a_network_is_one_line_and_exit_status_1(folder, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nothing listens on this port
    before = sorted(folder.rglob("*"))
    download = ["data.dir=new", "data.download=true"]
    result = run("train", "recipes/paper/lenet.toml", *download)
    assert result.exit_code == 1
    begun, said = result.stderr.splitlines()
    assert begun.startswith("Downloading data from 'https://www.cs.toronto.edu/")
    assert said.startswith("fineprune: expected to download https://www.cs.toronto.edu/")
    assert "Connection refused" in said
    assert "put cifar-10-binary.tar.gz there yourself" in said
    assert sorted(folder.rglob("*")) == before


def example_in_help(verb):
    """The example that ``--help`` shows, as one line."""
    result = run(verb, "--help")
    assert result.exit_code == 0
    shown = re.search(r"Example: (.+?)\n\n", result.output, re.DOTALL)
    assert shown, result.output
    return " ".join(shown[1].split())


@pytest.mark.long
def test_every_example_in_the_help_runs(tmp_path, monkeypatch, fast_runs):
    """One after another, since ``report`` reads what ``compare`` wrote, and without a clone."""
    pytest.importorskip("ray")  # for scale
    folder = tmp_path
    monkeypatch.chdir(folder)
    for verb in VERBS:
        command, *arguments = shlex.split(example_in_help(verb))
        assert (command, arguments[0]) == ("fineprune", verb)
        result = run(*arguments)
        assert result.exit_code == 0, result.output
    assert json.loads((folder / "runs/first/summary.json").read_text())["seed"] == 1
    assert (folder / "runs/quick-compare/adaptive-1/summary.json").exists()
    assert "<svg" in (folder / "report.html").read_text(encoding="utf-8")
    assert len(list((folder / "runs/quick-scale").glob("*/summary.json"))) == 2
    assert "--nodes=8" in (folder / "job.sh").read_text(encoding="utf-8")


def test_recipes_are_listed_and_printed_by_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*.toml")]
    lines = run("recipes").stdout.splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(
        file.with_suffix("").as_posix() for file in files
    )
    text = run("recipes", "paper/lenet").stdout
    assert text == (ROOT / "recipes/paper/lenet.toml").read_text(encoding="utf-8")
    listed = {entry["name"]: entry for entry in json.loads(run("recipes", "--json").stdout)}
    assert listed["paper/lenet"]["toml"] == text
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


def test_a_file_comes_before_the_packaged_recipe_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "recipes/quick.toml").read_text(encoding="utf-8")
    (tmp_path / "quick").write_text(text.replace("epochs = 20", "epochs = 18"))
    assert json.loads(run("plan", "quick", "--json").stdout)["epochs"] == 18


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("quik", "cannot read quik: No such file or directory; did you mean quick?"),
        (
            "recipes/quick.toml",
            "recipes/quick.toml: No such file or directory; did you mean quick?",
        ),
        ("nothing-like-it", "nothing-like-it: No such file or directory"),
    ],
)
def test_an_unknown_recipe_is_one_line(given, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("plan", given)
    assert result.exit_code == 2
    assert "expected a recipe file or a name that fineprune recipes lists" in result.stderr
    assert result.stderr.endswith(f"{said}\n")
    assert result.stderr.count("\n") == 1


def test_the_quick_recipe_learns(tmp_path, monkeypatch, one_thread_everywhere):
    monkeypatch.chdir(tmp_path)
    summary = json.loads(run("train", "quick", "--json").stdout)
    assert summary["accuracy_last"] > 0.85
    # It finds the wrong labels, and skips what the steps that it saves would have trained.
    assert summary["suspicion"]["precision"] > 0.8
    assert summary["suspicion"]["recall"] > 0.8
    assert summary["skipped_share"] == pytest.approx(0.35, abs=0.01)


# The tests of an integration run its example, and those of label examples and of files theirs.
ELSEWHERE = (
    "accelerate_loop",
    "cifar_as_files",
    "ddp",
    "fsdp2",
    "label_watch",
    "label_watch_cleanlab",
    "lightning_trainer",
    "tabular_suspects",
    "text_suspects",
    "trainer_image",
    "trainer_text",
    "trl_sft",
)
EXAMPLES = [path for path in (ROOT / "examples").glob("*.py") if path.stem not in ELSEWHERE]


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
