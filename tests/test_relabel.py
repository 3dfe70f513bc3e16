"""``fineprune relabel``: the table that a person edits, and that a recipe reads."""

import csv
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.datasets.label_file import DROP, read_labels
from fineprune.errors import InputError
from fineprune.inspection.inspected import Inspected, read_inspected
from fineprune.inspection.relabel import label_table
from fineprune.inspection.suspects import suspects_of
from fineprune.runs.run import read_run
from fineprune.runs.training_set import read_training_set
from fineprune.training.data import load_data
from fineprune.training.loop import train
from fineprune.training.recipe import make_recipe

RECIPE: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "train_size": 600, "label_noise": 0.2, "validation": 50},
    "training": {"epochs": 20, "batch_size": 16, "lr": 0.02, "evaluate_every": 60},
    "pruning": {"policy": "full"},
    "run": {"device": "cpu", "threads": 1, "precision": "float32", "compile": "off"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("relabel") / "run"
    train(make_recipe(RECIPE), folder)
    return folder


def relabel(*arguments):
    return CliRunner().invoke(app, ["relabel", *map(str, arguments)])


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_suspects_come_first_and_every_image_has_one_row(run, tmp_path):
    result = relabel(run, "--out", tmp_path / "labels.csv", "--most", 30)
    assert result.exit_code == 0, result.output
    assert "30 suspects first" in result.stdout
    rows = rows_of(tmp_path / "labels.csv")
    assert sorted(int(row["index"]) for row in rows) == list(range(len(rows)))
    scores = [float(row["score"]) for row in rows[:30]]
    assert scores == sorted(scores, reverse=True)
    assert not any(row["suggestion"] or row["score"] for row in rows[30:])
    assert [int(row["index"]) for row in rows[30:]] == sorted(int(r["index"]) for r in rows[30:])


def test_a_network_that_knows_all_labels_by_heart_suspects_none_and_says_so(tmp_path):
    changes = ["data.train_size=64", "data.label_noise=none", "data.validation=0"]
    changes += ["training.epochs=60", "training.evaluate_last=1"]
    train(make_recipe(RECIPE, changes), tmp_path / "run")
    result = relabel(tmp_path / "run", "--out", tmp_path / "labels.csv")
    assert "(0 suspects first)" in result.stdout, result.output
    assert "--most 50 lists the 50 most suspicious" in result.stdout
    said = relabel(tmp_path / "run", "--out", tmp_path / "most.csv", "--most", 50).stdout
    assert "(50 suspects first)" in said
    assert "--most" not in said


def test_the_suspects_are_wrong_and_the_suggestions_are_right(run, tmp_path):
    relabel(run, "--out", tmp_path / "labels.csv", "--most", 20)
    clean = make_recipe(RECIPE, ["data.label_noise=0.0"])
    data = load_data(clean)
    assert data.labels is not None
    true = dict(zip(data.weak.index.tolist(), data.labels.tolist(), strict=True))
    suspects = rows_of(tmp_path / "labels.csv")[:20]
    wrong = [row for row in suspects if int(row["label"]) != true[int(row["index"])]]
    assert len(wrong) >= 18
    assert sum(int(row["suggestion"]) == true[int(row["index"])] for row in wrong) >= 15


def test_an_unedited_table_gives_the_labels_of_the_run(run, tmp_path):
    relabel(run, "--out", tmp_path / "labels.csv")
    data = {**RECIPE["data"], "label_noise": None, "labels": str(tmp_path / "labels.csv")}
    recipe = make_recipe({**RECIPE, "data": data})
    np.testing.assert_array_equal(
        load_data(recipe).labels, read_training_set(run, 550).trained_labels
    )


def test_nine_of_ten_is_an_agreement_of_nine_tenths(run, tmp_path, monkeypatch):
    """It is less in float32."""
    found = suspects_of(*read_inspected([read_run(run)]))
    alike = replace(found, agreement=np.full(len(found), 0.9, np.float32))
    monkeypatch.setattr("fineprune.inspection.relabel.suspects_of", lambda *runs: alike)
    relabel(run, "--out", tmp_path / "labels.csv", "--most", 5, "--accept", 0.9)
    rows = rows_of(tmp_path / "labels.csv")[:5]
    assert all(row["label"] == row["suggestion"] for row in rows)


def test_two_classes_with_one_name_are_refused(tmp_path):
    (tmp_path / "labels.csv").write_text("index,label\n0,crane\n1,dog\n")
    with pytest.raises(InputError, match=r"a unique name for each class .*'crane' more than"):
        read_labels(tmp_path / "labels.csv", ["crane", "dog", "crane"], 2)


def test_edits_are_read(run, tmp_path):
    path = tmp_path / "labels.csv"
    relabel(run, "--out", path)
    rows = rows_of(path)
    first, second = int(rows[0]["index"]), int(rows[1]["index"])
    rows[0]["label"], rows[1]["label"] = "drop", "7"
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0].keys())
        table.writeheader()
        table.writerows(rows)
    labels = read_labels(path, [str(number) for number in range(10)], len(rows))
    assert (labels[first], labels[second]) == (DROP, 7)


def test_a_run_is_not_counted_twice(run, tmp_path):
    again = f"{run}/../{run.name}"
    result = relabel(run, again, "--out", tmp_path / "labels.csv")
    assert result.exit_code == 2
    assert f"expected each run once, since evidence is added, got {run} twice" in result.stderr


