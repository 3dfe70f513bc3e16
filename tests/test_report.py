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
from rich.console import Console
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.cli.results import show_results
from fineprune.errors import InputError
from fineprune.experiments.arm_table import group_rows, grouped
from fineprune.experiments.controls import arm_recipe
from fineprune.report.comparison_table import (
    COLUMNS,
    comparison_table,
    row_dicts,
    terminal_tables,
)
from fineprune.report.facts import facts, unequal
from fineprune.report.figures.counts import draw_counts
from fineprune.report.figures.curves import draw_curves
from fineprune.report.figures.sample_losses import draw_sample_losses
from fineprune.report.figures.schedule import schedule_svg
from fineprune.report.html import draw_first, draw_further, write_report
from fineprune.report.paper import RESULTS, paper_notes, paper_rows, paper_table
from fineprune.report.table import rich_table
from fineprune.report.verdict import headline, verdict
from fineprune.runs.run import read_run, read_runs
from fineprune.training.recipe import read_recipe


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
        monkeypatch.setattr(f"fineprune.report.html.{name}", lambda group: [])
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
        for table in terminal_tables(groups):
            console.print(rich_table(table, console.width))
    return captured.get()


def lines_of(rows):
    """The cells of each line of the only table by its headers, those of a paper last."""
    table = comparison_table("", rows, COLUMNS)
    return [dict(zip(table.headers, line, strict=True)) for line in [*table.lines, *table.paper]]


# Tables


def test_the_table_for_the_terminal_fits_80_characters_without_truncation(runs):
    rows = table_rows(runs)
    text = terminal(rows)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    # Columns that do not fit are left out.
    assert all(re.search(rf" {100 * (row.accuracy_best3 or 0):.2f} *\n", text) for row in rows)
    for arm in ("full", "fine-pruning", "random", "fewer-epochs"):
        assert re.search(rf"^ *{arm} +3 ", text, re.MULTILINE)
    assert "selects epochs on the evaluated set" in " ".join(text.split())


def test_in_a_narrow_terminal_each_number_stays_whole(runs):
    rows = table_rows(runs)
    text = terminal(rows, width=40)
    assert max(map(len, text.splitlines())) <= 40
    for row in rows:
        assert re.search(rf"^ *{row.arm}\s.*\n +seeds +3 *$", text, re.MULTILINE)
        assert re.search(rf" best three\s%\s+{100 * (row.accuracy_best3 or 0):.2f} *\n", text)


def test_the_header_in_the_terminal_has_at_most_two_lines(runs):
    lines = terminal(table_rows(runs)).splitlines()
    rule = next(number for number, line in enumerate(lines) if "───" in line)
    header = [line for line in lines[1:rule] if line.strip()]
    assert 1 <= len(header) <= 2
    assert header[-1].split()[:2] == ["arm", "seeds"]


def test_the_command_prints_a_screen_that_ends_with_the_headline(compared, tmp_path):
    out = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", str(compared), "--out", str(out)])
    assert result.exit_code == 0, result.output
    *table, last = result.stdout.splitlines()
    assert len(table) <= 14
    assert table[-1] == f"report: {out}"
    assert f'<h2 class="headline">{plain(last)}</h2>' in plain(out.read_text())
    printed = CliRunner().invoke(app, ["report", str(compared), "--out", str(out), "--json"])
    assert json.loads(printed.stdout)["headlines"] == {"lenet on digits": last}


def test_long_names_of_arms_are_broken_at_their_hyphens_in_the_terminal(runs):
    long = ("full", "matched", "an-unusually-long-name", "fewer-epochs-late")
    names = dict(zip(ARMS, long, strict=True))
    renamed = [with_summary(run, arm=names[run.summary.arm]) for run in runs]
    longer = [with_summary(run, seconds_train=1000 * run.summary.seconds_train) for run in renamed]
    rows = table_rows(longer)
    text = terminal(rows)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert all(re.search(rf" {100 * (row.accuracy_best3 or 0):.2f} *\n", text) for row in rows)
    assert re.search(r"^ *an-unusually- +3 .*\n *long-name *$", text, re.MULTILINE)


