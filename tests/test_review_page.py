"""The page on which labels are reviewed: as a file, and in a real browser."""

import base64
import gzip
import io
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from test_report import parse_strictly
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import fineprune as fp
from fineprune.cli.main import app
from fineprune.datasets.label_file import DROP, read_labels
from fineprune.errors import InputError
from fineprune.labels.review_page import Samples, review_document, review_section
from fineprune.labels.sample_view import view_of
from fineprune.runs.training_set import read_training_set
from fineprune.training.recipe import make_recipe
from fineprune.training.trainer import train

N = 60
NAMES = ["cats", 'dogs, "big"', "</script><b>birds"]


@pytest.fixture(scope="module")
def watch():
    """Return the evidence on made-up logits: the first 12 labels are wrong."""
    true = torch.arange(N) % 3
    labels = torch.where(torch.arange(N) < 12, (true + 1) % 3, true)
    draw = torch.Generator().manual_seed(0)
    watch = fp.LabelWatch(N, 3)
    for _ in range(25):
        logits = 5 * F.one_hot(true, 3) + torch.randn(N, 3, generator=draw)
        watch.record(torch.arange(N), logits, labels)
    return watch


def pictures(shift=0):
    """Return pictures with the recorded labels, or with others."""
    labels = [(index + (index < 12) + shift) % 3 for index in range(N)]
    return [(torch.full((3, 8, 8), index / N), label) for index, label in enumerate(labels)]


@pytest.mark.parametrize("wrapped", [lambda data: data, fp.Indexed])
@pytest.mark.parametrize("form", ["tuple", "tensor", "dict"])
def test_a_page_of_another_split_is_warned_of(wrapped, form, watch, tmp_path):
    forms = {
        "tuple": lambda x, y: (x, y),
        "tensor": lambda x, y: (x, torch.tensor(y)),
        "dict": lambda x, y: {"image": x, "label": y},
    }
    same, other = (wrapped([forms[form](x, y) for x, y in pictures(shift)]) for shift in (0, 1))
    watch.page(tmp_path / "same.html", same, most=15)
    with pytest.warns(UserWarning, match="15 of 15 samples on the page have another") as caught:
        watch.page(tmp_path / "other.html", other, most=15)
    assert caught[0].filename == __file__


def test_a_page_draws_no_random_number_of_the_user(watch, tmp_path):
    def drawn(before):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        before()
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    class Augmented(list[Any]):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x * random.random() * np.random.rand() * torch.rand(()), y  # noqa: NPY002

    page = tmp_path / "audit.html"
    written = drawn(lambda: watch.page(page, Augmented(pictures()), most=3))
    assert page.exists()
    assert written == drawn(lambda: None)


# -- the file --------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_reads_without_javascript(watch, tmp_path):
    path = tmp_path / "audit.html"
    keys = [f"<i>{index}</i>.png" for index in range(N)]
    watch.page(path, pictures(), names=NAMES, keys=keys, most=15)
    text = path.read_text(encoding="utf-8")
    parse_strictly(text)
    cards = re.findall(r'<li class="card".*?</li>', text)
    assert len(cards) == 15
    indices, _, suggestions = watch.suspects()
    for card, index, suggestion in zip(cards, indices.tolist(), suggestions.tolist(), strict=False):
        assert f'data-index="{index}" data-label="{watch.ranking().labels[index]}"' in card
        assert f'data-suggestion="{suggestion}"' in card
        assert f"&lt;i&gt;{index}&lt;/i&gt;.png ({index})" in card
        assert card.count('<img src="data:image/png;base64,') == 1
    assert sum(index < 12 for index in indices[:12].tolist()) == 12
    assert "</script><b>" not in text
    assert "&lt;/script&gt;&lt;b&gt;birds" in text
    # The policy lets the browser load nothing, and the file asks for nothing.
    assert "default-src &#x27;none&#x27;" in text
    assert not re.search(r'(?:src|href)="(?!data:image/)', text)
    watch.page(tmp_path / "again.html", pictures(), names=NAMES, keys=keys, most=15)
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == text


