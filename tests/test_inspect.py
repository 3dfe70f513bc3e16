"""``fineprune inspect``: the page, the table of labels, and what is printed."""

import base64
import csv
import dataclasses
import io
import json
import re
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from commands import invoke, printed
from PIL import Image
from test_report import parse_strictly

import fineprune as fp
from fineprune.datasets import cifar
from fineprune.errors import InputError
from fineprune.inspection.inspected import read_inspected
from fineprune.inspection.label_table import COLUMNS, label_table
from fineprune.report.inspection import class_rows, write_inspection
from fineprune.runs.run import read_run, read_runs
from fineprune.runs.training_set import read_training_set
from fineprune.training.data import load_data
from fineprune.training.recipe import make_recipe
from fineprune.training.trainer import train

RECIPE: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "train_size": 400, "label_noise": 0.2, "validation": 50},
    "training": {"epochs": 8, "batch_size": 16, "lr": 0.02, "evaluate_every": 8},
    "pruning": {"policy": "adaptive", "save": 0.3},
    "run": {"device": "cpu", "threads": 1, "precision": "float32", "compile": "off"},
}
SAMPLES = 350


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect") / "run"
    train(make_recipe(RECIPE), folder)
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect") / "full"
    train(make_recipe(RECIPE, ["pruning.policy=full"]), folder)
    return folder


def inspect(*arguments):
    return invoke("inspect", *arguments)


@pytest.fixture
def table(tmp_path):
    """Write a table with some options, and return its rows."""

    def write(*arguments):
        path = tmp_path / "labels.csv"
        path.unlink(missing_ok=True)
        printed("inspect", *arguments, "--out", tmp_path / "page.html", "--labels", path)
        return rows_of(path)

    return write


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cards(text):
    return re.findall(r'<li class="card".*?</li>', text, re.DOTALL)


# -- the page --------------------------------------------------------------------------------------


def test_the_page_lists_exactly_the_suspects_and_is_the_same_each_time(run, tmp_path):
    inspected = read_inspected(read_runs([run]))
    number = inspected.ranking.num_suspects
    pages = []
    for name in ("first.html", "second.html"):
        write_inspection(inspected, tmp_path / "new" / name)
        pages.append((tmp_path / "new" / name).read_text(encoding="utf-8"))
    text = pages[0]
    assert pages[1] == text
    parse_strictly(text)
    assert not re.search(r"<script[^>]+src|@import|<link|<iframe", text)
    assert not re.search(r' (?:src|href|action)="(?!#|data:image/)', text)
    order, _, suggestions = inspected.ranking.suspects()
    shown = cards(text)
    assert len(shown) == number > 20
    assert f"{number} of {SAMPLES} labels" in text
    assert "most suspicious samples are listed" not in text
    for card, sample, suggestion in zip(shown, order.tolist(), suggestions.tolist(), strict=False):
        index = inspected.training_set.index[sample]
        assert f'data-index="{index}"' in card
        assert f'data-suggestion="{suggestion}"' in card
    # The indices are those of the dataset, of which 50 images are held out.
    assert max(int(i) for i in re.findall(r'data-index="(\d+)"', text)) >= SAMPLES


def test_each_card_shows_the_picture_of_its_sample(run, tmp_path):
    inspected = read_inspected(read_runs([run]))
    write_inspection(inspected, tmp_path / "page.html", most=100)
    loaded = load_data(make_recipe(RECIPE))
    source: Any = loaded.train
    pictures = dict(zip(loaded.train.index.tolist(), source._chosen.numpy(), strict=True))
    shown = cards((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len(shown) == 100
    for card in shown:
        encoded, number = re.findall(r'base64,([^"]+)" alt="sample (\d+)"', card)[0]
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))[..., 0].astype(float)
        distances = {i: np.abs(p[0] - pixels).mean() for i, p in pictures.items()}
        assert min(distances, key=distances.__getitem__) == int(number)


