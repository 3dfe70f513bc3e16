"""README and docs: Python runs, settings are valid, links resolve."""

import csv
import dataclasses
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digits_loop import network
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.distributed.strategy import Strategy
from fineprune.runs.run import read_run
from fineprune.training.recipe import make_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGES.md", *sorted((ROOT / "docs").rglob("*.md"))]
LABELS = ROOT / "docs/labels.md"
tables = runpy.run_path(str(ROOT / "docs/tables.py"))

FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
    model = network()
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
    loop, again, cleanlab = blocks(LABELS, "python")
    with_cleanlab = shown == "cleanlab"
    if shown == "the README":
        loop, again = (block for block in blocks(ROOT / "README.md", "python") if "watch" in block)
    if with_cleanlab:
        pytest.importorskip("cleanlab", reason="needs cleanlab, which is not installed")
    digits = load_digits()
    true = torch.tensor(digits.target)
    labels = true.clone()
    labels[::10] = (labels[::10] + 1) % 10
    model = network()
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
    exec(compile(again, "<page>", "exec"), names)
    skipped = np.setdiff1d(np.arange(len(labels)), names["clean"].indices)
    assert (skipped % 10 == 0).mean() > 0.8
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
    assert names["saved"]["pruner"]["epoch"] == 20  # The training has ended.
    accuracy = (
        names["model"](names["features"]).argmax(1) == names["train_set"].tensors[1]
    ).float()
    assert accuracy.mean() > 0.9


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_tutorial_on_wrong_labels_finds_and_corrects_them(here, one_thread_everywhere):
    """A person's review is replaced by the truth about the first rows of the table."""
    page = ROOT / "docs/tutorials/wrong-labels.md"
    made, loop, again = blocks(page, "py")
    (here / "images.toml").write_text(blocks(page, "toml")[0])
    names: dict[str, Any] = {}
    exec(compile(made, "<page>", "exec"), names)

    outputs = []
    for block in blocks(page, ""):
        if "runs/second" in block:
            with (here / "labels.csv").open(newline="") as table:
                rows = list(csv.DictReader(table))
            numbers = [int(Path(row["key"]).stem) for row in rows]
            for row, number in zip(rows[:25], numbers, strict=False):
                row["label"] = f"digit-{names['digits']['labels'][number]}"
            with (here / "labels.csv").open("w", newline="") as table:
                writer = csv.DictWriter(table, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        result = CliRunner().invoke(app, shlex.split(block)[1:])
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
    assert sum(number % 10 == 0 for number in numbers[:20]) >= 17
    assert all("accuracy " in outputs[place] for place in (0, 3))
    first, second = (read_run(here / f"runs/{name}") for name in ("first", "second"))
    assert first.summary.labels_sha256 != second.summary.labels_sha256
    assert "data:image" in (here / "inspect.html").read_text(encoding="utf-8")

    exec(compile(loop, "<page>", "exec"), names)
    keys = [names["keys"][place] for place in names["watch"].suspects()[0][:20].tolist()]
    assert sum(int(Path(key).stem) % 10 == 0 for key in keys) >= 16
    assert "data:image" in (here / "audit.html").read_text(encoding="utf-8")
    exec(compile(again, "<page>", "exec"), names)
    x, y = names["pictures"].float() / 255, names["digits"]["labels"]
    true = torch.tensor([y[int(file.stem)] for file in names["files"]])
    assert (names["model"](x).argmax(1) == true).float().mean() > 0.95


def test_the_settings_of_distributed_training_are_valid_and_complete():
    served, simulated = map(tomllib.loads, blocks(ROOT / "docs/distributed.md", "toml"))
    for shown in (served, simulated):
        make_recipe({"data": {"name": "digits"}, **shown})
    settings = {field.name for field in dataclasses.fields(Strategy)}
    assert set(served["distributed"]) | set(simulated["distributed"]) == settings
    # Simulated workers need no processes and have a section of their own on the page.
    both = set(served["distributed"]) & set(simulated["distributed"])
    assert both == {"group", "staleness_bound"}


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


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_tables_of_a_page_are_those_of_their_files(page):
    text = page.read_text(encoding="utf-8")
    assert tables["with_tables"](text) == text, "run: python docs/tables.py"


def test_a_table_shows_the_mean_its_interval_and_what_failed():
    cell = tables["_cell"]
    assert cell([1.0, 2.0, 3.0], "±+.1f") == "+2.0 ±2.5"
    assert cell([1.0, None, 3.0], ".1f") == "2.0, 1 of 3 failed"
    assert cell([None, None], ".1f") == "2 of 2 failed"
    assert [cell(value, ",.0f") for value in (1234, [1234], None, "a")] == [
        "1,234",
        "1,234",
        "-",
        "a",
    ]
