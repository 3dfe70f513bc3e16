"""The page of an inspection, made from small runs on digits and from invented histories."""

import base64
import dataclasses
import io
import json
import re
import shutil
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from made_runs import made_recipe, make_run, with_summary
from PIL import Image
from test_report import parse_strictly

from fineprune.datasets import cifar
from fineprune.errors import InputError
from fineprune.inspection.inspected import read_inspected, runs_by_arm
from fineprune.inspection.known_samples import known_samples
from fineprune.inspection.overlap import Overlap, expected_jaccard, skipped_overlaps
from fineprune.inspection.pictures import outputs_of, pictures_of
from fineprune.inspection.suspects import suspects_of
from fineprune.labels.review_page import LINE_HEIGHT, LINE_WIDTH
from fineprune.report.inspection import write_inspection
from fineprune.report.inspection_tables import confused_pairs, overlap_table
from fineprune.report.sample_gallery import VISIBLE, SampleViews, make_gallery
from fineprune.report.sparkline import sparkline
from fineprune.runs.files import CHECKPOINT, finite
from fineprune.runs.history import pack_classes, pack_epoch
from fineprune.runs.run import read_runs
from fineprune.runs.training_set import TrainingSet, write_training_set
from fineprune.training.checkpoint import load_checkpoint, save_checkpoint
from fineprune.training.loop import train
from fineprune.training.recipe import make_recipe

RECIPE = {
    "data": {"name": "digits", "train_size": 300, "label_noise": 0.3},
    "training": {
        "epochs": 8,
        "batch_size": 20,
        "lr": 0.05,
        "evaluate_every": 8,
        "evaluate_last": 1,
    },
    "pruning": {"policy": "adaptive", "save": 0.3, "first_epoch": 2},
    "run": {"device": "cpu", "threads": 1, "precision": "float32", "compile": "off"},
}
MOST_BYTES = 5_000_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        recipe = make_recipe(RECIPE, [f"run.seed={seed}", "run.arm=adaptive"])
        train(recipe, folder / f"adaptive-{seed}")
    train(make_recipe(RECIPE, ["pruning.policy=full", "run.arm=full"]), folder / "full-0")
    return folder


@pytest.fixture(scope="module")
def runs(trained):
    return read_inspected(read_runs(sorted(trained.iterdir())))


@pytest.fixture
def page(tmp_path):
    def write(runs, **options):
        summary = write_inspection(runs, tmp_path / "new" / "page.html", **options)
        text = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
        check(text)
        return text, summary

    return write


def check(text):
    """Check that a page is well-formed and fetches nothing."""
    parse_strictly(text)
    assert not re.search(r"<script[^>]+src", text)
    assert not re.search(r"url\((?!data:image/webp;base64,)|@import|<link|<iframe", text)
    assert not re.search(r' (?:src|href|data|action)="(?!#|data:image/)', text)
    for path in re.findall(r"<svg .*?</svg>", text)[:500]:
        ElementTree.fromstring(path)
    assert len(text.encode()) <= MOST_BYTES


def cards(text):
    return re.findall(r"<li[^>]*>(?:<img [^>]+>)?<(?:p|dl)>|<li[^>]*>(?:<img [^>]+>)?\n<dl>", text)


def made(folder, samples, dataset="synthetic", classes=10, epochs=4, seed=0, labels=None, **known):
    """Return a run with an invented history, some of which is skipped."""
    recipe = made_recipe(dataset=dataset, train_size=samples, epochs=epochs).replaced(
        "run", seed=seed
    )
    make_run(folder, recipe, "fine-pruning", history=False)
    rng = np.random.default_rng(seed)
    if labels is None:
        (run,) = read_runs([folder])
        labels = pictures_of(run).train.labels
    (folder / "history").mkdir()
    for epoch in range(epochs):
        losses = rng.gamma(1.0, 1.5, samples).astype(np.float16)
        losses[rng.random(samples) < 0.4 * (epoch > 0)] = -np.inf
        predictions = rng.integers(0, classes, samples)
        predictions[np.isneginf(losses) | (not known.get("predictions", True))] = -1
        records = pack_epoch(losses, predictions, classes)
        np.save(folder / "history" / f"epoch-{epoch + 1:04d}.npy", records)
    training_set = TrainingSet(np.arange(samples), np.asarray(labels, np.int64))
    write_training_set(folder / "history/training_set.npz", training_set)
    evaluated = rng.integers(0, classes, (2, 500))
    np.save(folder / "history" / "evaluated.npy", pack_classes(evaluated, classes))
    return read_inspected(read_runs([folder]))[0]