def test_the_table_shows_percentages_and_points_with_two_decimals(runs):
    rows = table_rows(runs)
    full, shown, *_ = lines_of(rows)
    assert list(shown) == [column.header for column in COLUMNS]
    assert shown["arm"] == "fine-pruning"
    accuracy, difference = rows[1].accuracy_last, rows[1].last_difference
    assert accuracy is not None
    assert shown["last epoch, %"] == f"{100 * accuracy:.2f}"
    assert difference is not None
    assert difference.half_width is not None
    points = f"{100 * difference.mean:+.2f}\N{NO-BREAK SPACE}±{100 * difference.half_width:.2f}"
    assert shown["last vs full, points"] == points
    assert full["time saved, %"] == "-"


def test_with_one_seed_no_interval_is_printed(runs):
    rows = table_rows([run for run in runs if run.summary.seed == 0])
    pruned = lines_of(rows)[1]
    assert "±" not in str(pruned)
    assert re.fullmatch(r"[+-]\d\.\d\d", pruned["last vs full, points"])


def test_the_cost_of_the_full_accuracy_is_a_number_only_if_every_run_reaches_it(runs):
    changed = [with_summary(run, accuracy_last=0.5) for run in runs]
    row = lines_of(table_rows(changed))[1]
    # The runs are evaluated after every second epoch, the first of which trains on all data.
    assert row["samples to full's accuracy"] == "1,024"
    changed[0] = with_summary(runs[0], accuracy_last=0.99)
    row = lines_of(table_rows(changed))[1]
    assert (
        row["samples to full's accuracy"]
        == row["time to full's accuracy, s"]
        == "in 67 % of the runs"
    )
    row = lines_of(table_rows([with_summary(run, accuracy_last=0.99) for run in runs]))[1]
    assert row["samples to full's accuracy"] == "never"


def test_rows_can_be_written_as_json(runs):
    rows = table_rows(runs)
    full, pruned = json.loads(json.dumps(row_dicts(rows)))[:2]
    assert full["last_difference"] is None
    assert pruned["accuracy_last"] == rows[1].accuracy_last
    assert pruned["last_difference"] == {
        "mean": rows[1].last_difference.mean,
        "low": rows[1].last_difference.low,
        "high": rows[1].last_difference.high,
        "pairs": 3,
    }


@pytest.fixture
def cifar10_runs(tmp_path, monkeypatch):
    """Runs of CIFAR-10, which has 1,024 images here."""
    monkeypatch.setattr("fineprune.report.paper.TRAIN_SAMPLES", 1024)
    recipe = made_recipe(dataset="cifar10", train_size=1024)
    folder = make_compare(tmp_path / "c", recipe=recipe, seeds=[0], counts=False, history=False)
    return read_runs([folder])


def test_the_papers_results_are_shown_for_its_networks_on_cifar10_only(runs, cifar10_runs):
    rows = table_rows(cifar10_runs)
    shown = lines_of(rows)[-1]
    assert (shown["arm"], shown["time saved, %"]) == ("paper: pruned", "11.80")
    assert (shown["overhead, s"], shown["best three, %"]) == ("4.27", "74.72")
    assert shown["best three vs full, points"] == "-0.43"
    assert "paper: full" in terminal(rows)
    assert paper_rows(grouped(runs)[0]) == []
    assert len(RESULTS) == 10


def test_the_papers_tables_are_compared_with_each_network_that_was_run(
    runs, cifar10_runs, undrawn, page_of_runs
):
    lenet = cifar10_runs
    vgg = [with_summary(run, network="vgg13") for run in lenet]
    groups = grouped([*runs, *lenet, *vgg])
    table = paper_table(groups)
    assert table is not None
    lines = table.lines
    assert [line[0] for line in lines] == ["lenet", "vgg13"]
    assert [line[4] for line in lines] == ["11.80", "7.40"]
    pruned = next(run.summary for run in lenet if run.summary.arm == "fine-pruning")
    assert lines[0][11] == f"{100 * pruned.accuracy_best3:.2f}"
    assert f"Lines with {pruned.epochs} epochs" in paper_notes(groups)[0]
    text = undrawn(lenet)
    assert "Tables 1 and 2, compared with ours" in text
    assert "shortened schedule" in text
    parse_strictly(text)
    assert "Tables 1 and 2, compared with ours" not in page_of_runs
    only_full = [run for run in lenet if run.summary.arm == "full"]
    assert paper_table(grouped(only_full)) is None


