"""The experiments of the two papers: their recipes, their pages, and the command."""

import dataclasses
from pathlib import Path

import pytest
from made_runs import made_recipe, made_scaled, make_compare, with_summary
from test_report import parse_strictly

from fineprune.errors import InputError
from fineprune.experiments.arm_table import grouped
from fineprune.experiments.configurations import configuration
from fineprune.experiments.papers import FULL_TWO, NETWORKS, paper_one, recipe_one, recipe_two
from fineprune.experiments.scale_table import Scaling, scale_rows
from fineprune.report.paper_one import RESULTS, claims_one, formulas_table, write_paper_one
from fineprune.report.paper_two import claims_two, forecast_table, forecasts, write_paper_two
from fineprune.runs.run import read_runs


@pytest.fixture
def no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("no_data")
def test_without_cifar_10_the_digits_are_trained_with_the_papers_schedule():
    recipe = recipe_one("lenet", [], full=False)
    assert (recipe.data.name, recipe.training.epochs) == ("digits", 200)
    assert recipe.training.milestones == (60, 120, 160)
    schedule = recipe.schedule()
    assert schedule is not None
    assert (schedule.window, schedule.start, schedule.pruned_epochs()) == (60, 30, 97)
    short = recipe_one("resnet18", ["training.epochs=20", "data.train_size=512"], full=False)
    assert (short.training.milestones, short.data.train_size) == ((6, 12, 16), 512)
    assert (short.schedule().window, short.schedule().start) == (6, 3)
    own = recipe_one("lenet", ["pruning.start=0", "pruning.window=20"], full=False).schedule()
    assert (own.window, own.start) == (20, 0)
    for change in ("pruning.policy=adaptive", "network.name=resnet9"):
        with pytest.raises(InputError, match="one of the paper's networks with fine-pruning"):
            recipe_one("lenet", [change], full=False)


def test_cifar_10_is_trained_if_it_is_there(no_data):
    (no_data / "there/cifar-10-batches-bin").mkdir(parents=True)
    for recipe in (
        recipe_one("lenet", ["data.dir=there"], full=False),
        recipe_two(["data.dir=there"], full=False),
    ):
        assert (recipe.data.name, recipe.data.dir) == ("cifar10", "there")
        assert recipe.data.train_size == 10_000


def test_the_full_experiments_are_the_papers():
    assert set(NETWORKS) == set(RESULTS)
    for network in NETWORKS:
        recipe = recipe_one(network, [], full=True)
        assert (recipe.data.name, recipe.data.train_size) == ("cifar10", None)
        assert (recipe.network.name, recipe.training.epochs) == (network, 200)
    nodes = {text: configuration(text).nodes for text in FULL_TWO}
    assert nodes["all-reduce 4"] == 1
    assert nodes["mixed 8+1 group=4"] == 2
    assert nodes["mixed 16+3 dedicated group=4"] == 7
    assert nodes["mixed 32+7 group=4"] == 8
    with pytest.raises(InputError, match=r"the training images in mvso/train.csv, found none"):
        recipe_two([], full=True)


@pytest.mark.usefixtures("no_data")
def test_the_second_paper_prunes_nothing_and_has_its_optimizer():
    recipe = recipe_two([], full=False)
    assert (recipe.pruning.policy, recipe.training.optimizer) == ("full", "rmsprop-tf")
    assert (recipe.training.momentum, recipe.training.epsilon) == (0, 1)


@pytest.fixture(scope="module")
def runs_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper-1")
    arms = ("full", "fine-pruning", "matched", "shorter")
    for network, seeds in (("lenet", (0, 1, 2)), ("resnet18", (0,))):
        recipe = made_recipe(network, train_size=1024)
        make_compare(folder / network, recipe=recipe, arms=arms, seeds=seeds, title=network)
    return read_runs([folder / "lenet", folder / "resnet18"])


