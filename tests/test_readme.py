"""README and docs: Python runs, settings are valid, links resolve."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from fineprune.distributed.strategy import Strategy
from fineprune.training.recipe import make_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGES.md", *sorted((ROOT / "docs").rglob("*.md"))]
LABELS = ROOT / "docs/labels.md"

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page, *kinds):
    """The contents of a page's fenced blocks of these kinds."""
    text = page.read_text(encoding="utf-8")
    return [block for kind, block in FENCED.findall(text) if kind in kinds]


PYTHON = [
    pytest.param(block, id=f"{name(page)}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page, "python"))
    if "watch" not in block
]


def test_python_is_found():
    assert PYTHON


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