# The page


def test_the_page_has_every_part_in_order_and_is_the_same_each_time(runs, page):
    text, _ = page(runs)
    parts = [
        "<h1>Samples of 3 runs</h1>",
        "Evaluated on",
        "<h2>lenet on digits, adaptive</h2>",
        "How many suspects have wrong labels",
        "<h3>Suspected wrong labels</h3>",
        "Most often skipped, with large losses",
        "Those with the smallest average losses come first.",
        "accuracy of full, %",
        "<h3>Confusion matrix</h3>",
        "What the most skipped tenth has in common",
        "brightness",
        "<h2>lenet on digits, full</h2>",
        "<h3>The smallest losses</h3>",
        "What the most suspected tenth has in common",
        "<h3>The most skipped samples</h3>",
        "<h3>The most suspected samples</h3>",
    ]
    assert [part for part in parts if part not in text] == []
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.count("<caption>lenet full 0</caption>") == 2  # Once beside the adaptive run.
    assert text == page(runs)[0]


def test_the_figures_are_those_of_the_suspects(runs, page):
    _, summary = page(runs, most=10)
    adaptive = summary.arms[0]
    ranked = suspects_of(runs[0])
    loaded = pictures_of(runs[0].run)
    assert loaded.weak.wrong is not None
    first = [suspect.index for suspect in adaptive.first]
    assert first == ranked.index[:10].tolist()
    assert [s.wrong for s in adaptive.first] == loaded.weak.wrong[first].tolist()
    found = {row.first: row for row in adaptive.found}
    assert sorted(found) == sorted({100, int(loaded.weak.wrong.sum())})
    index = ranked.index[:100]
    wrong = loaded.weak.wrong[index]
    assert found[100].wrong == wrong.sum()
    right = ranked.suggestion[:100] == np.asarray(loaded.whole.labels)[index]
    assert found[100].suggestions_right == (right & wrong).sum()
    assert found[100].by_chance == pytest.approx(100 * loaded.weak.wrong.mean())
    # More than by chance: the runs are real.
    assert found[100].wrong > 60
    assert adaptive.skipped == pytest.approx(runs[0].run.summary.skipped_share)
    assert json.loads(json.dumps(finite(dataclasses.asdict(summary))))["runs"] == summary.runs


def test_the_cards_show_labels_predictions_neighbours_and_the_truth(runs, page):
    text, summary = page(runs[:1], most=10)
    gallery = text[text.index("<h3>Suspected") : text.index("<h3>Most often skipped")]
    assert gallery.count("<dt>sample</dt>") == 10
    assert gallery.count("<dt>suggested</dt>") == sum(
        suspect.suggestion is not None for suspect in suspects_first(summary)
    )
    assert gallery.count("<dt>network</dt>") == 10
    assert len(re.findall(r"<small>\d+</small>", gallery)) == 50
    assert gallery.count('class="w"') == sum(suspect.wrong for suspect in suspects_first(summary))
    assert gallery.count("<img ") == 60


def suspects_first(summary):
    return summary.arms[0].first


def test_without_the_network_its_predictions_are_left_out(runs, page):
    text, summary = page(runs[:1], most=10, network=False)
    assert "<dt>network</dt>" not in text
    assert "neighbours" not in text[text.index("<main>") :]
    assert summary.arms[0].missing == []


