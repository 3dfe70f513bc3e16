"""Tables, figures and the HTML page, made from runs with invented numbers."""

import dataclasses
import itertools
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from commands import printed
from made_runs import made_recipe, make_compare, make_run, table_rows, with_summary

from fineprune.cli.results import show_results
from fineprune.errors import InputError
from fineprune.experiments.arm_table import group_rows, grouped
from fineprune.report.comparison import write_report
from fineprune.report.comparison_table import cost_table, headline, results_table
from fineprune.report.facts import cautions, facts
from fineprune.report.paper_one import RESULTS, paper_tables
from fineprune.runs.run import read_run, read_runs

MARGIN = 0.004


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    return make_compare(tmp_path_factory.mktemp("runs") / "compared")


@pytest.fixture(scope="module")
def runs(compared):
    return read_runs([compared])


@pytest.fixture
def page(tmp_path):
    def write(runs):
        write_report(runs, tmp_path / "new" / "report.html")
        return (tmp_path / "new" / "report.html").read_text(encoding="utf-8")

    return write


@pytest.fixture
def undrawn(page, monkeypatch):
    """Write a page without its figures, which take most of its time."""
    for name in ("draw_first", "draw_further"):
        monkeypatch.setattr(f"fineprune.report.comparison.{name}", lambda group: [])
    return page


