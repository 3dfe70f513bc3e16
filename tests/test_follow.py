"""``report --follow`` keeps a page up to date while runs train, and says what is unfinished."""

import json
import re

import pytest
from made_runs import make_compare
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.report.html import write_report
from fineprune.runs.run import read_runs
from fineprune.runs.unfinished import read_followed

RELOADS = '<meta http-equiv="refresh"'


class Trainings:
    """A comparison whose last run is cut off after some epochs, and can go on."""

    def __init__(self, folder):
        self.folder = make_compare(folder, arms=["full", "fine-pruning"], seeds=[0])
        self.run = self.folder / "fine-pruning-0"
        self.lines = (self.run / "metrics.jsonl").read_text().splitlines(keepends=True)
        self.summary = (self.run / "summary.json").read_bytes()
        (self.run / "summary.json").unlink()
        self.train(until=7)

    def train(self, until):
        # The line after it is not written completely.
        text = "".join(self.lines[:until]) + '{"epoch": '
        (self.run / "metrics.jsonl").write_text(text)

    def finish(self):
        (self.run / "metrics.jsonl").write_text("".join(self.lines))
        (self.run / "summary.json").write_bytes(self.summary)


@pytest.fixture
def trainings(tmp_path):
    return Trainings(tmp_path / "c")


def follow(trainings, page, monkeypatch, waits):
    """Run the command; each of its waits calls the next of ``waits`` instead."""
    steps = iter(waits)
    monkeypatch.setattr("time.sleep", lambda seconds: next(steps)())
    return CliRunner().invoke(
        app, ["report", "--follow", str(trainings.folder), "--out", str(page)]
    )


def test_the_page_follows_the_runs_and_ends_with_them(trainings, tmp_path, monkeypatch):
    page, seen = tmp_path / "page.html", []

    def look():
        seen.append(page.read_text())

    def go_on():
        look()
        trainings.train(until=9)

    def finish():
        look()
        trainings.finish()

    result = follow(trainings, page, monkeypatch, [look, go_on, finish])
    assert result.exit_code == 0, result.output
    assert "unfinished runs: 1" in result.stderr
    assert [RELOADS in text for text in seen] == [True] * 3
    # The same files give no new page, and new epochs do.
    assert seen[0] == seen[1] != seen[2]
    assert [re.findall(r"<td>(\d+) of 20</td>", text) for text in seen] == [["7"], ["7"], ["9"]]
    assert "<h1>digits-lenet</h1>" in seen[0]
    assert "Unfinished: 1 of 2" in seen[0]
    assert "fine-pruning (fine-pruning-0)" in seen[0]
    # It has figures of its own, and is in no table of results.
    assert seen[0].count("<svg ") == 2 + 3
    assert not re.search(r'<th scope="row">fine-pruning</th>', seen[0])
    final = page.read_text()
    assert RELOADS not in final
    assert "Unfinished" not in final
    assert '<th scope="row">fine-pruning</th>' in final
    assert result.stdout.splitlines()[-1].startswith("Fine-pruning: ")


@pytest.mark.parametrize("name", ["fine-pruning-0/summary.json", "compare.json"])
@pytest.mark.parametrize("looks", [3, 30])
def test_a_file_that_is_half_copied_is_looked_at_again(
    trainings, tmp_path, monkeypatch, looks, name
):
    whole = (trainings.folder / "compare.json").read_bytes()

    def copy_a_half():
        trainings.finish()
        file = trainings.folder / name
        file.write_bytes(file.read_bytes()[:60])

    def copy_all():
        trainings.finish()
        (trainings.folder / "compare.json").write_bytes(whole)

    page, waits = tmp_path / "page.html", [copy_a_half] + [lambda: None] * (looks - 1)
    result = follow(trainings, page, monkeypatch, [*waits, copy_all])
    assert result.exit_code == (0 if looks < 30 else 2), result.output
    assert (RELOADS in page.read_text()) == (looks == 30)
    assert ("expected JSON in" in result.stderr) == (looks == 30)