def test_hostile_names_are_escaped(runs, page):
    evil = "<script>alert(1)</script>&\"'"
    changed = dataclasses.replace(runs[0].run.summary, network=evil, arm=evil, git=evil)
    hostile = dataclasses.replace(runs[0].run, summary=changed, title=evil)
    text, _ = page([dataclasses.replace(runs[0], name=evil, run=hostile), *runs[1:]], most=1)
    assert "&lt;script&gt;" in text
    samples = known_samples(runs[0], network=True)
    training_set = dataclasses.replace(samples.training_set, classes=(evil,) * 10)
    named = dataclasses.replace(samples, training_set=training_set)
    suspects = suspects_of(runs[0], most=100)
    texts = SampleViews(lambda sample: evil, MOST_BYTES)
    cards = make_gallery(named, suspects, 1.0, texts, detailed=True)
    assert "<script" not in cards
    assert cards.count("&lt;script&gt;") > 100


def test_nothing_to_show_is_refused():
    with pytest.raises(InputError, match="at least one"):
        read_inspected([])


# What may be missing


def test_without_its_checkpoint_a_run_has_no_final_predictions(trained, tmp_path, page):
    shutil.copytree(trained / "adaptive-0", tmp_path / "run")
    (tmp_path / "run" / "checkpoint.pt").unlink()
    text, summary = page(read_inspected(read_runs([tmp_path / "run"])), most=10)
    (sentence,) = summary.arms[0].missing
    assert sentence.startswith("The final predictions are not shown: expected the trained network")
    assert sentence.replace("'", "&#39;") in text
    assert text[text.index("<h3>Suspected") : text.index("<h3>Most")].count("<img ") == 10


@pytest.mark.parametrize("name", ["own:data", "cifar10"])
def test_without_pictures_the_samples_are_listed_by_number(runs, page, name):
    recipe = {**runs[0].run.recipe}
    recipe["data"] = {**recipe["data"], "name": name, "dir": "/missing", "download": False}
    run = dataclasses.replace(runs[0], run=dataclasses.replace(runs[0].run, recipe=recipe))
    text, summary = page([run], most=50)
    (arm,) = summary.arms
    sentence, of_labels = arm.missing
    assert sentence.startswith("The final predictions are not shown: expected")
    assert re.match(r"It is not shown which labels are wrong \([0-9]+ in all\)", of_labels)
    assert "The samples themselves are not shown: expected" in text
    assert (arm.shown, arm.traits, arm.wrong_labels) == (50, [], None)
    assert "data:image" not in text
    assert "brightness" not in text
    assert "<b>" + str(arm.first[0].index) + "</b>" in text


def test_pictures_of_other_labels_are_not_shown(runs, page):
    run = dataclasses.replace(runs[0], labels=np.roll(runs[0].labels, 1))
    text, summary = page([run], most=10)
    assert "have changed since the training" in summary.arms[0].missing[0]
    assert "data:image" not in text


def test_without_predictions_no_labels_are_suggested(tmp_path, page):
    run = made(tmp_path / "run", 300, predictions=False)
    text, summary = page([run], most=30, network=False)
    assert "No labels are suggested" in summary.arms[0].missing[0]
    assert "→" not in text[text.index("<main>") :]


def test_without_an_evaluation_there_is_no_confusion_matrix(trained, tmp_path, page):
    shutil.copytree(trained / "adaptive-0", tmp_path / "run")
    (tmp_path / "run" / "history" / "evaluated.npy").unlink()
    text, _ = page(read_inspected(read_runs([tmp_path / "run"])), most=10, network=False)
    assert "No confusion matrix is shown" in text
    assert 'class="heat"' not in text


def test_samples_without_finite_losses_are_no_suspects(tmp_path, page):
    run = made(tmp_path / "run", 300)
    run.history.losses[:] = np.inf
    text, summary = page([run], most=10)
    assert (summary.arms[0].suspects, summary.arms[0].first) == (0, [])
    assert cards(text) == []
    assert "<h3>Classes</h3>" in text