def test_each_group_has_a_table(runs):
    others = [with_summary(run, network="vgg13") for run in runs]
    groups = [group_rows(group) for group in grouped([*runs, *others])]
    assert "vgg13 on" in terminal(*groups)
    titles = [table.title for table in terminal_tables(groups)]
    assert "vgg13 on digits, accuracy on the test set" in titles
    assert terminal(*groups).count("fine-pruning") == 2


def test_without_groups_there_are_no_tables():
    assert terminal_tables([]) == []


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


def test_points_have_tooltips_in_their_own_place(runs):
    time, samples = (ElementTree.fromstring(d.svg) for d in draw_first(one_group(runs)))
    titles = titles_of(time)
    full = one_group(runs).of("full")
    accuracy = 100 * statistics.fmean(run.summary.accuracy_last for run in full)
    last = next(title for title in titles if title.startswith("full, epoch 20: "))
    assert last.startswith(f"full, epoch 20: {accuracy:.2f} % after ")
    assert last.endswith(" with 3 seeds")
    # Tooltips are in the order of their points, from left to right.
    epochs = [float(title.split()[2].rstrip(":")) for title in titles if title.startswith("full")]
    assert epochs == sorted(epochs)
    assert len(epochs) > 3
    first = next(run for run in runs if run.summary.arm == "fine-pruning").metrics
    shown = [title for title in titles_of(samples) if title.startswith("fine-pruning")]
    expected = [
        f"fine-pruning, epoch {line['epoch'] + 1}: {line['samples']:,} samples, "
        f"learning rate {line['lr']:.4g}"
        for line in first
    ]
    assert shown == expected
    # An epoch with fewer samples is drawn lower.
    places = points_of(samples, "fine-pruning")
    counts = [line["samples"] for line in first]
    assert len(set(counts)) > 1
    assert np.corrcoef(counts, [-y for _, y in places])[0, 1] == pytest.approx(1)
    assert [x for x, _ in places] == sorted(x for x, _ in places)


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
    first, second = (np.load(max(folder.glob("*.npy")))["loss"].astype(float) for folder in folders)
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
    with pytest.raises(InputError, match=r"the sections of a recipe in .*full-0/recipe\.toml, got"):
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


def test_counts_have_one_panel_per_window_titled_with_the_counted_epochs(runs):
    drawing = draw_counts(one_group(runs))
    titles = {text for text in texts_of(drawing.svg) if text.startswith("epochs ")}
    assert titles == {"epochs 1 to 5", "epochs 6 to 11", "epochs 12 to 17", "epochs 18 to 20"}


def test_the_caption_says_how_many_of_many_windows_are_shown(tmp_path):
    recipe = made_recipe(epochs=40).replaced("pruning", window=2, start=1)
    folder = make_compare(tmp_path / "c", recipe=recipe, arms=["fine-pruning"], seeds=[0])
    drawing = draw_counts(one_group(read_runs([folder])))
    assert "12 of 20 windows are shown" in drawing.caption
    assert len([text for text in texts_of(drawing.svg) if text.startswith("epochs ")]) == 12


@pytest.mark.parametrize("epochs", [1, 7, 20, 200, 400])
def test_the_cells_of_a_schedule_are_numbered_and_inside_the_figure(epochs):
    prunes = [epoch % 3 == 1 for epoch in range(epochs)]
    svg = schedule_svg(prunes, [epoch for epoch in (10, 20) if epoch <= epochs])
    texts = texts_of(svg)
    assert {str(number) for number in range(1, epochs + 1)} <= texts
    assert ("window ends, counts are cleared" in texts) == (epochs >= 10)
    root = ElementTree.fromstring(svg)
    width, height = (float(number) for number in root.get("viewBox").split()[2:])
    for x, y in re.findall(r"translate\(([-\d.]+) ([-\d.]+)\)", svg):
        assert 0 <= float(x) <= width
        assert 0 <= float(y) <= height


