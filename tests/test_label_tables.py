"""Tables of labels belong to their samples: by key, with names, whatever changes later."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import printed
from PIL import Image
from torch.utils.data import Dataset

from fineprune.datasets.label_file import read_labels
from fineprune.errors import InputError
from fineprune.experiments.arm_table import grouped
from fineprune.report.comparison_table import found_rows
from fineprune.runs.run import read_run
from fineprune.runs.training_set import read_training_set
from fineprune.training.data import load_data
from fineprune.training.recipe import make_recipe
from fineprune.training.trainer import train

DIGITS = {"name": "digits", "train_size": 300, "label_noise": 0.2, "validation": 50}
WRONG = 8  # Images in a wrong folder.


def recipe(data, *changes, epochs=8):
    training = {"epochs": epochs, "batch_size": 16, "lr": 0.02, "evaluate_every": epochs}
    settings = {
        "data": data,
        "training": training,
        "pruning": {"policy": "full"},
        "run": {"device": "cpu", "threads": 1, "precision": "float32"},
    }
    return make_recipe(settings, changes)


def labels_of(run, table, *options):
    """Write the table of the labels of a run."""
    page = table.with_name("page-of-table.html")
    return printed("inspect", run, "--out", page, "--labels", table, *options)


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def edit(path, change):
    """Change the rows of a table, each a dict, in place."""
    rows = rows_of(path)
    for number, row in enumerate(rows):
        change(number, row)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits") / "run"
    train(recipe(DIGITS), folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# -- after the run ---------------------------------------------------------------------------------


def test_a_table_stays_that_of_the_training_whatever_changes_later(digits, tmp_path, monkeypatch):
    """What was dropped stays dropped, and neither the file nor the folder is read again."""
    first, second = tmp_path / "first.csv", tmp_path / "elsewhere/second.csv"
    labels_of(digits, first)
    edit(first, lambda number, row: row.update(label="drop") if number < 9 else None)
    trained = {row["index"]: row["label"] for row in rows_of(first)}
    monkeypatch.chdir(tmp_path)
    train(recipe({**DIGITS, "label_noise": None, "labels": "first.csv"}, epochs=2), Path("again"))
    edit(first, lambda number, row: row.update(label=str((number + 1) % 10)))
    second.parent.mkdir()
    monkeypatch.chdir(second.parent)
    labels_of(tmp_path / "again", second)
    assert {row["index"]: row["label"] for row in rows_of(second)} == trained
    assert list(trained.values()).count("drop") == 9


# -- one number of suspects ------------------------------------------------------------------------


def test_all_commands_count_the_same_suspects(digits, tmp_path):
    summary = read_run(digits).summary
    assert summary.suspicion is not None
    number = summary.suspicion.suspects
    assert number is not None
    assert number > 10
    page, table = tmp_path / "page.html", tmp_path / "labels.csv"
    shown = json.loads(labels_of(digits, table, "--json"))
    assert shown["suspects"] == number
    text = table.with_name("page-of-table.html").read_text(encoding="utf-8")
    assert text.count('<li class="card"') == number
    assert sum(float(row["score"] or -1) > 0 for row in rows_of(table)) == number
    printed("report", digits, "--out", page)
    for each in (page.read_text(encoding="utf-8"), text, printed("plan", digits)):
        assert f"{number} of 250 labels" in each
    # ``full`` suspects nothing by itself, but its logits were recorded.
    (row,) = found_rows(*grouped([read_run(digits)]))
    assert row["suspects"] == number
    assert row["roc_area"] == summary.suspicion.roc_area
    assert row["roc_area"] > 0.9


# -- image files -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write images of one colour per class, in folders that are named with numbers."""
    top = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(90):
        true = number % 3
        pixels = rng.integers(0, 90, (24, 24, 3))
        pixels[..., true] += 120
        given = (true + 1) % 3 if number < WRONG else true
        path = top / str(given + 1) / f"{number:03d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return top


def files(folder, **data):
    size = {"image_size": 32, "resize": 32, "crop": "crop", "flip": False}
    return {"name": "images", "train": str(folder), "validation": 20, **size, **data}


