"""README and docs: Python runs, commands and settings are valid, links resolve."""

import dataclasses
import itertools
import re
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
from fineprune.experiments.configurations import configuration, configured
from fineprune.experiments.controls import arm_recipe, default_arms
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