# The verdict


def verdict_on(runs):
    group = one_group(runs)
    return verdict(group, table_rows(runs))


def with_accuracies(runs, **by_arm):
    return [
        with_summary(run, accuracy_last=by_arm[run.summary.arm.replace("-", "_")](number))
        for run, number in zip(runs, [0] * 4 + [1] * 4 + [2] * 4, strict=True)
    ]


def test_an_arm_is_better_or_worse_only_if_the_interval_excludes_zero(runs):
    changed = with_accuracies(
        runs,
        full=lambda n: 0.95 + n / 1000,
        fine_pruning=lambda n: 0.94 + n / 1000 + n % 2 / 10000,
        random=lambda n: 0.94 + n / 100,
        fewer_epochs=lambda n: 0.92 + n / 1000 + n % 2 / 1000,
    )
    full, random, fewer = verdict_on(changed)
    assert "below full training" in full
    assert "significantly worse" in full
    assert "the same number of samples in the same epochs" in random
    assert "not distinguishable" in random
    assert "significantly" not in random
    assert "above it" in fewer
    assert "significantly better" in fewer
    assert "18 epochs instead, at about the same cost" in fewer


def test_with_one_seed_no_arm_is_better_or_worse(runs):
    sentences = verdict_on([run for run in runs if run.summary.seed == 0])
    assert len(sentences) == 3
    for sentence in sentences:
        assert "below about 0.5 points is not meaningful" in sentence
        assert "interval" not in sentence
        assert "significantly" not in sentence


def test_a_longer_training_time_is_reported(runs):
    slow = [
        with_summary(run, seconds_train=150.0 if run.summary.arm == "fine-pruning" else 100.0)
        for run in runs
    ]
    assert "took 50.0 % more training time" in verdict_on(slow)[0]


def test_a_single_arm_is_not_compared(runs):
    (sentence,) = verdict_on([run for run in runs if run.summary.arm == "fine-pruning"])
    assert "Without a full run with the same seed" in sentence
    (sentence,) = verdict_on(runs[:1])
    assert sentence.startswith("Full reached")
    assert "Without another arm with the same seed" in sentence


def test_the_matched_control_and_one_with_a_larger_rate_are_described(runs):
    names = {"random": "matched", "fewer-epochs": "shorter-1.5"}
    renamed = []
    for run in runs:
        arm = names.get(run.summary.arm, run.summary.arm)
        lr = 0.15 if arm == "shorter-1.5" else 0.1
        recipe = {**run.recipe, "training": {**run.recipe["training"], "lr": lr}}
        own = {"recipe": recipe, "metrics": [*run.metrics]}
        renamed.append(dataclasses.replace(with_summary(run, arm=arm), **own))
    _, matched, scaled = verdict_on(renamed)
    assert matched.startswith("Skipping as many samples in every epoch, but at random, reaches")
    assert "times the learning rate, at about the same" in scaled
    for run in renamed:
        if run.summary.arm == "matched":
            run.metrics[-1] = {**run.metrics[-1], "skipped": 1}
    assert verdict_on(renamed)[1].startswith("Matched, the control of another method, at about")


def test_a_method_is_described_beside_the_control_of_the_same_seed(runs):
    """The first seed of the control is missing, and that of the method skipped other samples."""
    kept = []
    for run in runs:
        if run.summary.arm == "random":
            run = with_summary(run, arm="matched")
        first = run.summary.seed == min(other.summary.seed for other in runs)
        if first and run.summary.arm == "fine-pruning":
            lines = [*run.metrics[:-1], {**run.metrics[-1], "skipped": 1}]
            run = dataclasses.replace(run, metrics=lines)
        if not (first and run.summary.arm == "matched"):
            kept.append(run)
    assert verdict_on(kept)[1].startswith("Skipping as many samples in every epoch")


def test_runs_of_other_numbers_of_processes_are_said_to_be_unequal(runs):
    assert unequal(runs) == []
    (sentence,) = unequal([with_summary(runs[0], ranks=2), *runs[1:]])[:1]
    assert "trained by different numbers of processes (2 and 1)" in sentence