def test_texts_tables_and_nothing_can_be_shown(watch, tmp_path):
    path = tmp_path / "audit.html"
    watch.page(path, [{"text": f"<b>text {i}"} for i in range(N)], most=3)
    assert path.read_text(encoding="utf-8").count('<p class="text">&lt;b&gt;text ') == 3
    watch.page(path, np.eye(N), show=lambda row: f"row {row.argmax()}", most=3)
    assert path.read_text(encoding="utf-8").count('<p class="text">row ') == 3
    watch.page(path, fp.Indexed([f"sample {i}" for i in range(N)]), most=3)
    assert path.read_text(encoding="utf-8").count('<p class="text">sample ') == 3
    watch.page(path)  # By default, it lists the suspects.
    number = path.read_text(encoding="utf-8").count('<li class="card"')
    assert number == watch.ranking().num_suspects == 12


def test_a_page_stays_small_and_says_what_it_leaves_out(watch, tmp_path, monkeypatch):
    page, said = tmp_path / "audit.html", "the last samples are shown without pictures"
    watch.page(page, pictures(), most=15)
    text = page.read_text(encoding="utf-8")
    assert said not in text
    (size,) = {len(uri) for uri in re.findall(r'<img src="([^"]+)"', text)}
    for budget, shown in ((14 * size + 1, 15), (3 * size, 3)):
        monkeypatch.setattr("fineprune.labels.review_page._MOST_BYTES", budget)
        watch.page(page, pictures(), most=15)
        text = page.read_text(encoding="utf-8")
        assert text.count("<img ") == shown
        assert (said in text) == (shown < 15)


def test_wrong_arguments_of_a_page_are_refused(watch, tmp_path):
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dataset": [0, 1]}, "a data set of 60 samples, got one of 2"),
        ({"dataset": iter([0, 1])}, "a data set of 60 samples, got one of unknown"),
        ({"keys": ["a"]}, "a list of keys of 60 samples, got one of 1"),
        ({"names": ["a", "b"]}, "the names of 3 classes, .* got 2"),
        ({"names": {"a", "b", "c"}}, "the names of the classes as a list .* got a set"),
        ({"names": ["a", "b", "c", "d"]}, r"the names of 3 classes, .* got 4"),
        ({"names": dict(enumerate("abcd"))}, r"the names of 3 classes, .* got 4"),
        ({"names": {1: "a", 2: "b", 3: "c"}}, "from 0, got 3, the first for class 1"),
        ({"names": {"cats": 0}}, "numbered from 0, got 1, .* class cats"),
    ]
    for arguments, message in wrong:
        with pytest.raises(InputError, match=message):
            watch.page(tmp_path / "audit.html", **arguments)
    with pytest.raises(InputError, match="expected a file to write the page to"):
        watch.page("/dev/null/audit.html")
    assert list(tmp_path.iterdir()) == []


def table_of(page):
    data = re.search(r'id="review-data"[^>]*>(.*?)</script>', page.read_text(encoding="utf-8"))
    assert data
    packed = base64.b64decode(json.loads(data[1])["table"])
    return json.loads(gzip.decompress(packed))["labels"]


def test_labels_that_were_never_recorded_are_those_of_the_data_set(tmp_path):
    labels = torch.arange(N) % 3
    part = fp.LabelWatch(N, 3)
    part.record(torch.arange(5, N), 6 * torch.eye(3)[labels[5:]], labels[5:])
    page = tmp_path / "audit.html"
    with pytest.warns(RuntimeWarning, match="label of 5 of 60 samples was never recorded"):
        part.page(page, most=N)
    assert table_of(page) == [-1] * 5 + labels[5:].tolist()
    assert page.read_text(encoding="utf-8").count('class="card"') == N - 5
    own = labels.clone()
    own[4] = -100
    with pytest.warns(RuntimeWarning, match="label of 1 of 60 samples"):
        part.page(page, TensorDataset(torch.zeros(N, 2), own))
    assert table_of(page) == [*labels[:4].tolist(), -1, *labels[5:].tolist()]


def test_names_in_a_dict_belong_to_their_numbers(watch, tmp_path):
    page = tmp_path / "audit.html"
    names: dict[Any, str]
    for names in ({0: "cats", 1: "dogs", 2: "birds"}, {"2": "birds", "1": "dogs", "0": "cats"}):
        watch.page(page, names=names)
        assert '"classes": ["cats", "dogs", "birds"]' in page.read_text(encoding="utf-8")


