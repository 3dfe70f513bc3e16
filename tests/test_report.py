"""Tables, figures and the HTML page, made from runs with invented numbers."""

import dataclasses
import itertools
import json
import re
import shutil
import statistics
from html.parser import HTMLParser
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from made_runs import made_recipe, make_compare, make_run, table_rows, with_summary
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.cli.results import show_results
from fineprune.errors import InputError
from fineprune.experiments.arm_table import group_rows, grouped
from fineprune.report.comparison import draw_first, draw_further, write_report
from fineprune.report.comparison_table import cost_table, headline, results_table, row_dicts
from fineprune.report.facts import cautions, facts
from fineprune.report.figures import style
from fineprune.report.figures.counts import draw_counts
from fineprune.report.figures.curves import draw_curves, draw_time
from fineprune.report.figures.sample_losses import draw_sample_losses
from fineprune.report.figures.schedule import draw_schedule
from fineprune.report.paper_one import RESULTS, paper_tables
from fineprune.report.table import rich_table
from fineprune.runs.files import json_text
from fineprune.runs.run import read_run, read_runs
from fineprune.runs.summary import Summary

MARGIN = 0.004


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    return make_compare(tmp_path_factory.mktemp("runs") / "compared")


@pytest.fixture(scope="module")
def runs(compared):
    return read_runs([compared])


@pytest.fixture(scope="module")
def drawings(runs):
    group = one_group(runs)
    return draw_first(group) + draw_further(group)


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


def terminal(*groups, width=80):
    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        for rows in groups:
            console.print(rich_table(results_table(rows, MARGIN), console.width))
    return captured.get()


def lines_of(table):
    """The cells of each line of a table, by its headers."""
    return [dict(zip(table.headers, line, strict=True)) for line in table.lines]


# Tables


def test_the_table_for_the_terminal_fits_80_characters_without_truncation(runs):
    rows = table_rows(runs)
    text = terminal(rows)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for row in rows:
        assert re.search(rf"^ *{row.arm} +3 +{100 * row.accuracy_last:.2f} ", text, re.MULTILINE)


def test_in_a_narrow_terminal_each_number_stays_whole(runs):
    rows = table_rows(runs)
    text = terminal(rows, width=40)
    assert max(map(len, text.splitlines())) <= 40
    for row in rows:
        assert re.search(rf"^ *{row.arm}\s.*\n +seeds +3 *$", text, re.MULTILINE)
        assert re.search(rf" last epoch,\s%\s+{100 * row.accuracy_last:.2f} *\n", text)


def test_the_command_prints_a_screen_that_ends_with_the_headline(compared, tmp_path):
    out = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", str(compared), "--out", str(out)])
    assert result.exit_code == 0, result.output
    *table, last = result.stdout.splitlines()
    assert len(table) <= 14
    assert table[-1] == f"report: {out}"
    assert f'<p class="headline">{plain(last)}</p>' in plain(out.read_text())
    printed = CliRunner().invoke(app, ["report", str(compared), "--out", str(out), "--json"])
    assert json.loads(printed.stdout)["headlines"] == {"lenet on digits": last}


def test_long_names_of_arms_are_broken_at_their_hyphens_in_the_terminal(runs):
    names = {"random": "an-unusually-long-name", "shorter": "fewer-epochs-late"}
    rows = table_rows(
        [with_summary(run, arm=names.get(run.summary.arm, run.summary.arm)) for run in runs]
    )
    text = terminal(rows, width=66)
    assert max(map(len, text.splitlines())) <= 66
    assert "…" not in text
    assert re.search(r"^ *an-unusually- +3 .*\n *long-name *$", text, re.MULTILINE)


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


def test_rows_can_be_written_as_json(runs):
    rows = table_rows(runs)
    full, pruned = json.loads(json_text(row_dicts(rows)))[:2]
    assert pruned["difference"] is None
    assert pruned["accuracy_last"] == rows[1].accuracy_last
    assert full["difference"] == {
        "mean": rows[0].difference.mean,
        "half_width": rows[0].difference.half_width,
        "pairs": 3,
    }


@pytest.fixture
def cifar10_runs(tmp_path):
    """Runs of CIFAR-10, of which they have 1,024 images."""
    recipe = made_recipe(dataset="cifar10", train_size=1024)
    folder = make_compare(tmp_path / "c", recipe=recipe, seeds=[0], counts=False, history=False)
    return read_runs([folder])