def test_equal_differences_in_all_seeds_do_not_make_an_arm_better_or_worse(runs):
    changed = with_accuracies(
        runs,
        full=lambda n: 0.75,
        fine_pruning=lambda n: 0.5,
        random=lambda n: 0.5,
        fewer_epochs=lambda n: 0.5,
    )
    for sentence in verdict_on(changed):
        assert "the same in every seed, so these seeds do not show" in sentence
        assert "significantly" not in sentence


def test_arms_are_equivalent_only_if_the_interval_is_inside_the_margin(runs):
    changed = with_accuracies(
        runs,
        full=lambda n: 0.95 + n / 1000,
        fine_pruning=lambda n: 0.95 + n / 1000 + (n - 1) / 10000,
        random=lambda n: 0.949 + n / 1000,
        fewer_epochs=lambda n: 0.94 + n / 100,
    )
    full, random, fewer = verdict_on(changed)
    assert full.endswith("seeds, and equivalent within 0.4 points (p < 0.001).")
    assert "significantly better (the interval excludes zero), but equivalent within 0.4" in random
    assert "not distinguishable with these seeds, and not shown to be equivalent within" in fewer
    group = one_group(changed)
    narrow = verdict(group, table_rows(changed), 0.0001)
    assert "not shown to be equivalent within 0.01 points (p = 0.113)" in narrow[0]
    assert narrow[1].endswith("significantly better (the interval excludes zero).")


def test_the_method_of_the_verdict_is_the_policy_of_the_comparisons_recipe(tmp_path):
    arms = ["full", "adaptive", "fine-pruning"]
    # The numbers of the adaptive policy are invented too: the recipe is that of fine-pruning.
    folder = make_compare(tmp_path / "c", arms=["full", "fine-pruning", "random"], seeds=[0])
    renamed = {"fine-pruning": arms[1], "random": arms[2]}

    def sentences():
        runs = read_runs([folder])
        return verdict_on([with_summary(r, arm=renamed.get(r.summary.arm, "full")) for r in runs])

    assert sentences()[0].startswith("Adaptive skipped")
    (folder / "recipe.toml").write_text(made_recipe().to_toml())
    first, second = sentences()
    assert first.startswith("Fine-pruning skipped")
    assert ": fine-pruning is" in second
    (folder / "recipe.toml").write_text("[pruning")
    assert sentences()[0].startswith("Adaptive skipped")


def headline_of(runs, margin=0.004):
    group = one_group(runs)
    return headline(group, table_rows(runs), margin)


def timed(runs, saved):
    """The same runs, of which fine-pruning saves these fractions of 100 s."""
    seconds = dict(zip(sorted({run.summary.seed for run in runs}), saved, strict=False))
    return [
        with_summary(
            run,
            seconds_train=100 * (1 - seconds[run.summary.seed])
            if run.summary.arm == "fine-pruning"
            else 100.0,
        )
        for run in runs
    ]


def test_the_headline_claims_what_the_intervals_show(runs):
    changed = with_accuracies(
        timed(runs, (0.32, 0.33, 0.34)),
        full=lambda n: 0.95 + n / 1000,
        fine_pruning=lambda n: 0.97 + n / 1000 + (n - 1) / 1000,
        random=lambda n: 0.96 + n / 50,
        fewer_epochs=lambda n: 0.98 + n / 1000 + n % 2 / 10000,
    )
    assert headline_of(changed) == (
        "Fine-pruning: 33 % less time, 2.0 ± 0.2 points above full training; worse than 18 epochs "
        "(fewer-epochs); not distinguishable from a random choice (random)."
    )
    assert (
        "2.0 ± 0.2 points above full training, but equivalent within 3 points; worse than 18 "
        in (headline_of(changed, 0.03))
    )
    slower = headline_of(timed(changed, (-0.5, -0.5, -0.49)))
    assert slower.startswith("Fine-pruning: 50 % more time, ")