def test_the_first_page_has_every_table_and_figure(runs_one, tmp_path):
    write_paper_one(runs_one, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    parse_strictly(page)
    for part in ("Table 1", "Table 2", "Figure 1", "Figure 2", "Figure 3", "Formulas 2 to 7"):
        assert part in page, part
    assert "(the paper&#39;s Figure 1), resnet18 on digits" in page
    assert "(the paper&#39;s Figure 2), lenet on digits" in page
    for paper in RESULTS.values():
        assert f">{paper.name}</th>" in page
        assert f"{100 * paper.accuracy_regular:.2f}" in page


def test_formulas_are_predicted_and_measured(runs_one):
    (lenet, resnet) = grouped(runs_one)
    lines = formulas_table([lenet, resnet]).lines
    found = {name: cell for name, cell, _ in lines if name != "measured"}
    pairs = [
        (pruned.summary, full)
        for pruned in lenet.of("fine-pruning")
        for full in lenet.of("full")
        if full.summary.seed == pruned.summary.seed
    ]
    regular = 0.0
    for _, full in pairs:
        middle = sorted(line["seconds"] / line["steps"] for line in full.metrics)[9:11]
        regular += sum(middle) / 2 * full.summary.steps / 3
    assert found["t_regular (2), s: predicted"] == f"{regular:,.1f}"
    assert found["n_prune, Algorithm 2"] == str(pairs[0][0].pruned_epochs)
    assert found["b_prune, steps per epoch (5)"] == f"{pairs[0][0].steps / 20:.1f}"


def test_claims_say_what_the_seeds_decide(runs_one):
    lines = {line[0]: line[1:] for line in claims_one(runs_one).lines}
    paper, ours, agrees = lines["lenet: fine-pruning saves time, %"]
    assert (paper, agrees) == ("11.80", "yes")
    assert ours.startswith("+")
    assert lines["resnet18: fine-pruning saves time, %"][2] == "open"  # one seed
    assert lines["lenet: the overhead is below 1 % of the time"][2] == "yes"
    slow = [
        with_summary(run, seconds_train=100.0 + 100 * (run.summary.arm == "fine-pruning"))
        for run in runs_one
    ]
    lines = {line[0]: line[1:] for line in claims_one(slow).lines}
    assert lines["lenet: fine-pruning saves time, %"][2] == "no"


@pytest.fixture
def scaling(tmp_path):
    stale = {"staleness": [0, 20], "seconds": {"compute": 4.0, "apply": 0.2}}
    fresh = {**stale, "staleness": [20]}
    made = [
        ("one", 2.0, [2, 1, 0.5], 0.9, None),
        ("all-reduce 2", 1.1, [2, 1.2, 0.6], 0.9, None),
        ("async 1+1", 2.4, [2, 1, 0.5], 0.9, fresh),
        ("async 2+1", 1.25, [2, 1.4, 0.8], 0.88, stale),
        ("mixed 4+1 group=2", 0.8, [2, 1.5, 0.9], 0.87, stale),
        ("mixed 4+2 group=2", 0.7, [2, 1.5, 0.9], 0.87, stale),
    ]
    runs = []
    for text, seconds, losses, last, report in made:
        folder = tmp_path / text
        folder.mkdir()
        (folder / "recipe.toml").write_text("# made\n")
        sizes = {"samples": 640, "batch_size": 32, "folder": folder, "accuracy_last": last}
        runs.append(made_scaled(text, [seconds] * 3, losses, distributed=report, **sizes))
    return Scaling("paper 2", False, runs)


def test_the_forecast_meets_what_it_was_calibrated_on(scaling):
    made = {one.row.configuration: one for one in forecasts(scaling, scale_rows(scaling.runs))}
    assert made["one"].error == pytest.approx(0)
    assert made["async 1+1"].error == pytest.approx(0)
    # On two cores, no more than two workers compute at a time.
    assert made["mixed 4+2 group=2"].predicted <= 2 * made["one"].row.throughput + 1e-9
    assert len(forecast_table(list(made.values())).lines) == 6


def test_the_second_page_has_every_table_and_figure(scaling, tmp_path):
    rows = scale_rows(scaling.runs)
    write_paper_two(scaling, rows, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    parse_strictly(page)
    for part in ("Tables 1 and 2", "Table 3", "Figure 1", "Figure 2", "Figure 3", "forecast"):
        assert part in page, part
    for theirs in ("809.1", "106.43 h", "6.52", "20.2"):
        assert theirs in page


def test_claims_of_the_second_paper_are_computed(scaling):
    rows = scale_rows(scaling.runs)
    lines = {line[0]: line[1:] for line in claims_two(rows, forecasts(scaling, rows)).lines}
    two = lines["Speedup of mixed 4+1 group=2 on 2 nodes (Figure 2b)"]
    assert two == ("1.58", f"{1.1 / 0.8:.2f}", "yes")  # relative to two workers on one node
    assert lines["2 servers instead of 1: throughput, % (Figure 1)"][1:] == ("+14.3", "yes")
    assert lines["Mean staleness of async 2+1, N = 2, within a tenth"][1:] == ("1.00", "yes")
    # Of async 2+1 against one process, and of the mixed ones against two replicas on a node.
    stale = "Stale gradients: accuracy minus that of one node, points (Table 3)"
    assert lines[stale] == ("-1.6", f"{-(2 + 3 + 3) / 3:+.2f}", "open")  # one seed
    for one, agrees in (((0.9, 0.89, 0.91), "yes"), ((0.9, 0.86, 0.91), "open")):
        seeds = {row.configuration: (row.accuracy_last, *one[1:]) for row in rows[:2]}
        several = [
            dataclasses.replace(
                row,
                accuracies=dict(enumerate(seeds.get(row.configuration, (row.accuracy_last,) * 3))),
            )
            for row in rows
        ]
        assert {line[0]: line[3] for line in claims_two(several, []).lines}[stale] == agrees


@pytest.mark.long
@pytest.mark.usefixtures("fast_spawn", "no_data")
def test_the_first_paper_trains_and_goes_on_where_it_stopped():
    changes = ["training.epochs=4", "data.train_size=512", "training.evaluate_every=4"]
    lines: list[str] = []

    def noted(line, done, total):
        lines.append(line)

    (folder,) = next(paper_one(Path("paper"), changes, on_progress=noted))
    runs = read_runs([folder])
    assert len(runs) == 14
    assert sum("finished" in line for line in lines) == 14
    again: list[str] = []
    next(paper_one(Path("paper"), changes, on_progress=lambda line, *_: again.append(line)))
    assert not any(again)