def test_numbers_count_the_whole_training_set_if_a_part_is_held_out(tmp_path, page):
    recipe = make_recipe(
        RECIPE,
        ["data.validation=100", "data.train_size=200", "training.epochs=2", "pruning.policy=full"],
    )
    train(recipe, tmp_path / "run")
    (run,) = read_inspected(read_runs([tmp_path / "run"]))
    text, summary = page([run], most=5, network=False)
    index = pictures_of(run.run).weak.index
    assert [s.index for s in summary.arms[0].first] == index[
        suspects_of(run, most=5).index
    ].tolist()
    assert "count the whole training set" in text


def test_samples_that_no_batch_had_room_for_were_not_skipped(tmp_path):
    changes = ["pruning.policy=full", "training.epochs=2", "training.batch_size=64"]
    train(make_recipe(RECIPE, [*changes, "training.drop_last=true"]), tmp_path / "run")
    (run,) = read_inspected(read_runs([tmp_path / "run"]))
    assert (~run.history.trained).sum(axis=1).tolist() == [300 % 64] * 2
    assert not run.times_skipped().any()


def test_each_card_shows_the_picture_of_its_sample(tmp_path, page):
    run = made(tmp_path / "run", 300)
    text, _ = page([run], most=30, network=False)
    pictures = pictures_of(run.run).train.images.images.numpy()  # type: ignore[attr-defined]
    pictures = pictures.astype(float)
    found = re.findall(
        r'<li[^>]*><img src="data:image/webp;base64,([^"]+)"[^>]*><p><b>(\d+)</b>', text
    )
    assert len(found) > 100
    for encoded, number in found:
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded)))).transpose(2, 0, 1)
        distances = np.abs(pictures - shown).mean((1, 2, 3))
        assert distances.argmin() == int(number)


# Size


def test_most_of_the_suspects_are_in_a_closed_block(tmp_path, page):
    run = made(tmp_path / "run", 600)
    text, summary = page([run], most=600, network=False)
    assert summary.arms[0].shown == 500
    suspects = text[text.index("<h3>Suspected") : text.index("<h3>Most often skipped")]
    visible, closed = suspects.split('<details class="block">')
    assert len(cards(visible)) == VISIBLE
    assert len(cards(closed)) == 500 - VISIBLE
    assert "<details open" not in text


def test_several_arms_share_the_size(tmp_path, page, monkeypatch):
    monkeypatch.setattr("fineprune.report.inspection._MOST_BYTES", 1_600_000)
    one = made(tmp_path / "run", 500)
    arms = [
        dataclasses.replace(one, run=with_summary(one.run, arm=f"arm {arm}")) for arm in range(3)
    ]
    text, summary = page(arms, network=False)
    assert len(summary.arms) == 3
    note = "To keep this page small, the last samples are shown without pictures."
    sections = text.split('<section id="arm-')[1:]
    assert all(note in section for section in sections)
    assert all(0 < section.count("<img ") < len(cards(section)) for section in sections)
    assert len(text.encode()) <= 1_600_000


# Sparklines


def points(path):
    """Return the absolute points of each line of a path."""
    lines = []
    for line in path.split("M")[1:]:
        start, _, rest = line.partition("l")
        numbers = [int(n) for n in re.findall(r"-?\d+", start.partition("h")[0])]
        steps = np.array([int(n) for n in re.findall(r"-?\d+", rest)]).reshape(-1, 2)
        lines.append(np.cumsum([numbers, *steps], axis=0).tolist())
    return lines