def test_the_headline_calls_arms_equal_only_inside_the_margin(runs):
    changed = with_accuracies(
        runs,
        full=lambda n: 0.95 + n / 1000,
        fine_pruning=lambda n: 0.95 + n / 1000 + (n - 1) / 10000,
        random=lambda n: 0.95 + n / 1000,
        fewer_epochs=lambda n: 0.94 + n / 100,
    )
    shown = headline_of(changed)
    assert "equivalent to full training within 0.4 points; not distinguishable from 18" in shown
    assert "; equivalent to a random choice (random) within 0.4 points." in shown
    narrow = headline_of(changed, 0.0001)
    assert "not distinguishable from full training (+0.00" in narrow
    assert "equivalent" not in narrow


def test_the_headline_gives_no_time_that_the_seeds_do_not_show(runs):
    precise = timed(runs, (0.32, 0.33, 0.34))
    assert ": 33 % less time, " in headline_of(precise)
    skipped = f": {100 * runs[1].summary.skipped_share:.0f} % fewer sample-steps, "
    assert skipped in headline_of(timed(runs, (0.1, 0.3, 0.8)))
    other = dataclasses.replace(runs[0].summary.hardware, cpu="Other CPU")
    elsewhere = [
        with_summary(run, hardware=other) if run.summary.arm == "full" else run for run in precise
    ]
    assert skipped in headline_of(elsewhere)


def test_the_headline_of_one_seed_claims_nothing_on_accuracies(runs):
    shown = headline_of([run for run in runs if run.summary.seed == 0])
    assert shown.endswith("of full training; one seed allows no claim on accuracies.")
    assert "sample-steps" in shown
    for claim in ("time", "better", "worse", "above", "below", "equivalent", "distinguishable"):
        assert claim not in shown
    equal = with_accuracies(
        runs,
        full=lambda n: 0.75,
        fine_pruning=lambda n: 0.5,
        random=lambda n: 0.5,
        fewer_epochs=lambda n: 0.4,
    )
    assert (
        "25.0 points below full training in every seed, which allows no claim; with no claim"
        in (headline_of(equal))
    )


def test_the_headline_without_full_training_or_without_a_method(runs):
    (alone,) = verdict_on(runs[:1])
    assert headline_of(runs[:1]) == alone
    without = [run for run in runs if run.summary.arm != "full"]
    assert headline_of(without) == "No arm has a full run with the same seed."
    controls = with_accuracies(
        runs,
        full=lambda n: 0.95 + n / 1000,
        fine_pruning=lambda n: 0.5,
        random=lambda n: 0.90 + n / 1000 + n % 2 / 1000,
        fewer_epochs=lambda n: 0.97 + n / 1000 + n % 2 / 1000,
    )
    controls = [run for run in controls if run.summary.arm != "fine-pruning"]
    assert headline_of(controls) == "Full training is worse than fewer-epochs; better than random."


def test_the_headline_leaves_out_arms_that_cost_more(tmp_path):
    folder = make_compare(tmp_path / "c", counts=False, history=False)
    for number in range(3):
        recipe = read_recipe(folder / f"fewer-epochs-{number}" / "recipe.toml")
        shutil.rmtree(folder / f"fewer-epochs-{number}")
        shutil.rmtree(folder / f"random-{number}")
        longer = recipe.replaced("training", epochs=19)
        shorter = recipe.replaced("training", epochs=14)
        make_run(folder / f"fewer-epochs-{number}", longer, "fewer-epochs", history=False)
        make_run(folder / f"random-{number}", shorter, "shorter", history=False)
    shown = headline_of(read_runs([folder]))
    assert "fewer-epochs" not in shown
    assert re.search(r"14 epochs \(shorter\) at 0\.\d\d times the sample-steps", shown)


# The page


def test_the_page_is_complete_and_in_order_and_fetches_nothing(page_of_runs):
    text = page_of_runs
    order = ["<h1>digits-lenet</h1>", 'class="headline"', "<svg", 'class="verdict"', "<table>"]
    order += ["What the columns mean", "What to", "Made CPU", "Further figures"]
    places = [text.index(part) for part in [*order, "[pruning]"]]
    assert places == sorted(places)
    assert text.count("<svg ") == 5
    assert '<div class="verdict">' not in re.sub(r"<details>.*?</details>", "", text, flags=re.S)
    assert "http-equiv" not in text
    assert "<script" not in text
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