def test_the_papers_tables_are_compared_with_each_network_that_was_run(
    runs, cifar10_runs, undrawn, page_of_runs
):
    lenet = cifar10_runs
    vgg = [with_summary(run, network="vgg13") for run in lenet]
    time, accuracy = paper_tables(grouped([*runs, *lenet, *vgg]))
    assert [line[:4] for line in time.lines] == [
        ("LeNet", "cifar10", "1,024", "20"),
        ("VggNet-13", "cifar10", "1,024", "20"),
    ]
    assert [line[5] for line in time.lines] == ["11.80", "7.40"]
    lines = accuracy.lines
    pruned, full = (
        next(run.summary for run in lenet if run.summary.arm == arm)
        for arm in ("fine-pruning", "full")
    )
    assert lines[0][5] == f"{100 * pruned.accuracy_best3:.2f}"
    assert lines[0][6] == "-0.43"
    assert lines[0][7] == f"{100 * (pruned.accuracy_best3 - full.accuracy_best3):+.2f}"
    text = undrawn(lenet)
    assert "The paper&#39;s Table 2" in text
    parse_strictly(text)
    assert "The paper&#39;s Table 2" not in page_of_runs
    only_full = [run for run in lenet if run.summary.arm == "full"]
    assert paper_tables(grouped(only_full)) == []
    assert len(RESULTS) == 10


FIELDS = {field.name for field in dataclasses.fields(Summary)}


@pytest.mark.parametrize(
    "other",
    [
        {"evaluated_on": "validation"},
        {"dataset": "digits"},
        {"label_noise": 0.4},
        {"labels": "labels.csv"},
    ],
)
def test_the_papers_results_are_not_shown_for_other_data(cifar10_runs, other):
    assert len(paper_tables(grouped(cifar10_runs))) == 2
    others = [with_summary(run, **other) for run in cifar10_runs if other.keys() <= FIELDS]
    others = others or [
        dataclasses.replace(run, recipe={**run.recipe, "data": {**run.recipe["data"], **other}})
        for run in cifar10_runs
    ]
    assert paper_tables(grouped(others)) == []


# Figures


