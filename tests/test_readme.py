"""README and docs: Python runs, commands and settings are valid, tables fit, links resolve."""

import dataclasses
import itertools
import json
import re
import runpy
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.cli.options import all_changes, split_changes
from fineprune.distributed.strategy import Strategy
from fineprune.experiments.arm_table import grouped, paired_difference, table_rows
from fineprune.experiments.configurations import configuration, configured
from fineprune.experiments.controls import ALL_ARMS, arm_recipe, default_arms
from fineprune.experiments.scale_table import read_scaling, scale_rows
from fineprune.report.comparison_table import comparison_tables
from fineprune.report.scaling.tables import scale_tables
from fineprune.report.table import markdown_table
from fineprune.runs.run import read_runs
from fineprune.training.recipe import make_recipe, read_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGES.md", *sorted((ROOT / "docs").rglob("*.md"))]
LABELS = ROOT / "docs/labels.md"

# A command stands at the start of a line, or after a prompt, a launcher or a variable.
COMMAND = re.compile(r"(?:^|\s)fineprune [a-z]")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page, *kinds):
    """The contents of a page's fenced blocks of these kinds."""
    text = page.read_text(encoding="utf-8")
    return [block for kind, block in FENCED.findall(text) if kind in kinds]


def commands(page):
    """The arguments of each ``fineprune`` command of a page, in code blocks and in prose."""
    lines = []
    for block in blocks(page, "", "bash", "console"):
        lines += re.sub(r"\\\n\s*", "", block).splitlines()
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    lines += [code for code in re.findall(r"`([^`]+)`", prose) if ".toml" in code]
    for line in lines:
        if COMMAND.search(line):  # Other lines, such as those of a script, may not be complete.
            words = shlex.split(line, comments=True)
            rest = words[words.index("fineprune") + 1 :]
            yield list(itertools.takewhile(lambda word: word not in ("&", ">"), rest))


_COMMAND = get_command(app)
assert isinstance(_COMMAND, TyperGroup)
VERBS = _COMMAND.commands