def test_a_run_in_the_current_folder_has_a_name(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run)
    result = relabel(".", "--out", tmp_path / "labels.csv")
    assert f"--out {run}-relabelled" in result.stdout


def test_a_table_that_may_have_been_edited_is_not_overwritten(run, tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("mine")
    result = relabel(run, "--out", path)
    assert result.exit_code == 2
    assert "expected a new file for --out" in result.stderr
    assert path.read_text() == "mine"


def test_what_was_written_is_told_as_json(run, tmp_path):
    first = relabel(run, "--out", tmp_path / "a.csv", "--most", 5, "--accept", 0.01, "--json")
    told = json.loads(first.stdout)
    rows = rows_of(tmp_path / "a.csv")[:5]
    accepted = sum(row["label"] == row["suggestion"] for row in rows)
    assert accepted > 0
    assert (told["suspects"], told["accepted"]) == (5, accepted)
    said = relabel(run, "--out", tmp_path / "b.csv").stdout
    command = told["command"].replace("a.csv", "b.csv")
    assert told["file"] == str(tmp_path / "a.csv")
    assert f"train with it: {command}\n" in said


@pytest.mark.parametrize("name", ["labels.txt", "labels", "labels.CSV"])
def test_a_table_has_a_name_with_which_it_is_read_again(run, tmp_path, name):
    result = relabel(run, "--out", tmp_path / name)
    assert result.exit_code == 2
    assert "expected a .csv file for --out" in result.stderr
    assert f"such as {tmp_path / 'labels.csv'}" in result.stderr
    assert not (tmp_path / name).exists()


def test_a_run_without_a_history_is_refused(tmp_path):
    recipe = make_recipe(RECIPE, ["run.history=false", "training.epochs=1"])
    train(recipe, tmp_path / "run")
    result = relabel(tmp_path / "run", "--out", tmp_path / "labels.csv")
    assert result.exit_code == 2
    assert "expected the history of the samples" in result.stderr
    assert not (tmp_path / "labels.csv").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the columns index .or key. and label in the first line .*, got none"),
        ("index,class\n0,a\n", "expected the columns index .* and label .*, got index, class"),
        ("index,label\n0,a\n", "expected one row for each of 2 images in .*, got 0 rows for index"),
        ("index,label\n0,a\n0,b\n1,a\n", "expected one row .*, got 2 rows for index 0"),
        ("index,label\n0,a\n2,b\n", "expected an index of 0 to 1 in line 3 of .*, got '2'"),
        ("index,label\n0,a\n-1,b\n", "expected an index of 0 to 1 in line 3 of .*, got '-1'"),
        ("index,label\n0,a\n1,bee\n", "line 3 .* it may be a, b, drop"),
        ("index,label\n0,a\n1\n", "line 3"),
        ("index,label\n\n0,a\n1,\n", "line 4 .*, got '': it may be a, b, drop"),
        ("index,label\n0,a\n1,dorp\n", "got 'dorp': did you mean 'drop'?"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text, message):
    path = tmp_path / "labels.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_labels(path, ["a", "b"], 2)


def test_a_table_may_be_in_any_order_and_have_other_columns(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text('\ufeffscore,label,index\n1, b ,1\n"2",0,0\n', encoding="utf-8")
    assert read_labels(path, ["a", "b"], 2).tolist() == [0, 1]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_table_may_have_the_separators_of_a_spreadsheet(separator, tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text(separator.join(("index", "label\n0", "a\n1", "b\n")))
    assert read_labels(path, ["a", "b"], 2).tolist() == [0, 1]


def test_rows_of_separators_alone_are_no_rows(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("index,label,note\n0,a,\n,,\n1,b,\n,,\n")
    assert read_labels(path, ["a", "b"], 2).tolist() == [0, 1]


def test_a_table_in_another_encoding_says_what_to_do(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("index,label\n0,a\n1,b\n", encoding="utf-16")
    with pytest.raises(InputError, match=r"cannot read it: .*: save it as UTF-8"):
        read_labels(path, ["a", "b"], 2)


def test_the_word_that_leaves_a_sample_out_may_have_capitals_unless_a_class_is_named_so(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("index,label\n0,a\n1,Drop\n")
    assert read_labels(path, ["a", "b"], 2).tolist() == [0, DROP]
    assert read_labels(path, ["a", "Drop"], 2).tolist() == [0, 1]


def test_no_table_is_written_whose_words_would_have_two_meanings(run, monkeypatch):
    inspected = read_inspected([read_run(run)])
    training_set = replace(inspected[0].training_set(), classes=("drop", *"bcdefghij"))
    monkeypatch.setattr(Inspected, "training_set", lambda self: training_set)
    with pytest.raises(InputError, match="expected no class that is named 'drop'"):
        label_table(inspected)


def test_a_setting_can_be_unset_to_train_with_a_table(run, tmp_path):
    relabel(run, "--out", tmp_path / "labels.csv")
    changes = ["data.label_noise=none", f"data.labels={tmp_path / 'labels.csv'}"]
    recipe = make_recipe(RECIPE, changes)
    assert recipe.data.label_noise is None
    assert make_recipe({}, ["distributed.strategy=none"]).distributed.strategy == "none"
    with pytest.raises(InputError, match=r"expected training\.lr to be float, got 'none'"):
        make_recipe({}, ["training.lr=none"])
