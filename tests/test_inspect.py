"""``fineprune inspect`` on the command line: the page, the tables and the summary."""

import csv
import json
import re

import numpy as np
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.runs.run import read_run
from fineprune.training.loop import train
from fineprune.training.recipe import make_recipe

RECIPE = {
    "data": {"name": "digits", "train_size": 300, "label_noise": 0.2, "validation": 50},
    "training": {"epochs": 4, "batch_size": 16, "lr": 0.02, "evaluate_every": 4},
    "pruning": {"policy": "adaptive", "save": 0.3},
    "run": {"device": "cpu", "threads": 1, "precision": "float32", "compile": "off"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect") / "run"
    train(make_recipe(RECIPE), folder)
    return folder


def inspect(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_a_comparison_without_runs_is_one_line(tmp_path):
    (tmp_path / "compare.json").write_text('{"version": 1, "title": "t", "arms": [], "runs": []}')
    result = inspect(tmp_path, "--csv", tmp_path / "samples.csv")
    assert "at least one finished run to inspect, got none" in result.output
    assert result.exit_code == 2
    assert not (tmp_path / "samples.csv").exists()


def test_the_page_and_both_tables_are_written(run, tmp_path):
    files = {name: tmp_path / f"samples.{name}" for name in ("csv", "parquet")}
    page = tmp_path / "page.html"
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    result = inspect(run, "--out", page, *options)
    assert result.exit_code == 0, result.output
    assert f"page: {page}" in result.stdout
    assert "of the sample-steps skipped" in result.stdout
    assert "Suspected wrong labels" in page.read_text(encoding="utf-8")
    with files["csv"].open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    table = pyarrow.parquet.read_table(files["parquet"])
    assert table.num_rows == len(rows) == 250
    assert table.column("index").to_pylist() == [int(row["index"]) for row in rows]
    scores = table.column("score").to_numpy()
    assert (np.diff(scores) <= 0).all()
    np.testing.assert_allclose(scores, [float(row["score"]) for row in rows], atol=1e-5)
    skipped = sum(line["skipped"] for line in read_run(run).metrics)
    assert sum(table.column("times_skipped").to_pylist()) == skipped > 0
    # The indices are those of the dataset, of which 50 images are held out.
    assert max(table.column("index").to_pylist()) > 249


def test_the_suspects_of_the_first_run_that_skipped_are_printed(run, tmp_path):
    full = tmp_path / "full"
    train(make_recipe(RECIPE).replaced("pruning", policy="full"), full)
    result = inspect(full, run, "--out", tmp_path / "page.html", "--no-network")
    assert result.exit_code == 0, result.output
    first, *lines, last = result.stdout.splitlines()
    assert re.fullmatch(
        r"lenet adaptive 0: [1-9].*% of the sample-steps skipped; .* suspected", first
    )
    assert sum(line.startswith("  suspect ") for line in lines) == 5
    assert last == f"page: {tmp_path / 'page.html'}, with 1 more arm"


def test_json_has_the_figures_of_each_arm(run, tmp_path):
    result = inspect(run, "--out", tmp_path / "page.html", "--json", "--no-network", "--most", 5)
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    (arm,) = shown["arms"]
    assert arm["samples"] == 250
    assert arm["wrong_labels"] == 50
    assert arm["shown"] == len(arm["first"]) == 5
    assert shown["page"] == str(tmp_path / "page.html")


@pytest.mark.parametrize("most", [3, 240])
def test_the_number_of_cards_to_review_can_be_given(most, run, tmp_path):
    """Without it, so many labels are estimated to be wrong: some number between these two."""
    shown = []
    for more in ((), ("--most", most)):
        result = inspect(run, "--out", tmp_path / "page.html", "--no-network", *more)
        assert result.exit_code == 0, result.output
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        shown.append(page.count('<li class="card"'))
    assert shown[1] == most
    assert 3 < shown[0] < 240


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--most", "0"], "expected --most to be at least 1, got 0"),
        (["--out", "."], "expected --out to be a file, got the folder ."),
        (["--csv", "."], "expected --csv to be a file, got the folder ."),
    ],
)
def test_wrong_options_are_refused(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = inspect(run, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_history_is_refused(tmp_path):
    train(make_recipe(RECIPE, ["run.history=false", "training.epochs=2"]), tmp_path / "run")
    result = inspect(tmp_path / "run", "--out", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "expected the history of the samples in" in result.stderr
    assert not (tmp_path / "page.html").exists()