PYTHON = [
    pytest.param(block, id=f"{name(page)}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page, "python"))
    if "watch" not in block
]
COMMANDS = [
    pytest.param(arguments, id=f"{name(page)}-{number}-{arguments[0]}")
    for page in PAGES
    for number, arguments in enumerate(commands(page))
]


def test_python_and_commands_are_found():
    assert PYTHON
    shown = {arguments[0] for page in PAGES for arguments in commands(page)}
    assert shown == set(VERBS)


@pytest.mark.parametrize("code", PYTHON)
def test_the_python_of_a_page_trains_a_network(code, one_thread_everywhere, tmp_path, monkeypatch):
    """The loop is run as shown. The data, the network and the optimizer are the reader's."""
    monkeypatch.chdir(tmp_path)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    names: dict[str, Any] = {
        "train_set": TensorDataset(x[:512], y[:512]),
        "model": model,
        "optimizer": optimizer,
    }
    exec(compile(code, "<page>", "exec"), names)

    pruner = names["pruner"]
    full_steps = pruner.policy.epochs * 512 // 128
    assert len(steps) == pruner.total_steps() < full_steps
    with torch.no_grad():
        accuracy = (model(x[512:]).argmax(1) == y[512:]).float().mean()
    assert accuracy > 0.85


@pytest.mark.parametrize("shown", ["the README", "the page on labels", "cleanlab"])
def test_the_python_that_watches_labels_finds_wrong_ones(
    shown, one_thread_everywhere, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    loop, cleanlab = blocks(LABELS, "python")
    with_cleanlab = shown == "cleanlab"
    if shown == "the README":
        (loop,) = (block for block in blocks(ROOT / "README.md", "python") if "watch" in block)
    if with_cleanlab:
        pytest.importorskip("cleanlab", reason="needs cleanlab, which is not installed")
    digits = load_digits()
    true = torch.tensor(digits.target)
    labels = true.clone()
    labels[::10] = (labels[::10] + 1) % 10
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    names: dict[str, Any] = {
        "train_set": TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, labels),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }
    exec(compile(loop, "<page>", "exec"), names)
    assert "data:image" not in (tmp_path / "audit.html").read_text(encoding="utf-8")  # Vectors.
    first = names["indices"][:100]
    assert (first % 10 == 0).float().mean() > 0.8
    assert (names["suggestions"][:100] == true[first]).float().mean() > 0.8
    if with_cleanlab:
        exec(compile(cleanlab, "<page>", "exec"), names)
        assert np.mean(names["issues"] % 10 == 0) > 0.8


def test_the_tables_of_found_labels_are_made_from_their_file():
    benchmark = runpy.run_path(str(ROOT / "benchmarks/label_ranking.py"))
    text = (ROOT / "docs/results/labels.json").read_text(encoding="utf-8")
    page = (ROOT / "docs/results/labels.md").read_text(encoding="utf-8")
    shown = page.partition(benchmark["BEGIN"])[2].partition(benchmark["END"])[0]
    assert shown.strip() == benchmark["tables"](json.loads(text)["runs"])


def test_the_tutorial_runs_from_its_beginning_to_its_end(
    one_thread_everywhere, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in blocks(ROOT / "docs/tutorials/training-loop.md", "py"):
        exec(compile(code, "<page>", "exec"), names)
    steps, full = re.findall(r"(\d+) steps instead of (\d+)", capsys.readouterr().out)[0]
    assert 0.6 < int(steps) / int(full) < 0.7
    assert names["saved"]["pruner"]["epoch"] == 19
    accuracy = (
        names["model"](names["features"]).argmax(1) == names["train_set"].tensors[1]
    ).float()
    assert accuracy.mean() > 0.9


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(verb, arguments):
    """The parameters of a verb. Unknown verbs, options and missing arguments are errors."""
    return VERBS[verb].make_context(verb, list(arguments)).params


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_command_of_a_page_is_valid(arguments, folder):
    """Cheap verbs are run. For verbs that train, all settings are resolved to recipes."""
    verb, *rest = arguments
    params = parsed(verb, rest)
    if verb in ("plan", "slurm", "recipes"):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    elif verb == "scale":
        texts, more = split_changes(params["configurations"])
        recipe = read_recipe(params["recipe"], all_changes(params["changes"], more))
        for text in texts:
            configured(recipe, configuration(text), same_update=params["same_update"])
    elif verb == "compare":
        recipe = read_recipe(params["recipe"], all_changes(params["changes"], params["more"]))
        named = params["arms"]
        if recipe.pruning.policy == "ranked":  # Its cost follows from a run that the page trains.
            assert set(named.split(",")) < set(ALL_ARMS)
            return
        for arm in named.split(",") if named else default_arms(recipe):
            arm_recipe(recipe, arm, num_samples=50_000)
    elif verb == "train":
        read_recipe(params["recipe"], all_changes(params["changes"], params["more"]))
    else:
        assert verb in ("report", "inspect", "relabel")
        assert params["runs"]


def test_the_settings_of_distributed_training_are_valid_and_complete():
    served, simulated = map(tomllib.loads, blocks(ROOT / "docs/distributed.md", "toml"))
    for shown in (served, simulated):
        make_recipe({"data": {"name": "digits"}, **shown})
    settings = {field.name for field in dataclasses.fields(Strategy)}
    assert set(served["distributed"]) | set(simulated["distributed"]) == settings
    # Simulated workers need no processes and have a section of their own on the page.
    assert set(served["distributed"]) & set(simulated["distributed"]) == {"group"}


def squeezed(text):
    return " ".join(text.split())


def test_the_tables_of_scale_are_those_of_its_runs():
    """Figures, titles, columns and notes are what ``fineprune scale`` prints for these runs."""
    runs = read_scaling(ROOT / "docs/results/scale").runs
    page = (ROOT / "docs/results/scale.md").read_text(encoding="utf-8")
    tables = scale_tables(scale_rows(runs, None))
    assert len(tables) == 4
    assert squeezed("\n".join(map(markdown_table, tables))) in squeezed(page)


def test_the_table_of_lenet_is_that_of_its_runs():
    folders = (ROOT / "docs/results/lenet-cifar10").iterdir()
    shown = (ROOT / "docs/results/lenet-cifar10.md").read_text(encoding="utf-8").splitlines()
    (table,) = comparison_tables(table_rows(read_runs(sorted(folders))))
    lines = [line for line in markdown_table(table).splitlines() if line.startswith("|")]
    assert len(lines) == 8
    assert set(lines) <= set(shown)


@pytest.mark.parametrize("folder", ["clean", "wrong"])
def test_the_tables_of_the_adaptive_policy_are_those_of_their_runs(folder):
    page = (ROOT / "docs/results/adaptive.md").read_text(encoding="utf-8")
    rows = table_rows(read_runs([ROOT / "docs/results/adaptive" / folder]))
    assert len(rows) == 8
    for row in rows:
        points = "-"
        if row.arm != "full":
            difference = row.last_difference
            assert difference is not None
            assert difference.half_width is not None
            points = f"{100 * difference.mean:+.2f} ±{100 * difference.half_width:.2f}"
        assert row.skipped is not None
        assert row.accuracy_last is not None
        shares = f"{100 * row.skipped:.1f} | {100 * row.accuracy_last:.2f}"
        assert row.seeds == 3
        assert f"\n| {row.arm} | {shares} | {points} |\n" in page


@pytest.mark.parametrize("page", ["README.md", "docs/adaptive.md", "docs/choose.md"])
def test_differences_on_other_pages_are_those_of_the_runs_too(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    quoted = set(re.findall(r"-?\d+\.\d\d ±\d+\.\d\d", text))
    assert quoted
    measured = set()
    for folder in ("clean", "wrong"):
        (group,) = grouped(read_runs([ROOT / "docs/results/adaptive" / folder]))
        for one, other in itertools.permutations(group.arms, 2):
            made = paired_difference(group, one, other, lambda summary: summary.accuracy_last)
            assert made is not None
            assert made.half_width is not None
            measured.add(f"{100 * made.mean:.2f} ±{100 * made.half_width:.2f}")
    assert quoted <= measured


def test_the_tables_of_the_joint_study_are_those_of_its_runs():
    study = runpy.run_path(str(ROOT / "benchmarks/joint_study.py"))
    records = study["read_records"](ROOT / "docs/results/joint/runs.jsonl")
    tables = study["markdown"](study["Study"](records)).split("\n\n")
    page = (ROOT / "docs/results/joint.md").read_text(encoding="utf-8")
    assert len(tables) == 3
    assert all(f"\n{table}\n" in page for table in tables)


def anchors(page):
    """The anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