def test_each_group_has_a_section_and_a_line_in_the_overview(runs, undrawn):
    some = [run for run in runs if run.summary.seed == 0]
    text = undrawn([*some, *(with_summary(run, network="vgg13") for run in some)])
    assert text.count("<section ") == 2
    assert "<h2>lenet on digits</h2>" in text
    assert '<a href="#group-2">vgg13 on digits</a>' in text
    assert "<h2>Overview</h2>" in text
    parse_strictly(text)


def test_a_single_run_can_be_reported(compared, page):
    text = page([read_run(compared / "full-0")])
    assert "fineprune train recipe.toml" in text
    assert "There is no full run" not in text
    assert "Overview" not in text
    assert text.count("<svg ") == 3


def test_evaluations_counts_and_histories_may_be_missing(tmp_path, page):
    folder = make_compare(tmp_path / "c", counts=False, history=False, arms=["fine-pruning"])
    shutil.rmtree(folder / "fine-pruning-2")
    blank = {"test_loss": None, "test_accuracy": None}
    run = read_run(folder / "fine-pruning-0")
    run.metrics[:] = [{**line, **blank} for line in run.metrics]
    text = page([run])
    assert text.count("<svg ") == 1
    assert "There is no full run, so no arm is compared" in text


def test_damaged_counts_leave_out_their_figure_and_say_so(tmp_path, page, caplog):
    folder = make_compare(tmp_path / "c", arms=["fine-pruning"], seeds=[0], history=False)
    assert "Histograms of DroppingCount" in page(read_runs([folder]))
    file = sorted((folder / "fine-pruning-0/counts").iterdir())[0]
    file.write_bytes(file.read_bytes()[:-1])
    assert "Histograms of DroppingCount" not in page(read_runs([folder]))
    (warning,) = caplog.messages
    assert warning.startswith(f"no DroppingCount is drawn: expected counts in {file}")


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ("full 20, full 20, adaptive 20", "20"),
        ("full 2, full 4, full 2", "2 and 4"),
        ("full 4, shorter 2, full 4", "full 4, shorter 2"),
        ("full 2, full 4, adaptive 4, full 6", "full 2, 4 and 6, adaptive 4"),
    ],
)
def test_the_numbers_of_epochs_are_those_of_all_runs(arms, said, runs):
    made = [arm.split() for arm in arms.split(", ")]
    of_arms = [with_summary(runs[0], arm=arm, epochs=int(number)) for arm, number in made]
    assert dict(facts(of_arms))["Epochs"] == said


def test_caveats_name_the_evaluated_set_and_warn_of_a_single_seed(runs, undrawn):
    text = undrawn([with_summary(run, evaluated_on="validation") for run in runs])
    assert "Accuracies are measured on the validation set" in text
    assert "held out from the training set" in text
    assert "not corrected for the number of comparisons" in text
    assert "different numbers of seeds" not in text
    assert "With one seed" not in text
    once = [run for run in runs if run.summary.arm != "random" or run.summary.seed == 0]
    with_fewer = undrawn(once)
    assert "different numbers of seeds" in with_fewer
    assert "With one seed" in with_fewer


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


def titles_of(svg):
    return [title.text for title in svg.iter("{http://www.w3.org/2000/svg}title")]


def points_of(svg, arm):
    """The places of the points whose tooltips begin with an arm."""
    name = "{http://www.w3.org/2000/svg}"
    return [
        (float(use.get("x")), float(use.get("y")))
        for point in svg.iter(f"{name}g")
        for title, use in [(point.find(f"{name}title"), point.find(f"{name}use"))]
        if title is not None and title.text.startswith(arm)
    ]


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


def test_controls_with_another_cost_are_not_called_equal(tmp_path):
    """Runs with another schedule or another length are not controls of equal cost."""
    folder = make_compare(tmp_path / "c", seeds=[0])
    other = made_recipe().replaced("pruning", window=2, start=1)
    shutil.rmtree(folder / "random-0")
    make_run(folder / "random-0", arm_recipe(other, "random", 512), "random")
    shutil.rmtree(folder / "fewer-epochs-0")
    longer = made_recipe().replaced("pruning", policy="full").replaced("training", epochs=19)
    make_run(folder / "fewer-epochs-0", longer, "fewer-epochs")
    sentences = verdict_on(read_runs([folder]))
    assert sum("(not a control of equal cost" in sentence for sentence in sentences) == 2
    assert "the same number of samples in the same epochs" not in " ".join(sentences)
    assert "about the same cost" not in " ".join(sentences)


