"""The figures and tables of both reports: whole, inside their space, and the same each time."""

import dataclasses
import io
import re
import statistics
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from made_runs import made_recipe, made_scaled, make_compare, table_rows, three_scaled, with_summary
from matplotlib.figure import Figure
from rich.console import Console

from fineprune.experiments.arm_table import grouped
from fineprune.experiments.configurations import configuration
from fineprune.experiments.scale_table import Scaled, scale_rows
from fineprune.report.comparison import draw_first, draw_further
from fineprune.report.comparison_table import results_table
from fineprune.report.figures import style
from fineprune.report.figures.counts import draw_counts
from fineprune.report.figures.curves import draw_curves, draw_time
from fineprune.report.figures.sample_losses import draw_sample_losses
from fineprune.report.figures.samples import draw_samples
from fineprune.report.figures.schedule import draw_schedule
from fineprune.report.scaling.figures import (
    draw_loss,
    draw_speedup,
    draw_staleness,
    draw_throughput,
)
from fineprune.report.scaling.tables import scale_tables
from fineprune.report.table import rich_table
from fineprune.runs.run import read_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return read_runs([make_compare(tmp_path_factory.mktemp("runs") / "compared")])


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn, as matplotlib's objects."""
    seen: list[Figure] = []
    drawing = style.drawing

    def noting(figure, *texts):
        seen.append(figure)
        return drawing(figure, *texts)

    monkeypatch.setattr(style, "drawing", noting)
    return seen


def group_of(runs):
    (group,) = grouped(runs)
    return group


def group_in(folder, **options):
    return group_of(read_runs([make_compare(folder / "c", **options)]))


def texts_of(svg):
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return {"".join(text.itertext()) for text in texts}


def points_inside(figure):
    """Return the points of each panel; all of them lie inside."""
    panels = []
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_transform() == axes.transData]
        points = np.concatenate([np.zeros((0, 2)), *(line.get_xydata() for line in lines)])
        low, high = np.transpose([axes.get_xlim(), sorted(axes.get_ylim())])
        assert not ((points < low) | (points > high)).any()
        panels.append([(x, y) for x, y in points.tolist()])
    return panels


def paper_rows():
    """Rows with the throughput of the paper's Table 2, and of four accelerators in a node."""
    made = scale_rows([made_scaled("one", [1, 1], [2, 1])])[0]
    table = {"one": 33.0, "all-reduce 4": 124.18, "mixed 8+1 group=4": 195.60,
             "mixed 16+3 group=4": 383.09, "mixed 32+7 group=4": 809.10}  # fmt: skip
    rows = []
    for text, images in table.items():
        of = configuration(text)
        rows.append(dataclasses.replace(made, configuration=text, strategy=of.strategy,
                                        workers=of.workers, nodes=of.nodes, per_node=of.group,
                                        throughput=images, speedup=images / 33.0))  # fmt: skip
    return rows


# Each figure, how many points it has at least, and some of its texts.
FIGURES: list[Any] = [
    (lambda runs: draw_time(group_of(runs)), 40, {"training time, seconds", "test accuracy, %"}),
    (lambda runs: draw_samples(group_of(runs)), 0, {"epoch", "samples", "learning rate"}),
    (
        lambda runs: draw_curves(group_of(runs)),
        40,
        {"epoch", "test loss, nats", "test accuracy, %", "fine-pruning"},
    ),
    (
        lambda runs: draw_counts(group_of(runs)),
        0,
        {f"window to epoch {end}" for end in (6, 12, 18, 20)},
    ),
    (lambda runs: draw_sample_losses(group_of(runs)), 40, set()),
    (lambda runs: draw_throughput(scale_rows(three_scaled())), 3, set()),
    (lambda runs: draw_speedup(paper_rows()), 5, set()),
    (lambda runs: draw_loss(three_scaled(), 0.9), 9, set()),
    (lambda runs: draw_staleness(scale_rows(three_scaled())), 0, set()),
]