def test_a_sparkline_has_gaps_where_the_sample_was_skipped():
    losses = np.array([4.0, 2.0, np.nan, np.inf, np.nan], np.float16)
    step = LINE_WIDTH // 4
    assert points(sparkline(losses, 4.0)) == [
        [[0, 0], [step, LINE_HEIGHT // 2]],
        [[3 * step - 1, 0]],
    ]
    assert sparkline(losses[2:3], 4.0) == ""
    assert sparkline(losses[:1], 4.0) == "M-1 0h2"


def test_a_sparkline_of_many_epochs_stays_short():
    losses = np.linspace(4, 0, 200)
    ((first, *_, last),) = points(sparkline(losses, 4.0))
    assert first == [0, 0]
    assert last == [LINE_WIDTH, LINE_HEIGHT]
    assert len(sparkline(losses, 4.0)) < 150


# Tables


def test_random_choices_overlap_as_by_chance(tmp_path, page):
    """Also if fewer samples are skipped than are compared, so that most of them are equal."""
    runs = [made(tmp_path / f"run-{seed}", 2000, seed=seed) for seed in range(4)]
    for overlap in skipped_overlaps(runs, 200):
        assert overlap.jaccard == pytest.approx(expected_jaccard(200, 2000), abs=0.025)
    rng = np.random.default_rng(0)
    for run in runs:
        run.history.losses[:] = 1.0
        pruned = [line["pruned"] for line in run.run.metrics].index(True)
        run.history.losses[pruned, rng.permutation(2000)[:20]] = np.nan
    overlaps = skipped_overlaps(runs, 200)
    assert len(overlaps) == 6
    for overlap in overlaps:
        assert overlap.jaccard == pytest.approx(expected_jaccard(200, 2000), abs=0.025)
    text, summary = page(runs, most=1, network=False)
    assert summary.skipped_overlaps == overlaps
    assert f"<td>{expected_jaccard(200, 2000):.3f}</td>" in text
    assert "fine-pruning, different seeds</th><td>6</td>" in text


def test_overlaps_are_means_over_pairs_of_one_kind(runs):
    first, second, full = runs
    names = first.name, second.name, full.name
    overlaps = [
        Overlap(names[0], names[1], 30, 0.5, 0.05, 0.8),
        Overlap(names[0], names[2], 30, 0.2, 0.05, None),
        Overlap(names[2], names[1], 30, 0.4, 0.05, 0.6),
    ]
    table = overlap_table("Title", overlaps, runs)
    assert table.lines == [
        ("lenet adaptive, different seeds", "1", "0.500", "-", "0.050", "+0.80"),
        ("lenet adaptive and lenet full", "2", "0.300", "0.200 to 0.400", "0.050", "+0.60"),
    ]


def test_many_kinds_of_pairs_are_merged(runs):
    others = [
        dataclasses.replace(
            runs[0],
            name=f"run {n}",
            run=with_summary(runs[0].run, network=f"net{n // 3}", arm=f"arm{n % 3}"),
        )
        for n in range(9)
    ]
    table = overlap_table("Title", skipped_overlaps(others, 30), others)
    assert {line[0]: line[1] for line in table.lines} == {
        "same network, different arms": "9",
        "different networks, same arm": "9",
        "different networks and arms": "18",
    }


def test_confused_pairs_are_the_most_frequent_errors():
    matrix = np.diag([90, 80, 70])
    matrix[0, 2], matrix[2, 1] = 10, 30
    full = np.diag([99, 99, 99])
    full[2, 1] = 1
    table = confused_pairs(matrix, full, ["a", "b", "c"])
    assert table.lines == [("c", "b", "30", "30.0", "1"), ("a", "c", "10", "10.0", "0")]


def test_many_classes_are_shown_as_pairs_and_as_the_extreme_classes(tmp_path, page):
    labels = np.random.default_rng(0).integers(0, 300, 1000)
    run = made(tmp_path / "run", 1000, "synthetic", classes=300, labels=labels)
    text, summary = page([run], most=10, network=False)
    assert "Classes that are confused most often" in text
    assert 'class="heat"' not in text
    assert len(summary.arms[0].classes) == 300
    assert "Only the 50 classes that were skipped most" in text


def test_runs_of_one_arm_are_shown_once(runs):
    assert [[run.name for run in arm] for arm in runs_by_arm(runs)] == [
        ["lenet adaptive 0", "lenet adaptive 1"],
        ["lenet full 0"],
    ]


def test_runs_that_differ_in_more_than_their_seeds_are_told_apart(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        made(folder, 100)
    recipe = folders[1] / "recipe.toml"
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(re.sub("^lr = .*$", "lr = 0.5", text, flags=re.MULTILINE), encoding="utf-8")
    runs = read_inspected(read_runs(folders))
    assert [run.name for run in runs] == [f"lenet fine-pruning 0 ({folder})" for folder in folders]
    assert [len(arm) for arm in runs_by_arm(runs)] == [1, 1]
    summary = write_inspection(runs, tmp_path / "page.html")
    assert len(summary.arms) == 2
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "lenet fine-pruning, the same seed" in text
    assert all(f"fine-pruning, {folder.name}" in text for folder in folders)


def test_a_run_is_compared_with_full_training_of_its_own_comparison(trained, tmp_path, page):
    """Two comparisons of one recipe: the classes of the first one's full run are all wrong."""
    comparisons = []
    for name in ("wrong", "right"):
        folder = tmp_path / name
        listed = [{"path": arm} for arm in ("full-0", "adaptive-0")]
        for run in listed:
            shutil.copytree(trained / run["path"], folder / run["path"])
        (folder / "compare.json").write_text(json.dumps({"title": "same", "runs": listed}))
        comparisons.append(folder)
    evaluated = comparisons[0] / "full-0/history/evaluated.npy"
    labels = np.load(evaluated)[0]
    np.save(evaluated, np.stack([labels, (labels + 1) % 10]))

    def figures(folders):
        text, _ = page(read_inspected(read_runs(folders)), most=1, network=False)
        return re.findall(r"<table.*?</table>", text, re.DOTALL)

    together, alone = figures(comparisons), figures(comparisons[1:])
    of_classes = [table for table in alone if "accuracy of full" in table]
    assert of_classes
    assert all(table in together for table in of_classes)


def test_the_code_of_an_own_network_runs_only_if_it_may(runs, page, tmp_path, monkeypatch):
    code = "from fineprune.networks.lenet import LeNet\ndef net(classes, channels):\n"
    (tmp_path / "code_of_others.py").write_text(f"{code}    return LeNet(classes, channels)\n")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = {**runs[0].run.recipe, "network": {"name": "code_of_others:net"}}
    own = dataclasses.replace(runs[0], run=dataclasses.replace(runs[0].run, recipe=recipe))
    text, _ = page([own], most=1)
    assert "expected --own-data to pass samples through &#39;code_of_others:net&#39;" in text
    assert "code_of_others" not in sys.modules
    assert "<dt>network</dt>" in page([own], most=1, own_data=True)[0]


def test_a_page_downloads_nothing(runs, page, tmp_path, monkeypatch):
    def fetch(*given, **options):
        raise AssertionError("a download")

    monkeypatch.setattr(cifar, "fetch", fetch)
    data = {"name": "cifar10", "dir": str(tmp_path), "download": True}
    recipe = {**runs[0].run.recipe, "data": data}
    run = dataclasses.replace(runs[0], run=dataclasses.replace(runs[0].run, recipe=recipe))
    assert "The final predictions are not shown: expected" in page([run], most=1)[0]


@pytest.mark.parametrize("damage", ["other network", "no weights"])
def test_a_checkpoint_that_does_not_fit_the_network_leaves_out_its_predictions(
    damage, trained, tmp_path, page
):
    folder = shutil.copytree(trained / "adaptive-0", tmp_path / "run")
    if damage == "no weights":
        state = load_checkpoint(folder / CHECKPOINT)
        del state["model"]
        save_checkpoint(folder / CHECKPOINT, state)
    (run,) = read_inspected(read_runs([folder]))
    if damage == "other network":
        run.run.recipe["network"] = {"name": "resnet9"}
    text, _ = page([run], most=1)
    assert "The final predictions are not shown: expected the weights of" in text
    assert "<dt>network</dt>" not in text


def test_with_a_moving_average_the_evaluated_network_is_shown(tmp_path):
    recipe = make_recipe(RECIPE, ["training.ema=0.9999", "pruning.policy=full"])
    summary = train(recipe, tmp_path / "run")
    (run,) = read_runs([tmp_path / "run"])
    loaded = pictures_of(run)
    loaded = dataclasses.replace(loaded, train=loaded.evaluated)
    right = outputs_of(run, loaded).predictions == loaded.evaluated.labels
    assert right.mean() == pytest.approx(summary.accuracy_last)