@pytest.fixture(scope="module")
def page_of_runs(runs, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    write_report(runs, file)
    return file.read_text(encoding="utf-8")


def one_group(runs):
    (group,) = grouped(runs)
    return group


def lines_of(table):
    """The cells of each line of a table, by its headers."""
    return [dict(zip(table.headers, line, strict=True)) for line in table.lines]


# Tables


def test_the_command_prints_a_screen_that_ends_with_the_headline(compared, tmp_path):
    out = tmp_path / "report.html"
    *table, last = printed("report", compared, "--out", out).splitlines()
    assert len(table) <= 14
    assert table[-1] == f"report: {out}"
    assert f'<p class="headline">{plain(last)}</p>' in plain(out.read_text())
    told = json.loads(printed("report", compared, "--out", out, "--json"))
    assert told["headlines"] == {"lenet on digits": last}


def test_the_method_is_compared_with_every_other_arm(runs):
    rows = table_rows(runs)
    table = results_table(rows, MARGIN)
    full, method, random, _ = lines_of(table)
    assert method["arm"] == "fine-pruning"
    assert {method[name] for name in table.headers[3:]} == {"-"}
    assert method["last epoch, %"] == f"{100 * rows[1].accuracy_last:.2f}"
    for line, row in ((full, rows[0]), (random, rows[2])):
        difference = row.difference
        assert difference is not None
        assert difference.half_width is not None
        assert row.cost is not None
        points = f"{100 * difference.mean:+.2f}\N{NO-BREAK SPACE}±{100 * difference.half_width:.2f}"
        assert line["fine-pruning minus arm, points"] == points
        assert line["verdict"] == row.verdict
        assert line["steps ratio"] == f"{row.cost:.2f}"
    assert full["steps ratio"] < random["steps ratio"] == "1.00"
    # The method has lost what the arm has gained.
    accuracies = [row.accuracy_last for row in rows]
    assert rows[0].difference.mean == pytest.approx(accuracies[1] - accuracies[0])


def test_the_costs_are_those_of_each_arm(runs):
    rows = table_rows(runs)
    full, shown, *_ = lines_of(cost_table(rows))
    assert full["saved, %"] == "-"
    assert shown["sample-steps"] == f"{rows[1].samples_trained:,.0f}"
    assert shown["predicted to save, %"] == f"{100 * (rows[1].predicted_saving or 0):.2f}"
    watched = dataclasses.replace(rows[1], arm="watched", overhead=0.4)
    assert "evidence on labels, s" not in full
    evidence = lines_of(cost_table([rows[0], watched]))[1]
    assert (evidence["overhead, s"], evidence["evidence on labels, s"]) == ("-", "0.40")
    assert shown["skipped, %"] == f"{100 * (rows[1].skipped or 0):.2f}"
    assert shown["saved, %"].startswith(f"{100 * rows[1].time_saved.mean:+.2f}")
    assert "sample-steps of both" not in shown
    both = [dataclasses.replace(row, samples_of_both=1234.0) for row in rows]
    assert lines_of(cost_table(both))[0]["sample-steps of both"] == "1,234"


def test_with_one_seed_no_interval_is_printed_and_nothing_is_claimed(runs):
    rows = table_rows([run for run in runs if run.summary.seed == 0])
    for line in lines_of(results_table(rows, MARGIN)):
        assert "±" not in str(line)
        assert line["verdict"] == ("-" if line["arm"] == "fine-pruning" else "no claim")
    said = headline(rows)
    assert said.endswith("; the seeds allow no claim.")
    for claim in ("better", "worse", "equal", "distinguishable", "points"):
        assert claim not in said


@pytest.fixture
def cifar10_runs(tmp_path):
    """Runs of CIFAR-10, of which they have 1,024 images."""
    recipe = made_recipe(dataset="cifar10", train_size=1024)
    folder = make_compare(tmp_path / "c", recipe=recipe, seeds=[0], counts=False, history=False)
    return read_runs([folder])


def test_the_papers_tables_are_compared_with_each_network_that_was_run(
    runs, cifar10_runs, undrawn, page_of_runs
):
    vgg = [with_summary(run, network="vgg13") for run in cifar10_runs]
    time, accuracy = paper_tables(grouped([*runs, *cifar10_runs, *vgg]))
    assert [(*line[:4], line[5]) for line in time.lines] == [
        ("LeNet", "cifar10", "1,024", "20", "11.80"),
        ("VggNet-13", "cifar10", "1,024", "20", "7.40"),
    ]
    best = {run.summary.arm: 100 * run.summary.accuracy_best3 for run in cifar10_runs}
    pruned, full = best["fine-pruning"], best["full"]
    assert list(accuracy.lines[0][5:8]) == [f"{pruned:.2f}", "-0.43", f"{pruned - full:+.2f}"]
    text = undrawn(cifar10_runs)
    assert "The paper&#39;s Table 2" in text
    parse_strictly(text)
    assert "The paper&#39;s Table 2" not in page_of_runs
    only_full = [run for run in cifar10_runs if run.summary.arm == "full"]
    assert paper_tables(grouped(only_full)) == []
    assert len(RESULTS) == 10


@pytest.mark.parametrize("other", [{"label_noise": 0.4}, {"labels": "labels.csv"}])
def test_the_papers_results_are_not_shown_for_other_data(cifar10_runs, other):
    assert len(paper_tables(grouped(cifar10_runs))) == 2
    others = [
        dataclasses.replace(run, recipe={**run.recipe, "data": {**run.recipe["data"], **other}})
        for run in cifar10_runs
    ]
    assert paper_tables(grouped(others)) == []
    validated = [with_summary(run, evaluated_on="validation") for run in cifar10_runs]
    assert paper_tables(grouped(validated)) == []


def test_runs_of_another_format_and_a_comparison_without_its_file_are_errors(tmp_path):
    folder = make_compare(tmp_path / "c", arms=["full"], seeds=[0])
    file = folder / "full-0" / "summary.json"
    summary = json.loads(file.read_text())
    file.write_text(json.dumps({**summary, "version": 99, "seed": "new"}))
    with pytest.raises(InputError, match="got 99: read it with the version of fineprune that"):
        read_runs([folder])
    recipe = folder / "full-0/recipe.toml"
    recipe.write_text(recipe.read_text().partition("\n")[2])
    file.write_text(json.dumps(summary))
    said = r"expected .*full-0/recipe\.toml as fineprune wrote it, got: Expected `object`"
    with pytest.raises(InputError, match=said):
        read_runs([folder])
    (folder / "compare.json").unlink()
    with pytest.raises(InputError, match=r"got several without compare\.json: restore this file"):
        read_runs([folder])


# The headline


def with_accuracies(runs, **by_arm):
    return [
        with_summary(run, accuracy_last=by_arm[run.summary.arm.replace("-", "_")](number))
        for run, number in zip(runs, [0, 1, 2] * 4, strict=True)
    ]


def test_the_headline_claims_what_the_table_shows(runs):
    ordered = one_group(runs).runs  # By arm.
    changed = with_accuracies(
        ordered,
        full=lambda n: 0.95 + n / 1000,
        fine_pruning=lambda n: 0.97 + n / 1000 + (n - 1) / 1000,
        random=lambda n: 0.96 + n / 50,
        shorter=lambda n: 0.98 + n / 1000 + n % 2 / 10000,
    )
    rows = table_rows(changed)
    assert [row.verdict for row in rows] == ["better", None, "open", "worse"]
    full = rows[0]
    assert full.cost is not None
    assert full.time is not None
    assert plain(headline(rows)) == (
        f"fine-pruning: 97.10 %, +2.00 ±0.25 points against full training at {100 * full.cost:.0f} "
        f"% of its sample-steps and {100 * full.time:.0f} % of its time: better than full; worse "
        f"than shorter; not distinguishable from random."
    )
    wide = group_rows(one_group(changed), 0.03)
    assert [row.verdict for row in wide] == ["equal", None, "open", "equal"]
    assert "equal to full, shorter" in headline(wide)


def test_the_headline_without_full_training_or_without_a_method(runs):
    full = [run for run in runs if run.summary.arm == "full"]
    assert re.fullmatch(r"full: \d+\.\d+ % after the last epoch\.", headline(table_rows(full)))
    without = [run for run in runs if run.summary.arm != "full"]
    said = headline(table_rows(without))
    assert said.startswith("fine-pruning: ")
    assert "full" not in said


def test_what_differs_between_compared_runs_is_said(runs):
    assert cautions(runs) == []
    slowed = [
        {**line, "seconds": line["seconds"] * (1 + line["epoch"] % 2)} for line in runs[0].metrics
    ]
    (one,) = cautions([dataclasses.replace(runs[0], metrics=slowed), *runs[1:]])
    assert "the time of an epoch differ up to 2." in one
    other = dataclasses.replace(runs[0].summary.hardware, cpu="Other CPU")
    changed = with_summary(runs[0], ranks=2, precision="bfloat16", hardware=other, versions={})
    said = cautions([changed, *runs[1:]])
    for what in ("precisions (bfloat16: full-0", "processes (2: full-0", "hardware (Other CPU"):
        assert any(what in sentence for sentence in said)
    assert len(said) == 4


# The page


def test_the_page_is_complete_in_order_fetches_nothing_and_is_the_same(page_of_runs, runs, page):
    text = page_of_runs
    order = ["<h1>digits-lenet</h1>", 'class="headline"', "<svg", "<h2>Results</h2>"]
    order += ["<h2>Cost</h2>", "<details>", "Further figures", "Made CPU", "[pruning]"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert text.count("<svg ") == 5
    assert text.partition("<details>")[0].count("<svg ") == 2
    assert text.partition("<details>")[0].count("<table") == 2
    assert "<script" not in text
    assert "default-src &#39;none&#39;" in text
    without_names = re.sub(r'xmlns(:\w+)?="[^"]+"', "", text)
    assert not re.search(r"https?:|url\((?!#)|@import|<link|<img", without_names)
    parse_strictly(text)
    assert page(runs) == text


def test_hostile_names_are_escaped(tmp_path, page):
    evil = "<script>alert(1)</script>&\"'"
    folder = make_compare(tmp_path / "c", arms=["full", "random"], seeds=[0], title=evil)
    read = read_runs([folder])
    hardware = dataclasses.replace(read[0].summary.hardware, cpu=evil)
    hostile = [with_summary(run, network=evil, git=evil, hardware=hardware) for run in read]
    hostile += [with_summary(run, arm=evil, seed=9) for run in hostile[:1]]
    text = page(hostile)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    for svg in re.findall(r"<svg .*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_each_group_has_a_section_and_its_headline_above(runs, undrawn):
    some = [run for run in runs if run.summary.seed == 0]
    text = undrawn([*some, *(with_summary(run, network="vgg13") for run in some)])
    assert text.count("<section ") == 2
    assert "<h2>lenet on digits</h2>" in text
    assert '<a href="#group-2">vgg13 on digits</a>: fine-pruning' in text
    parse_strictly(text)


def test_a_single_run_can_be_reported(compared, page):
    text = page([read_run(compared / "full-0")])
    assert "minus arm" not in text
    assert text.count("<svg ") == 3


def test_a_run_that_was_not_evaluated_can_be_reported(tmp_path, page):
    folder = make_compare(
        tmp_path / "c", counts=False, history=False, arms=["fine-pruning"], seeds=[0]
    )
    run = read_run(folder / "fine-pruning-0")
    blank = {"test_loss": None, "test_accuracy": None}
    run.metrics[:] = [{**line, **blank} for line in run.metrics]
    assert page([run]).count("<svg ") == 1


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ("full 20, full 20, adaptive 20", "20 (full, adaptive)"),
        ("full 4, shorter 2, full 4", "4 (full); 2 (shorter)"),
    ],
)
def test_the_numbers_of_epochs_are_those_of_all_runs(arms, said, runs):
    made = [arm.split() for arm in arms.split(", ")]
    of_arms = [with_summary(runs[0], arm=arm, epochs=int(number)) for arm, number in made]
    assert dict(facts(of_arms))["Epochs"] == said


def test_losses_that_were_not_finite_are_reported(compared, undrawn):
    run = read_run(compared / "full-0")
    run.metrics[3]["nonfinite"] = 1234
    assert "1,234 losses were not finite" in undrawn([run])


def test_numbers_stay_with_their_units(page_of_runs):
    text = page_of_runs
    prose = re.sub(r"<pre>.*?</pre>|<svg.*?</svg>|<style>.*?</style>", "", text, flags=re.S)
    assert not re.search(r"\d (%|points|percentage points|epochs|seeds|±)", prose)
    assert "95\N{NO-BREAK SPACE}% interval" in prose
    assert not any(
        "\N{NO-BREAK SPACE}" in part for part in re.findall(r"<pre>.*?</pre>", text, re.S)
    )
    assert "<pre>" in text


def test_figures_and_pages_have_one_dark_style(page_of_runs):
    assert '<meta name="color-scheme" content="light dark">' in page_of_runs
    assert "prefers-color-scheme: dark" in page_of_runs
    for svg in re.findall(r"<svg .*?</svg>", page_of_runs, re.DOTALL):
        assert "#333333" not in svg
        assert not re.search(r"fill: #ffffff", svg)


def plain(text):
    return text.replace("\N{NO-BREAK SPACE}", " ")


def parse_strictly(text):
    """Check that tags are closed in order, ids are unique, and no level of headings is left out."""
    open_tags: list[str] = []
    ids: list[str | None] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attributes):
            ids.extend(value for name, value in attributes if name == "id")
            if tag not in ("meta", "br", "img"):
                open_tags.append(tag)

        def handle_startendtag(self, tag, attributes):
            ids.extend(value for name, value in attributes if name == "id")

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Checker().feed(text)
    assert not open_tags
    assert len(ids) == len(set(ids))
    levels = [int(level) for level in re.findall(r"<h([1-6])", text)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_a_report_has_the_recipe_of_its_comparison_or_of_each_kind_of_run(tmp_path, undrawn):
    folder = make_compare(tmp_path / "c", arms=["full", "fine-pruning"], seeds=[0, 1])
    runs = [read_run(folder / name) for name in ("full-0", "full-1", "fine-pruning-0")]
    recipes = re.findall("<pre>.*?</pre>", undrawn(runs), re.S)
    assert ["policy = &#34;full&#34;" in recipe for recipe in recipes] == [True, False]
    (folder / "recipe.toml").write_text(made_recipe().to_toml())
    (recipe,) = re.findall("<pre>.*?</pre>", undrawn(read_runs([folder])), re.S)
    assert "policy = &#34;fine-pruning&#34;" in recipe


def test_names_are_printed_as_they_are(tmp_path, capsys):
    for seed, name in enumerate(("full[a]", "full:cat:")):
        make_run(tmp_path / name, made_recipe().replaced("run", seed=seed), "full", counts=False)
    first, second = (read_run(tmp_path / name) for name in ("full[a]", "full:cat:"))
    runs = [first, with_summary(second, precision="bfloat16")]
    show_results(runs, tmp_path / "report.html", 0.004, as_json=False, about={})
    printed = " ".join(capsys.readouterr().out.split())
    assert "different precisions (float32: full[a]; bfloat16: full:cat:)" in printed


def test_a_run_that_is_named_twice_is_read_once(tmp_path):
    folder = make_compare(tmp_path / "c", arms=["full", "random"], seeds=[0])
    read = read_runs([folder, folder / "full-0", folder / "." / "random-0"])
    assert [(run.path.name, run.comparison) for run in read] == [
        ("full-0", folder),
        ("random-0", folder),
    ]