def shown(item):
    """Return the picture that the page shows of an item."""
    uri, text = view_of(item)
    assert text is None
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


@pytest.mark.parametrize(
    "item",
    [
        torch.arange(48, dtype=torch.uint8).view(3, 4, 4),
        np.arange(48, dtype=np.uint8).reshape(3, 4, 4).transpose(1, 2, 0),
        torch.arange(48).view(3, 4, 4).float() - 7,
    ],
)
def test_a_picture_has_the_pixels_of_the_sample(item):
    pixels = np.asarray(shown((item, 5))).transpose(2, 0, 1).astype(np.float64)
    expected = np.arange(48).reshape(3, 4, 4).astype(np.float64)
    if torch.is_tensor(item) and item.is_floating_point():
        expected = np.round(expected / 47 * 255)
    np.testing.assert_allclose(pixels, expected)


def corner_of(image):
    return [np.asarray(shown(image).convert("L"))[place, place] for place in (0, -1)]


@pytest.mark.parametrize("largest", [1.0, 4_000.0, 60_000.0])
@pytest.mark.parametrize("kind", [np.float32, np.int32, np.uint16])
def test_pictures_of_numbers_are_scaled_to_what_can_be_seen(kind, largest):
    values = np.full((8, 8), largest)
    values[0, 0] = 0
    values[4, 4] = largest / 2
    numbers = values.astype(kind)
    assert corner_of(Image.fromarray(numbers)) == [0, 255]
    if largest > 255:
        for item in (numbers, torch.from_numpy(numbers), Image.fromarray(numbers)):
            assert np.unique(np.asarray(shown((item, 0)))).tolist() == [0, 128, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_what_is_transparent_is_grey(mode):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (4, 4, 8, 8))
    clear, opaque = corner_of(image.convert(mode))
    assert clear > 100
    assert opaque < 20


def test_large_pictures_are_reduced_and_other_samples_are_texts():
    for item in (torch.rand(3, 300, 200), Image.new("RGB", (200, 300))):
        assert shown(item).size == (64, 96)
    assert view_of({"sentence": "hello", "label": 1}) == (None, "hello")
    assert view_of(torch.tensor([1, 2]))[1] == "tensor([1, 2])"
    assert len(view_of("x" * 5000)[1] or "") < 2100