def test_every_figure_is_xml_with_labelled_axes(drawings):
    assert len(drawings) == 5
    for drawing in drawings:
        root = ElementTree.fromstring(drawing.svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("role") == "img"
        assert drawing.caption.endswith(".")
    assert {"training time, seconds", "test accuracy, %"} <= texts_of(drawings[0].svg)
    assert {"epoch", "samples", "learning rate", "fine-pruning"} <= texts_of(drawings[1].svg)
    texts = texts_of(drawings[2].svg)
    assert {"epoch", "test loss, nats", "test accuracy, %", "fine-pruning"} <= texts


@pytest.fixture
def figures(monkeypatch):
    """Returns the figure that a function draws, as matplotlib's object."""

    def drawn_by(draw, group):
        seen: list[Figure] = []
        monkeypatch.setattr(style, "drawing", lambda figure, *_: seen.append(figure))
        draw(group)
        return seen[0]

    return drawn_by


@pytest.mark.parametrize("draw", [draw_time, draw_curves])
def test_every_point_lies_inside_its_axes(draw, runs, figures):
    """Also the low accuracies and high losses of the first epochs."""
    figure = figures(draw, one_group(runs))
    points = 0
    for axes in figure.axes:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        for line in axes.lines:
            x, y = line.get_data()
            assert (np.array(x) >= left).all()
            assert (np.array(x) <= right).all()
            assert (np.array(y) >= low).all()
            assert (np.array(y) <= high).all()
            points += len(x)
    assert points > 40


def test_the_end_of_each_arm_has_its_mean_and_its_time(runs, figures):
    group = one_group(runs)
    end = figures(draw_time, group).axes[1]
    places = [
        [float(value[0]) for value in line.get_data()]
        for line in end.lines
        if len(line.get_xdata()) == 1
    ]
    for arm in group.arms:
        of = [run.summary for run in group.of(arm)]
        seconds = statistics.fmean(summary.seconds_train for summary in of)
        accuracy = 100 * statistics.fmean(summary.accuracy_last for summary in of)
        assert any(
            place == [pytest.approx(seconds), pytest.approx(accuracy)] for place in places
        ), arm


def test_a_curve_of_one_point_is_drawn(tmp_path, figures):
    recipe = made_recipe().replaced("training", evaluate_every=20, evaluate_last=1)
    folder = make_compare(tmp_path / "c", recipe=recipe, arms=["full"], seeds=[0], history=False)
    group = one_group(read_runs([folder]))
    for draw in (draw_time, draw_curves):
        (line,) = figures(draw, group).axes[0].lines
        assert len(line.get_xdata()) == 1
        assert line.get_marker() == "o"


def test_an_arm_has_one_colour_and_ids_are_not_shared_between_figures(drawings):
    times, curves = drawings[0], drawings[2]
    for colour in ("currentColor", "#d55e00", "#0072b2", "#009e73"):
        assert colour in curves.svg
        assert colour in times.svg
    ids = [set(re.findall(r' id="([^"]+)"', drawing.svg)) for drawing in (curves, times)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for drawing in (curves, times):
        used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', drawing.svg))
        assert used == set(re.findall(r' id="([^"]+)"', drawing.svg))


def test_drawing_neither_uses_nor_changes_the_users_matplotlib_settings(runs):
    group = one_group(runs)
    expected = draw_curves(group).svg
    with matplotlib.rc_context({"font.size": 31, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        assert draw_curves(group).svg == expected
        assert dict(matplotlib.rcParams) == before


def shown_samples(drawing):
    return {text for text in texts_of(drawing.svg) if text.startswith("sample ")}


def test_the_samples_of_figure_2_are_those_whose_last_losses_differ_most(runs):
    drawing = draw_sample_losses(one_group(runs))
    assert "two runs of full" in drawing.caption
    folders = [run.path / "history" for run in runs if run.summary.arm == "full"][:2]
    first, second = (np.load(max(folder.glob("epoch-*.npy"))).astype(float) for folder in folders)
    compared = np.linspace(0, len(first) - 1, 64).round().astype(int)
    by_difference = sorted(compared, key=lambda index: -abs(first[index] - second[index]))
    assert shown_samples(drawing) == {f"sample {index}" for index in by_difference[:4]}
    assert "of 64 samples, evenly spread over the training set, these 4" in drawing.caption


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_figure_2_of_few_samples(samples, tmp_path):
    recipe = made_recipe().replaced("data", train_size=samples)
    folder = make_compare(tmp_path / "c", recipe=recipe, counts=False, arms=["full"])
    drawing = draw_sample_losses(one_group(read_runs([folder])))
    assert shown_samples(drawing) <= {f"sample {index}" for index in range(samples)}
    assert len(shown_samples(drawing)) == min(samples, 4)


def test_a_recipe_without_its_first_section_is_one_line(tmp_path):
    folder = make_compare(tmp_path / "c", arms=["full"], seeds=[0])
    file = folder / "full-0/recipe.toml"
    file.write_text(file.read_text().partition("\n")[2])
    said = r"expected .*full-0/recipe\.toml as fineprune wrote it, got: Expected `object`"
    with pytest.raises(InputError, match=said):
        read_runs([folder])


def test_runs_of_another_format_and_a_comparison_without_its_file_are_errors(tmp_path):
    folder = make_compare(tmp_path / "c", arms=["full"], seeds=[0])
    file = folder / "full-0" / "summary.json"
    summary = json.loads(file.read_text())
    file.write_text(json.dumps({**summary, "version": 99, "seed": "new"}))
    with pytest.raises(InputError, match="got 99: read it with the version of fineprune that"):
        read_runs([folder])
    (folder / "compare.json").unlink()
    with pytest.raises(InputError, match=r"got several without compare\.json: restore this file"):
        read_runs([folder])


def test_a_damaged_history_is_not_drawn(tmp_path):
    folder = make_compare(tmp_path / "c", counts=False)
    np.save(folder / "full-0" / "history" / "epoch-0001.npy", np.zeros(3))
    drawing = draw_sample_losses(one_group(read_runs([folder])))
    assert "two runs of fine-pruning" in drawing.caption


def test_figures_without_their_data_are_left_out(tmp_path):
    folder = make_compare(tmp_path / "c", seeds=[0], counts=False, history=False)
    group = one_group(read_runs([folder]))
    assert draw_counts(group) is None
    assert draw_sample_losses(group) is None
    assert len(draw_first(group)) == 2
    assert len(draw_further(group)) == 1


def test_counts_have_one_panel_per_window(runs):
    drawing = draw_counts(one_group(runs))
    titles = {text for text in texts_of(drawing.svg) if text.startswith("window ")}
    assert titles == {f"window to epoch {end}" for end in (6, 12, 18, 20)}


def test_the_caption_says_how_many_of_many_windows_are_shown(tmp_path):
    recipe = made_recipe(epochs=40).replaced("pruning", window=2, start=1)
    folder = make_compare(tmp_path / "c", recipe=recipe, arms=["fine-pruning"], seeds=[0])
    drawing = draw_counts(one_group(read_runs([folder])))
    assert "12 of 20 windows are shown" in drawing.caption
    assert len([text for text in texts_of(drawing.svg) if text.startswith("window ")]) == 12


@pytest.mark.parametrize("epochs", [1, 7, 20, 200, 400])
def test_the_cells_of_a_schedule_are_numbered_and_inside_the_figure(epochs):
    prunes = [epoch % 3 == 1 for epoch in range(epochs)]
    svg = draw_schedule(prunes, [epoch for epoch in (10, 20) if epoch <= epochs]).svg
    texts = texts_of(svg)
    assert {str(number) for number in range(1, epochs + 1)} <= texts
    assert ("window ends, counts are cleared" in texts) == (epochs >= 10)
    root = ElementTree.fromstring(svg)
    width, height = (float(number) for number in root.get("viewBox").split()[2:])
    for x, y in re.findall(r"translate\(([-\d.]+) ([-\d.]+)\)", svg):
        assert 0 <= float(x) <= width
        assert 0 <= float(y) <= height


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


def test_the_page_is_complete_and_in_order_and_fetches_nothing(page_of_runs):
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


def test_the_page_is_the_same_each_time(runs, page, page_of_runs):
    assert page(runs) == page_of_runs


def test_hostile_names_are_escaped(tmp_path, page):
    evil = "<script>alert(1)</script>&\"'"
    folder = make_compare(tmp_path / "c", seeds=[0], title=evil)
    hostile = [
        with_summary(
            run,
            network=evil,
            git=evil,
            hardware=dataclasses.replace(run.summary.hardware, cpu=evil),
        )
        for run in read_runs([folder])
    ]
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


def test_evaluations_counts_and_histories_may_be_missing(tmp_path, page):
    folder = make_compare(tmp_path / "c", counts=False, history=False, arms=["fine-pruning"])
    shutil.rmtree(folder / "fine-pruning-2")
    blank = {"test_loss": None, "test_accuracy": None}
    run = read_run(folder / "fine-pruning-0")
    run.metrics[:] = [{**line, **blank} for line in run.metrics]
    assert page([run]).count("<svg ") == 1


def test_damaged_counts_leave_out_their_figure_and_say_so(tmp_path, page, caplog):
    folder = make_compare(tmp_path / "c", arms=["fine-pruning"], seeds=[0], history=False)
    assert "DroppingCount in each window." in page(read_runs([folder]))
    file = sorted((folder / "fine-pruning-0/counts").iterdir())[0]
    file.write_bytes(file.read_bytes()[:-1])
    assert "DroppingCount in each window." not in page(read_runs([folder]))
    (warning,) = caplog.messages
    assert warning.startswith(f"no DroppingCount is drawn: expected counts in {file}")


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


def test_a_report_without_runs_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one finished run"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


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


def texts_of(svg):
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return {"".join(text.itertext()).strip() for text in texts}


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


@pytest.mark.parametrize("verb", ["report", "inspect", "plan"])
def test_a_folder_of_comparisons_is_told_which_folders_to_give(verb, tmp_path):
    for network in ("lenet", "resnet18"):
        folder = tmp_path / "paper-1" / network
        folder.mkdir(parents=True)
        (folder / "compare.json").touch()
    done = CliRunner().invoke(app, [verb, str(tmp_path / "paper-1")])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert f"give {tmp_path / 'paper-1/lenet'} {tmp_path / 'paper-1/resnet18'}" in done.stderr


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