@pytest.fixture(scope="module")
def of_files(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("files") / "run"
    train(recipe(files(folder)), run)
    return run


def test_a_table_of_image_files_names_their_paths_and_finds_them(of_files, folder, tmp_path):
    table = tmp_path / "labels.csv"
    said = labels_of(of_files, table)
    rows = rows_of(table)
    assert len(rows) == 90
    # The folder of an image names its class, and its number says whether this is wrong.
    assert all(row["key"].split("/")[0] == row["label"] for row in rows)
    assert sum(int(row["key"][2:5]) < WRONG for row in rows[:10]) >= 5
    assert f"  suspect {rows[0]['key']}: labelled {rows[0]['label']}" in said
    # As if images had been added in front: all indices have changed.
    edit(table, lambda number, row: row.update(index=str((int(row["index"]) + 1) % 90)))
    again = load_data(recipe(files(folder, labels=str(table))))
    assert (again.train.labels == load_data(recipe(files(folder))).train.labels).all()
    assert again.num_samples == 70
    edit(table, lambda number, row: row.update(key="1/gone.png") if not number else None)
    with pytest.raises(InputError, match=r"expected the key of a training sample in line 2 .*gone"):
        load_data(recipe(files(folder, labels=str(table))))
    with pytest.raises(InputError, match=r"expected a table without keys in line 2"):
        read_labels(table, ["1", "2", "3"], 90)


def review_of(page, *arguments):
    printed("inspect", *arguments, "--out", page)
    text = page.read_text(encoding="utf-8")
    return text[text.index('<section id="review"') : text.index('id="review-data"')]


def test_the_review_shows_image_files_with_their_paths_and_classes(of_files, folder, tmp_path):
    review = review_of(tmp_path / "page.html", of_files)
    cards = review.count('<li class="card"')
    assert cards >= 5
    assert review.count('<img src="data:image/webp;base64,') == cards
    assert all(f"<small>{path} (" in review for path in ("2/000.png", "3/001.png"))
    moved = folder.rename(folder.with_name("moved"))
    try:
        review = review_of(tmp_path / "page.html", of_files)
    finally:
        moved.rename(folder)
    assert "The samples themselves are not shown" in review
    assert "2/000.png" in review
    assert "<img" not in review


def test_files_that_were_renamed_or_became_unreadable_do_not_stop_a_page(
    of_files, folder, tmp_path, caplog
):
    kept = {path: path.read_bytes() for path in folder.glob("*/*.png")}
    first = folder / "2/000.png"
    first.rename(first.with_name("another.png"))
    try:
        renamed = review_of(tmp_path / "page.html", of_files)
        for path in kept:
            path.write_bytes(b"no picture")
        unreadable = review_of(tmp_path / "page.html", of_files)
        printed("report", of_files, "--out", tmp_path / "report.html")
    finally:
        first.with_name("another.png").unlink()
        for path, content in kept.items():
            path.write_bytes(content)
    cards = renamed.count('<li class="card"')
    assert renamed.count("This sample cannot be read") == 1
    assert renamed.count("<img src=") == cards - 1
    assert "1 of the 70 samples of the run no longer exist" in caplog.text
    assert unreadable.count("This sample cannot be read") == cards
    assert "<img" not in unreadable
    assert "This sample cannot be read" in (tmp_path / "report.html").read_text(encoding="utf-8")


# -- data of the user's own ------------------------------------------------------------------------


class Shades(Dataset[tuple[torch.Tensor, int]]):
    """Dark and bright pictures, whose labels are transformed."""

    classes = ("dark", "bright")

    def __init__(self, samples, first=0):
        draw = torch.Generator().manual_seed(first)
        self.targets = [10 * (index % 2) + 10 for index in range(samples)]
        self.target_transform = lambda target: target // 10 - 1
        self.x = torch.rand(samples, 1, 32, 32, generator=draw)
        self.x += torch.arange(samples)[:, None, None, None] % 2
        self.keys = [f"shade-{first + index}" for index in range(samples)]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.target_transform(self.targets[index])


def shades():
    return Shades(80), Shades(20, 80)


def own(function, *changes, epochs=4, **data):
    return recipe({"name": f"{__name__}:{function}", **data}, *changes, epochs=epochs)


def test_own_data_train_with_a_table_of_their_keys(tmp_path):
    run, table = tmp_path / "run", tmp_path / "labels.csv"
    train(own("shades", validation=20), run)
    # What was trained, not the raw targets.
    assert set(read_training_set(run, 60).trained_labels.tolist()) == {0, 1}
    labels_of(run, table)
    rows = rows_of(table)
    assert {row["label"] for row in rows} == {"dark", "bright"}
    assert sorted(row["key"] for row in rows) == sorted(f"shade-{i}" for i in range(80))
    for row in rows:
        assert row["label"] == ("dark", "bright")[int(row["key"].split("-")[1]) % 2]

    def change(number, row):
        if number < 2:
            row["label"] = "drop" if number else {"dark": "bright"}.get(row["label"], "dark")

    edit(table, change)
    changed, dropped = rows_of(table)[:2]
    settings = {"labels": str(table), "true_labels": "dataset", "validation": 20}
    again = load_data(own("shades", **settings))
    assert again.num_samples == 59
    assert again.wrong is not None
    assert again.wrong.sum() == 1
    for workers in (0, 1):
        train(
            own("shades", f"data.workers={workers}", epochs=2, **settings), tmp_path / f"{workers}"
        )
        np.testing.assert_array_equal(
            read_training_set(tmp_path / f"{workers}", 59).trained_labels, again.train.labels
        )
    labels_of(tmp_path / "0", tmp_path / "second.csv")
    labels = {row["key"]: row["label"] for row in rows_of(tmp_path / "second.csv")}
    assert labels[dropped["key"]] == "drop"
    assert labels[changed["key"]] == changed["label"]


def test_own_data_are_shown_if_their_code_may_run(tmp_path):
    train(own("shades", epochs=2), tmp_path / "run")
    review = review_of(tmp_path / "page.html", tmp_path / "run")
    assert "expected --own-data to show samples of" in review
    assert "<img" not in review
    review = review_of(tmp_path / "page.html", tmp_path / "run", "--own-data", "--most", 20)
    assert (
        review.count('<img src="data:image/png;base64,') == review.count('<li class="card"') == 20
    )


def backwards():
    """The data of ``shades`` in another order."""
    train, test = Shades(80), Shades(20, 80)
    for values in (train.targets, train.keys):
        values.reverse()
    train.x = train.x.flip(0)
    return train, test


def backwards_without_keys():
    train, test = backwards()
    del train.keys
    return train, test


def test_own_data_that_have_changed_are_found_by_their_keys_or_said(tmp_path, monkeypatch, caplog):
    train(own("shades", epochs=2), tmp_path / "run")

    def page(function):
        caplog.clear()
        monkeypatch.setitem(globals(), "shades", function)
        text = review_of(tmp_path / "page.html", tmp_path / "run", "--own-data", "--most", 80)
        return re.findall('src="data:image/png;base64,[^"]*"', text)

    before = page(shades)
    assert not caplog.text
    assert page(backwards) == before
    assert not caplog.text
    assert page(backwards_without_keys) != before
    assert "returns other data than in the run, so the page may not show" in caplog.text