@pytest.mark.parametrize(("draw", "number", "texts"), FIGURES)
def test_a_figure_has_all_its_points_and_labels_and_is_the_same_each_time(
    draw, number, texts, runs, figures
):
    """Also for a user whose own settings of matplotlib are others, which stay as they are."""
    drawing = draw(runs)
    with matplotlib.rc_context({"font.size": 31, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        assert draw(runs) == drawing
        assert dict(matplotlib.rcParams) == before
    root = ElementTree.fromstring(drawing.svg)
    assert (root.tag, root.get("role")) == ("{http://www.w3.org/2000/svg}svg", "img")
    assert drawing.caption.endswith(".")
    assert texts <= texts_of(drawing.svg)
    # SVG viewers remove spaces around a text.
    assert all(text == text.strip() for text in texts_of(drawing.svg))
    assert sum(map(len, points_inside(figures[0]))) >= number


def test_the_papers_figure_2_has_two_panels(figures):
    """They have other speedups: those of a node's accelerators, and those of nodes."""
    draw_speedup(paper_rows())
    inside, across = points_inside(figures[0])
    assert (4, pytest.approx(124.18 / 33)) in inside
    assert {(2, 1.58), (4, 3.08), (8, 6.52)} <= {(x, round(y, 2)) for x, y in across}
    assert all(axes.get_ylim()[0] == 0 for axes in figures[0].axes)


def test_a_curve_of_one_point_is_drawn(tmp_path, figures):
    recipe = made_recipe().replaced("training", evaluate_every=20, evaluate_last=1)
    group = group_in(tmp_path, recipe=recipe, arms=["full"], seeds=[0], history=False)
    draw_time(group)
    draw_curves(group)
    draw_loss([made_scaled("one", [4, 4], [2, 1], pruned=[1])], None)
    for figure in figures:
        assert len(points_inside(figure)[0]) == 1
        assert figure.axes[0].lines[0].get_marker() not in ("", "None")


def test_the_end_of_each_arm_has_its_mean_and_its_time(runs, figures):
    group = group_of(runs)
    draw_time(group)
    places = points_inside(figures[0])[1]
    for arm in group.arms:
        of = [run.summary for run in group.of(arm)]
        seconds = statistics.fmean(summary.seconds_train for summary in of)
        accuracy = 100 * statistics.fmean(summary.accuracy_last for summary in of)
        assert (pytest.approx(seconds), pytest.approx(accuracy)) in places, arm


def test_an_arm_has_one_colour_and_ids_are_not_shared_between_figures(runs):
    drawings = draw_curves(group_of(runs)), draw_time(group_of(runs))
    ids = [set(re.findall(r' id="([^"]+)"', drawing.svg)) for drawing in drawings]
    assert ids[0]
    assert not ids[0] & ids[1]
    for drawing, own in zip(drawings, ids, strict=True):
        for colour in ("currentColor", "#d55e00", "#0072b2", "#009e73"):
            assert colour in drawing.svg
        assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', drawing.svg)) == own


def shown_samples(drawing):
    return {text for text in texts_of(drawing.svg) if text.startswith("sample ")}


def test_the_samples_of_figure_2_are_those_whose_last_losses_differ_most(runs):
    drawing = draw_sample_losses(group_of(runs))
    assert "two runs of full" in drawing.caption
    folders = [run.path / "history" for run in runs if run.summary.arm == "full"][:2]
    first, second = (np.load(max(folder.glob("epoch-*.npy"))).astype(float) for folder in folders)
    compared = np.linspace(0, len(first) - 1, 64).round().astype(int)
    by_difference = sorted(compared, key=lambda index: -abs(first[index] - second[index]))
    assert shown_samples(drawing) == {f"sample {index}" for index in by_difference[:4]}
    assert "of 64 samples, evenly spread over the training set, these 4" in drawing.caption


@pytest.mark.parametrize("samples", [1, 5])
def test_figure_2_of_few_samples(samples, tmp_path):
    recipe = made_recipe().replaced("data", train_size=samples)
    drawing = draw_sample_losses(group_in(tmp_path, recipe=recipe, counts=False, arms=["full"]))
    assert shown_samples(drawing) <= {f"sample {index}" for index in range(samples)}
    assert len(shown_samples(drawing)) == min(samples, 4)


def test_figures_without_their_data_are_left_out(tmp_path):
    group = group_in(tmp_path, seeds=[0], counts=False, history=False)
    assert draw_counts(group) is None
    assert draw_sample_losses(group) is None
    assert (len(draw_first(group)), len(draw_further(group))) == (2, 1)
    assert draw_staleness(scale_rows(three_scaled()[:2])) is None


def test_damaged_counts_and_histories_are_not_drawn_and_it_is_said(tmp_path, caplog):
    group = group_in(tmp_path, arms=["full", "fine-pruning"], seeds=[0, 1])
    np.save(tmp_path / "c/full-0/history/epoch-0001.npy", np.zeros(3))
    assert "two runs of fine-pruning" in draw_sample_losses(group).caption
    assert draw_counts(group) is not None
    file = min((tmp_path / "c/fine-pruning-0/counts").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    assert draw_counts(group) is None
    (warning,) = caplog.messages
    assert warning.startswith(f"no DroppingCount is drawn: expected counts in {file}")


def test_the_caption_says_how_many_of_many_windows_are_shown(tmp_path):
    recipe = made_recipe(epochs=40).replaced("pruning", window=2, start=1)
    drawing = draw_counts(group_in(tmp_path, recipe=recipe, arms=["fine-pruning"], seeds=[0]))
    assert "12 of 20 windows are shown" in drawing.caption
    assert len([text for text in texts_of(drawing.svg) if text.startswith("window ")]) == 12


@pytest.mark.parametrize("epochs", [1, 20, 400])
def test_the_cells_of_a_schedule_are_numbered_and_inside_the_figure(epochs):
    prunes = [epoch % 3 == 1 for epoch in range(epochs)]
    svg = draw_schedule(prunes, [epoch for epoch in (10, 20) if epoch <= epochs]).svg
    texts = texts_of(svg)
    assert {str(number) for number in range(1, epochs + 1)} <= texts
    assert ("window ends, counts are cleared" in texts) == (epochs >= 10)
    width, height = map(float, ElementTree.fromstring(svg).get("viewBox").split()[2:])
    for x, y in re.findall(r"translate\(([-\d.]+) ([-\d.]+)\)", svg):
        assert 0 <= float(x) <= width
        assert 0 <= float(y) <= height


# Tables


def printed(table, width):
    output = io.StringIO()
    rich = rich_table(table, width)
    rich.caption = None
    Console(width=width, no_color=True, file=output).print(rich)
    text = output.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    return text


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_tables_fit_the_terminal_without_breaks_inside_words(columns, runs):
    scaled = three_scaled()
    rows = scale_rows([*scaled, Scaled(configuration("mixed 8+4 group=2"), scaled[2].run)])
    tables = [results_table(table_rows(runs), 0.004), *(scale_tables(rows) if columns > 40 else ())]
    for table in tables:
        text = printed(table, columns)
        words = " ".join(itself for line in table.lines for itself in line)
        assert set(words.split()) <= set(text.split())
        if columns == 200:
            assert " ".join(table.headers) in " ".join(text.split())


def test_long_names_of_arms_are_broken_at_their_hyphens_in_the_terminal(runs):
    names = {"random": "an-unusually-long-name", "shorter": "fewer-epochs-late"}
    renamed = [with_summary(run, arm=names.get(run.summary.arm, run.summary.arm)) for run in runs]
    text = printed(results_table(table_rows(renamed), 0.004), 66)
    assert re.search(r"^ *an-unusually- +3 .*\n *long-name *$", text, re.MULTILINE)