@pytest.mark.parametrize(
    "other",
    [
        {"evaluated_on": "validation"},
        {"train_samples": 10_000},
        {"suspicion": {}},
        {"labels_sha256": "of a table"},
    ],
)
def test_the_papers_results_are_not_shown_for_other_data(cifar10_runs, other):
    assert paper_table(grouped(cifar10_runs)) is not None
    others = [with_summary(run, **other) for run in cifar10_runs]
    assert paper_table(grouped(others)) is None
    assert paper_rows(grouped(others)[0]) == []


def test_the_recipe_and_command_of_a_report_repeat_its_comparison(tmp_path, undrawn):
    folder = make_compare(tmp_path / "c", arms=["full", "fewer-epochs"], seeds=[0])
    (folder / "recipe.toml").write_text(made_recipe().to_toml())
    text = undrawn(read_runs([folder]))
    assert "fineprune compare recipe.toml --seeds 1 --arms full,fewer-epochs" in text
    assert "policy = &#34;fine-pruning&#34;" in text


def repeats(text):
    """The commands of a page, each with the recipe below it."""
    parts = re.findall(r"To repeat .*?</code></pre>", text, re.DOTALL)
    return [
        (re.findall(r"<code>(fineprune .*?)</code>", part), part.partition("<pre>")[2])
        for part in parts
    ]


def test_the_command_of_a_report_repeats_a_curve(tmp_path, undrawn):
    folder = make_compare(tmp_path / "c", arms=["full", "fine-pruning"], seeds=[0, 1])
    (folder / "recipe.toml").write_text(made_recipe().to_toml())
    runs = read_runs([folder])
    curve = [with_summary(runs[0], arm=f"cooldown-{epochs}") for epochs in (10, 20)]
    (repeated,) = repeats(undrawn([*runs, *curve]))
    arms = "--arms full,fine-pruning --curve"
    assert repeated[0] == [f"fineprune compare recipe.toml --seeds 2 {arms}"]


def test_runs_without_a_comparison_are_repeated_one_by_one(compared, undrawn):
    folders = [compared / "full-0", compared / "full-1", compared / "fine-pruning-0"]
    runs = [read_run(folder) for folder in folders]
    full, pruned = repeats(undrawn(runs))
    train = "fineprune train recipe.toml --out runs/repeated/"
    second = runs[1].summary.seed
    assert full[0] == [f"{train}full-{seed} run.seed={seed}" for seed in (0, second)]
    assert "policy = &#34;full&#34;" in full[1]
    assert pruned[0] == [f"{train}fine-pruning-0 run.seed=0"]
    assert "policy = &#34;fine-pruning&#34;" in pruned[1]


def test_the_only_run_of_a_comparison_is_repeated_with_its_own_recipe(tmp_path, undrawn):
    folder = make_compare(tmp_path / "c", arms=["full"], seeds=[0])
    (folder / "recipe.toml").write_text(made_recipe().to_toml())
    ((commands, recipe),) = repeats(undrawn(read_runs([folder])))
    assert commands == ["fineprune train recipe.toml"]
    assert "policy = &#34;full&#34;" in recipe


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


def test_one_seed_in_common_is_told_as_such(runs):
    chosen = [
        run
        for run in runs
        if run.summary.arm == "full" or run.summary.seed == 0 or run.summary.arm == "fewer-epochs"
    ]
    assert "one seed in common allows no claim on accuracies" in headline_of(chosen)


def test_one_seed_of_several_controls_allows_no_claim(runs):
    chosen = [run for run in runs if run.summary.seed == 0 and run.summary.arm != "fine-pruning"]
    said = headline_of(chosen)
    assert re.fullmatch(
        r"Accuracy: full [\d.]+ %, .*; one seed allows no claim on accuracies.", said
    )