# -- in a browser ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    """A browser. Where CI runs, it must be there, so that these tests are never skipped unseen."""
    missing = pytest.fail if os.environ.get("BROWSER_TESTS") else pytest.skip
    try:
        from playwright import sync_api as playwright
    except ImportError:
        missing("needs Playwright: pip install 'fineprune[browser]'")
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with playwright.sync_playwright() as running:
        try:
            # Without a browser of the system, the one that `playwright install chromium` installs.
            opened = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            missing(f"needs Chromium: apt-get install chromium ({str(error).splitlines()[0]})")
        yield opened
        opened.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open a page, and fail if it reports an error or asks for anything."""
    context = browser.new_context(accept_downloads=True, viewport={"width": 400, "height": 800})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))

    def note(request):
        if not request.url.startswith(("file:", "data:", "blob:")):
            problems.append(request.url)

    page.on("request", note)
    yield page
    context.close()
    assert not problems


def press(page, keys):
    for key in keys:
        page.keyboard.press(key)


def downloaded(page, path):
    with page.expect_download() as download:
        page.get_by_role("button", name="download labels.csv").click()
    download.value.save_as(path)
    return path


def test_twenty_cards_are_reviewed_by_keyboard_and_the_table_trains(opened, tmp_path):
    settings: dict[str, dict[str, Any]] = {
        "data": {"name": "digits", "train_size": 300, "label_noise": 0.2, "validation": 50},
        "training": {"epochs": 6, "batch_size": 16, "lr": 0.02, "evaluate_every": 6},
        "pruning": {"policy": "full"},
        "run": {"device": "cpu", "threads": 1, "precision": "float32"},
    }
    train(make_recipe(settings), tmp_path / "run")
    page_file = tmp_path / "inspect.html"
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "--out", str(page_file)])
    assert result.exit_code == 0, result.output
    opened.goto(page_file.as_uri())
    assert opened.evaluate("document.documentElement.scrollWidth") <= 400
    cards = opened.locator(".card").evaluate_all(
        "cards => cards.map(card => [card.dataset.index, card.dataset.suggestion].map(Number))"
    )
    assert len(cards) >= 20
    press(opened, "akd" * 6 + "ak")
    count = opened.locator('[data-part="count"]')
    assert "20 of" in count.inner_text()
    press(opened, "u")
    assert "19 of" in count.inner_text()
    press(opened, "k")
    opened.reload()
    assert "20 of" in count.inner_text()  # The browser has kept the progress.
    more = tmp_path / "run" / "inspect.html"
    CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "--out", str(more), "--most", "5"])
    more.replace(page_file)  # A browser keeps it for each file or for all, as it likes.
    for _ in range(20):  # Another process of the browser may read the new file, some seconds late.
        opened.reload()
        if "5 of 5" in count.inner_text():
            break
        opened.wait_for_timeout(500)
    assert "5 of 5 reviewed and 15 that are not on this page" in count.inner_text()
    table = downloaded(opened, tmp_path / "labels.csv")
    before = read_training_set(tmp_path / "run", 250)
    labels = read_labels(table, before.classes, len(before.labels))
    expected = before.labels.copy()
    for (index, suggestion), choice in zip(cards[:20], "akd" * 6 + "ak", strict=True):
        expected[index] = {"a": suggestion, "k": expected[index], "d": DROP}[choice]
    np.testing.assert_array_equal(labels, expected)
    data = {**settings["data"], "label_noise": None, "labels": str(table)}
    again = make_recipe({**settings, "data": data}, ["training.epochs=1"])
    train(again, tmp_path / "again")
    kept = before.index[expected[before.index] != DROP]
    assert len(kept) == 244
    np.testing.assert_array_equal(
        read_training_set(tmp_path / "again", 244).trained_labels, expected[kept]
    )


def test_filters_narrow_the_list_and_names_are_quoted(opened, watch, tmp_path):
    keys = [f'a, "{index}".png' for index in range(N)]
    watch.page(tmp_path / "audit.html", pictures(), names=NAMES, keys=keys, most=20)
    opened.goto((tmp_path / "audit.html").as_uri())
    shown = opened.locator(".card:visible")
    assert shown.count() == 20
    chosen = opened.locator('[data-part="label"]')
    chosen.select_option("1")
    labels = shown.evaluate_all("cards => cards.map(card => card.dataset.label)")
    assert set(labels) == {"1"}
    opened.locator('[data-part="suggestion"]').select_option("0")
    pairs = shown.evaluate_all("cards => cards.map(card => card.dataset.suggestion)")
    assert set(pairs) == {"0"}
    index, _, suggestions = (values[:20] for values in watch.suspects())
    of_pair = (watch.ranking().labels[index] == 1) & (suggestions == 0)
    assert shown.count() == int(of_pair.sum())
    opened.locator('[data-part="suggestion"]').select_option("")
    chosen.select_option("")
    opened.locator("h1").click()
    press(opened, "dd")
    opened.locator('[data-part="state"]').select_option("open")
    assert shown.count() == 18
    table = downloaded(opened, tmp_path / "labels.csv")
    indices = watch.suspects()[0][:2].tolist()
    expected = watch.ranking().labels.numpy()
    expected[indices] = DROP
    np.testing.assert_array_equal(read_labels(table, NAMES, N, keys), expected)


def test_undo_restores_what_was_decided_before(opened, watch, tmp_path):
    watch.page(tmp_path / "audit.html", pictures(), names=["cats", "dogs", "birds"])
    opened.goto((tmp_path / "audit.html").as_uri())
    states = opened.locator(".card .state")
    press(opened, "kpa")  # Kept at first, then accepted.
    assert states.first.inner_text().startswith("label accepted: ")
    press(opened, "u")
    assert states.first.inner_text() == "kept"
    assert opened.locator(".card").first.get_attribute("aria-current") == "true"
    press(opened, "u")
    assert states.first.inner_text() == ""
    assert "0 of 12 reviewed" in opened.locator('[data-part="count"]').inner_text()
    press(opened, "u")  # Nothing is left to undo.
    opened.get_by_role("button", name="drop").click()
    assert states.first.inner_text() == "dropped"
    # The framed card has the focus, so that a screen reader reads it.
    focused = "document.activeElement.dataset.index"
    assert opened.evaluate(focused) == opened.locator(".current").get_attribute("data-index")


def test_keys_decide_nothing_on_cards_that_nobody_sees(opened, watch, tmp_path):
    """A report has its suspects in a closed part of the page."""
    page = tmp_path / "audit.html"
    watch.page(page, pictures())
    text = page.read_text(encoding="utf-8")
    folded = text.replace("<section ", "<details><summary>more</summary><section ", 1)
    page.write_text(folded.replace("</section>", "</section></details>"), encoding="utf-8")
    opened.goto(page.as_uri())
    press(opened, "aaa")
    opened.locator("summary").click()
    assert "0 of 12 reviewed" in opened.locator('[data-part="count"]').inner_text()
    press(opened, "aaa")
    assert "3 of 12 reviewed" in opened.locator('[data-part="count"]').inner_text()


def test_without_all_labels_no_table_is_offered(opened, tmp_path):
    samples = Samples(["a", "b"], None, None, np.arange(4))
    watch = fp.LabelWatch(4, 2)
    watch.record(torch.arange(4), torch.eye(2)[[0, 1, 0, 1]] * 4, torch.tensor([0, 1, 1, 0]))
    page = tmp_path / "page.html"
    section = review_section(watch.evidence(), watch.ranking(), samples)
    page.write_text(review_document(section), encoding="utf-8")
    opened.goto(page.as_uri())
    assert opened.locator(".card").count() == 2
    assert not opened.get_by_role("button", name="download labels.csv").is_visible()


def test_no_other_script_runs_and_nothing_is_loaded(browser, watch, tmp_path):
    page = tmp_path / "audit.html"
    watch.page(page)
    bad = '<script>document.title = "run"</script><img src="http://127.0.0.1:9/x.png" alt="">'
    page.write_text(page.read_text(encoding="utf-8").replace("</main>", f"{bad}</main>"))
    context = browser.new_context()
    refused: list[str] = []
    tab = context.new_page()
    tab.on("console", lambda message: refused.append(message.text))
    tab.goto(page.as_uri())
    assert tab.title() == "Labels to review"
    assert tab.locator(".bar").is_visible()  # The page's own script has run.
    assert len(refused) == 2
    assert all("Content Security Policy" in message for message in refused)
    context.close()


def test_classes_with_the_same_name_are_named_by_their_numbers(watch, tmp_path):
    for names, known in (
        (["crane", "dog", "crane"], '["0", "dog", "2"]'),
        (["drop", "a", "b"], '["0", "a", "b"]'),
    ):
        watch.page(tmp_path / "audit.html", names=names)
        assert f'"classes": {known}' in (tmp_path / "audit.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "sample",
    [
        np.array(["Male", 39], dtype=object),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.zeros((8, 8), ">f4"),
        np.zeros((8, 8), np.complex64),
        np.frombuffer(bytes(64), np.uint8).reshape(8, 8),
        torch.eye(8).to_sparse(),
    ],
    ids=lambda sample: str(sample.dtype),
)
def test_a_sample_of_any_kind_can_be_shown(sample):
    assert any(view_of((sample, 1)))


def test_a_path_that_is_no_utf8_is_shown_with_its_bytes(watch, tmp_path):
    keys = [os.fsdecode(b"caf\xe9-%d.png" % index) for index in range(N)]
    watch.page(tmp_path / "audit.html", keys=keys)
    assert "\\udce9-" in (tmp_path / "audit.html").read_text(encoding="utf-8")


def test_keys_may_be_paths_and_pictures_may_be_views(watch, tmp_path):
    keys = [Path(f"{number}.png") for number in range(watch.num_samples)]
    pictures = [np.zeros((8, 8, 3), dtype=np.uint8)[..., ::-1]] * watch.num_samples
    watch.page(tmp_path / "page.html", pictures, keys=keys)
    assert (tmp_path / "page.html").exists()