def test_ctrl_c_leaves_a_page_that_does_not_reload(trainings, tmp_path, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    page = tmp_path / "page.html"
    result = follow(trainings, page, monkeypatch, [interrupt])
    assert result.exit_code == 130
    assert "fineprune: stopped" in result.stderr
    assert "Traceback" not in result.output
    text = page.read_text()
    assert "Unfinished: 1 of 2" in text
    assert RELOADS not in text


def test_runs_that_have_not_begun_are_named(trainings, tmp_path, monkeypatch):
    listing = json.loads((trainings.folder / "compare.json").read_text())
    listing["runs"].append({"arm": "full", "seed": 1, "path": "full-1"})
    (trainings.folder / "compare.json").write_text(json.dumps(listing))
    finished, unfinished = read_followed([trainings.folder])
    assert [run.path.name for run in finished] == ["full-0"]
    assert [(run.name, run.epochs, len(run.metrics)) for run in unfinished] == [
        ("fine-pruning (fine-pruning-0)", 20, 7),
        ("not begun (full-1)", None, 0),
    ]


def test_runs_of_two_comparisons_are_told_apart(tmp_path):
    folders = [Trainings(tmp_path / name).folder for name in ("one", "other")]
    write_report([], tmp_path / "page.html", 0.004, read_followed(folders)[1])
    text = (tmp_path / "page.html").read_text()
    for folder in folders:
        name = f"fine-pruning (fine-pruning-0) in {folder}"
        assert text.count(name) >= 2  # in the table and in the legends of the figures


def test_a_single_run_can_be_followed_from_its_first_epoch(trainings, tmp_path, monkeypatch):
    trainings.folder, page, seen = trainings.run, tmp_path / "page.html", []
    trainings.train(until=0)

    def begin():
        seen.append(page.read_text())
        trainings.train(until=2)

    def finish():
        seen.append(page.read_text())
        trainings.finish()

    result = follow(trainings, page, monkeypatch, [begin, finish])
    assert result.exit_code == 0, result.output
    assert [text.count("<svg ") for text in seen] == [0, 2]
    assert RELOADS not in page.read_text()


def test_only_runs_and_outputs_apart_from_them_are_followed(trainings, tmp_path):
    def refused(*arguments):
        result = CliRunner().invoke(app, ["report", "--follow", *map(str, arguments)])
        assert result.exit_code == 2, result.output
        return result.stderr

    assert "expected a run or a comparison" in refused(tmp_path / "nowhere")
    out = ["--out", trainings.run / "recipe.toml"]
    assert "expected --out not to be a file of a run" in refused(trainings.folder, *out)
    (trainings.run / "metrics.jsonl").write_text("[]\n")
    assert "expected an object in line 1" in refused(trainings.folder)
    (trainings.run / "metrics.jsonl").write_text('{"epoch": 0}\n')
    assert "expected lr in line 1" in refused(trainings.folder)


def test_a_report_says_what_a_folder_without_a_finished_run_holds(trainings, tmp_path):
    with pytest.raises(ValueError, match="which is not finished: wait for its end, or run"):
        read_runs([trainings.folder])
    with pytest.raises(ValueError, match="found none: give the folder of a run"):
        read_runs([trainings.folder / "misspelt"])
    (tmp_path / "one").mkdir()
    (tmp_path / "one/recipe.toml").touch()
    with pytest.raises(ValueError, match="got an unfinished one: finish the run with --resume"):
        read_runs([tmp_path / "one"])
    (tmp_path / "s").mkdir()
    (tmp_path / "s/scale.json").write_text("{}")
    with pytest.raises(ValueError, match="got a scaling experiment: run fineprune scale again"):
        read_runs([tmp_path / "s"])
    with pytest.raises(ValueError, match="found none: give the folder of a run"):
        read_runs([tmp_path])