def test_the_evidence_of_several_runs_is_added_and_every_number_is_its_number(run, full, tmp_path):
    shown = json.loads(printed("inspect", full, run, "--out", tmp_path / "page.html", "--json"))
    inspected = read_inspected(read_runs([full, run]))
    visits = [read_inspected(read_runs([folder])).ranking.visits for folder in (full, run)]
    assert inspected.ranking.visits == pytest.approx(sum(visits))
    number = inspected.ranking.num_suspects
    assert (shown["suspects"], shown["samples"]) == (number, SAMPLES)
    assert shown["facts"][0].startswith(f"{number} of {SAMPLES} labels")
    assert sum(row["suspects"] for row in shown["classes"]) == number
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(cards(text)) == number
    assert "The evidence of 2 runs is added." in text
    wrong = load_data(make_recipe(RECIPE)).wrong
    assert wrong is not None
    first = inspected.ranking.suspects()[0][: int(wrong.sum())]
    assert wrong[first].mean() > 0.8


def test_a_second_training_is_left_out_beside_the_first_one(full, tmp_path):
    train(make_recipe(RECIPE, ["pruning.policy=full", f"data.without={full}"]), tmp_path / "second")
    both = read_inspected(read_runs([full, tmp_path / "second"]))
    assert [run.path for run in both.runs] == [full]
    alone = read_inspected(read_runs([tmp_path / "second"]))
    assert alone.watch.num_samples < SAMPLES


def test_runs_on_other_labels_are_refused(full, tmp_path):
    other = make_recipe(RECIPE, ["data.label_noise_seed=1", "training.epochs=1"])
    train(other, tmp_path / "other")
    result = inspect(full, tmp_path / "other", "--out", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "expected runs on the same samples and labels, got different ones in" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_what_is_said_of_the_classes_is_counted(run):
    inspected = read_inspected(read_runs([run]))
    rows = class_rows(inspected)
    labels = inspected.training_set.trained_labels
    assert [row.samples for row in rows] == np.bincount(labels).tolist()
    finished = read_run(run)
    skipped = sum(line["skipped"] for line in finished.metrics)
    steps = SAMPLES * finished.summary.epochs
    assert skipped > 0
    assert sum(row.skipped * row.samples for row in rows) * 8 == pytest.approx(skipped)
    assert skipped / steps == pytest.approx(finished.summary.skipped_share)
    evaluated = np.load(run / "history" / "evaluated.npy")
    right = sum((row.accuracy or 0) * int((evaluated[0] == i).sum()) for i, row in enumerate(rows))
    assert right / evaluated.shape[1] == pytest.approx(finished.summary.accuracy_last)


def test_without_its_last_predictions_a_run_has_no_accuracies_of_classes(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "history" / "evaluated.npy").unlink()
    assert {row.accuracy for row in class_rows(read_inspected(read_runs([folder])))} == {None}


def test_samples_that_no_batch_had_room_for_were_not_skipped(tmp_path):
    changes = ["pruning.policy=full", "training.epochs=2", "training.batch_size=64"]
    train(make_recipe(RECIPE, [*changes, "training.drop_last=true"]), tmp_path / "run")
    assert not read_inspected(read_runs([tmp_path / "run"])).times_skipped.any()


def test_hostile_names_are_escaped(run, tmp_path):
    evil = "<script>alert(1)</script>&\"'"
    inspected = read_inspected(read_runs([run]))
    (finished,) = inspected.runs
    summary = dataclasses.replace(finished.summary, network=evil, git=evil)
    known = inspected.training_set
    keys = tuple(f"{evil}{number}" for number in range(len(known.labels)))
    hostile = dataclasses.replace(
        inspected,
        runs=[dataclasses.replace(finished, summary=summary, title=evil)],
        training_set=dataclasses.replace(known, classes=(evil, *"bcdefghij"), keys=keys),
    )
    write_inspection(hostile, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;") > 20
    parse_strictly(text)


def test_pictures_of_other_data_are_not_shown(run, tmp_path, monkeypatch):
    def fetch(*given, **options):
        raise AssertionError("a download")

    monkeypatch.setattr(cifar, "fetch", fetch)
    inspected = read_inspected(read_runs([run]))
    (finished,) = inspected.runs
    data = {"name": "cifar10", "dir": "/missing"}
    recipe = {**finished.recipe, "data": {**finished.recipe["data"], **data, "download": True}}
    changed = dataclasses.replace(inspected, runs=[dataclasses.replace(finished, recipe=recipe)])
    write_inspection(changed, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "The samples themselves are not shown: " in text
    assert "<img" not in text
    assert len(cards(text)) == inspected.ranking.num_suspects


# -- the table -------------------------------------------------------------------------------------


def test_every_sample_has_one_row_the_most_suspicious_first(run, table):
    rows = table(run)
    assert tuple(rows[0]) == COLUMNS
    assert sorted(int(row["index"]) for row in rows) == list(range(400))
    scores = [float(row["score"]) for row in rows[:SAMPLES]]
    assert scores == sorted(scores, reverse=True)
    number = read_inspected(read_runs([run])).ranking.num_suspects
    assert sum(score > 0 for score in scores) == number
    for row, score in zip(rows, scores, strict=False):
        assert float(row["confidence"]) == pytest.approx(1 / (1 + np.exp(-score)), abs=1e-3)
    # Those that were held out follow in their order.
    held_out = [int(row["index"]) for row in rows[SAMPLES:]]
    assert held_out == sorted(held_out)
    assert not any(row["suggestion"] or row["score"] for row in rows[SAMPLES:])
    skipped = sum(line["skipped"] for line in read_run(run).metrics)
    assert sum(int(row["skipped"] or 0) for row in rows) == skipped > 0


def test_the_suspects_are_wrong_and_the_suggestions_are_right(full, table):
    clean = make_recipe(RECIPE, ["data.label_noise=0.0"])
    data = load_data(clean)
    assert data.train.labels is not None
    true = dict(zip(data.train.index.tolist(), data.train.labels.tolist(), strict=True))
    suspects = table(full)[:20]
    wrong = [row for row in suspects if int(row["label"]) != true[int(row["index"])]]
    assert len(wrong) >= 18
    assert sum(int(row["suggestion"]) == true[int(row["index"])] for row in wrong) >= 15


def test_suggestions_are_accepted_with_their_confidence(run, table, tmp_path):
    before, after = table(run), table(run, "--accept", 0.7)
    changed = 0
    for plain, accepted in zip(before, after, strict=True):
        sure = bool(plain["confidence"]) and float(plain["confidence"]) >= 0.7
        assert accepted["label"] == (plain["suggestion"] if sure else plain["label"])
        changed += sure
    assert changed > 5
    (tmp_path / "labels.csv").unlink()
    options = "--labels", tmp_path / "labels.csv", "--accept", 0.7
    said = inspect(run, "--out", tmp_path / "page.html", *options).stdout
    assert f"labels: {tmp_path / 'labels.csv'}, with {changed} suggestions accepted" in said
    # No label changes that is not suspected, whatever is accepted.
    _, accepted = label_table(read_inspected(read_runs([run])), accept=0.01)
    assert accepted == read_inspected(read_runs([run])).ranking.num_suspects


def test_the_command_that_is_printed_trains_with_the_table(run, tmp_path):
    told = inspect(
        run, "--out", tmp_path / "page.html", "--labels", tmp_path / "labels.csv", "--json"
    )
    command = json.loads(told.stdout)["command"]
    program, *arguments = command.split()
    assert program == "fineprune"
    short = ["training.epochs=1", "training.evaluate_every=1"]
    arguments[arguments.index("--out") + 1] = str(tmp_path / "again")
    printed(*arguments, *short)
    np.testing.assert_array_equal(
        read_training_set(tmp_path / "again", SAMPLES).labels,
        read_training_set(run, SAMPLES).labels,
    )


def test_a_run_in_the_current_folder_has_a_name(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run)
    options = "--out", tmp_path / "page.html", "--labels", tmp_path / "labels.csv"
    assert f"--out {run}-relabelled" in inspect(".", *options).stdout


def test_no_table_is_written_whose_words_would_have_two_meanings(run):
    inspected = read_inspected(read_runs([run]))
    for classes, message in (
        (("drop", *"bcdefghij"), "expected no class that is named 'drop'"),
        (tuple("aacdefghij"), "a unique name for each class"),
    ):
        known = dataclasses.replace(inspected.training_set, classes=classes)
        with pytest.raises(InputError, match=message):
            label_table(dataclasses.replace(inspected, training_set=known))


# -- what is printed, and wrong input --------------------------------------------------------------


def test_facts_and_suspects_are_printed(run, tmp_path):
    page = tmp_path / "page.html"
    first, *lines, last = printed("inspect", run, "--out", page).splitlines()
    assert re.fullmatch(rf"\d+ of {SAMPLES} labels \(.*%\) are suspected: .*", first)
    assert sum(line.startswith("  suspect ") for line in lines) == 5
    assert last == f"page: {page}"


def test_a_page_without_suspects_says_so(tmp_path):
    changes = ["data.train_size=64", "data.label_noise=none", "data.validation=0"]
    changes += ["training.epochs=60", "training.evaluate_last=1", "pruning.policy=full"]
    train(make_recipe(RECIPE, changes), tmp_path / "run")
    page = tmp_path / "page.html"
    assert "0 of 64 labels" in inspect(tmp_path / "run", "--out", page).stdout
    assert cards(page.read_text(encoding="utf-8")) == []
    inspect(tmp_path / "run", "--out", page, "--most", 7)
    text = page.read_text(encoding="utf-8")
    assert len(cards(text)) == 7
    assert "The 7 most suspicious samples are listed." in text


def test_a_report_shows_the_suspects_of_its_runs_folded(run, full, tmp_path):
    """Their number is that of ``inspect`` for the same runs, and their cards are the same."""
    page, report = tmp_path / "page.html", tmp_path / "report.html"
    inspect(full, run, "--out", page)
    printed("report", full, run, "--out", report)
    texts = [path.read_text(encoding="utf-8") for path in (page, report)]
    number = read_inspected(read_runs([full, run])).ranking.num_suspects
    assert all(f"{number} of {SAMPLES} labels" in text for text in texts)
    assert cards(texts[1]) == cards(texts[0])[:24]
    before = texts[1][: texts[1].index('<section id="review"')]
    assert before.count("<details>") == before.count("</details>") + 1
    parse_strictly(texts[1])


def test_files_of_another_run_are_refused(run, tmp_path):
    def refused(message):
        result = inspect(folder, "--out", tmp_path / "page.html")
        assert result.exit_code == 2
        assert message in result.stderr

    folder = shutil.copytree(run, tmp_path / "run")
    file = folder / "history/evaluated.npy"
    labels, predictions = np.load(file)
    unknown = np.where(labels == predictions, predictions, 99)  # As accurate, but no classes.
    for others in ((labels, labels), (labels, unknown)):
        np.save(file, np.stack(others).astype(labels.dtype))
        refused("the file is damaged or of another run")
    file.unlink()
    labels = (read_training_set(run, SAMPLES).trained_labels + 1) % 10
    watch = fp.LabelWatch(SAMPLES, 10)
    watch.record(torch.arange(SAMPLES), torch.randn(SAMPLES, 10), torch.from_numpy(labels))
    torch.save(watch.state_dict(), folder / "history/evidence.pt")
    refused("got that on others: the files are of different runs")
