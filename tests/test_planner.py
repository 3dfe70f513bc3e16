"""Predictions for a cluster: the formula, the plan, its file, and the command."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from commands import printed
from made_runs import made_scaled

from fineprune.errors import InputError
from fineprune.experiments.configurations import configuration
from fineprune.experiments.planner import (
    Cluster,
    Costs,
    costs_of_runs,
    measured_costs,
    plan_cluster,
    predicted_speed,
    sample_steps,
)
from fineprune.training.recipe import make_recipe

FREE = Cluster(gigabits=0, latency=0)


def throughput(text, costs, cluster=FREE):
    return predicted_speed(costs, cluster, configuration(text))[0]


# Images per second of [D] Tables 1 and 2, and the error of the prediction in percent. A worker is a
# node of 4 GPUs.
CALIBRATION = {"one": 124.18, "async 2+1": 195.60, "async 4+1": 292.22}
PAPER = [
    ("one", CALIBRATION["one"], 0.0),
    ("async 2+1", CALIBRATION["async 2+1"], -5.30),
    ("async 4+1", CALIBRATION["async 4+1"], 0.0),
    ("async 4+3", 374.73, 2.05),
    ("async 4+3", 383.09, -0.17),
    ("async 4+3 dedicated", 396.62, -3.58),
    ("async 8+7", 809.10, -4.34),
]


def test_the_papers_table_is_predicted_with_the_errors_on_the_page():
    """From three of its rows: what an exchange adds to a step, and how long a gradient keeps a
    server busy. The steps are taken to be equally long, since the paper gives no spread."""
    step = 128 / CALIBRATION["one"]
    two = (
        2 * 128 / CALIBRATION["async 2+1"]
    )  # Of each of two workers, whose server is idle at times.
    busy = 128 / CALIBRATION["async 4+1"]  # With four workers, it never is.
    assert 2 * busy < two < 4 * busy
    costs = Costs(step, 128, 0.0, exchange=two - step, update=busy, overlaps=True)
    page = (Path(__file__).parents[1] / "docs/planner.md").read_text()
    for text, measured, error in PAPER:
        predicted = throughput(text, costs)
        assert 100 * (predicted / measured - 1) == pytest.approx(error, abs=0.01)
        assert f"| {measured:.2f} | {predicted:.2f} | {error:+.2f} |".replace("+0.00", "0") in page


def test_the_measured_links_are_predicted_with_the_errors_on_the_page():
    """Steps of 80 ms with a spread of a fifth, updates of 20 ms, and 4 MB; see the page."""
    root = Path(__file__).parents[1]
    page = (root / "docs/planner.md").read_text()
    for gigabits, rows in json.loads((root / "docs/results/planner.json").read_text()).items():
        exchange = 1 / rows.pop("async 1+1") - 0.08 - 0.02
        costs = Costs(0.08, 1, 4.0, exchange=exchange, update=0.02, spread=0.2)
        for text, measured in rows.items():
            cluster = Cluster(accelerators=2 if "mixed" in text else 1, gigabits=float(gigabits))
            predicted = throughput(text, costs, cluster)
            error = 100 * (predicted / measured - 1)
            assert f"{measured:.2f} | {predicted:.2f} | {error:+.1f} |" in page, text


LINK = Cluster(latency=0)  # 125 MB take 0.1 s.
SLOW_LINK = Cluster(gigabits=1, latency=0)
SLOW_SERVER = Costs(0.5, 10, 100.0, gradient=0.2, update=0.05)


@pytest.mark.parametrize(
    ("text", "costs", "cluster", "expected", "limit"),
    [
        ("sync 1+1", Costs(0.5, 10, 100.0), FREE, 20, None),
        ("sync 32+1", Costs(0.5, 10, 100.0), FREE, 640, None),
        ("async 1+1", Costs(0.5, 10, 100.0), FREE, 20, "compute"),
        ("async 32+1", Costs(0.5, 10, 100.0), FREE, 640, "compute"),
        ("async 16+1", SLOW_SERVER, FREE, 10 / 0.25, "server"),
        ("async 16+2", SLOW_SERVER, FREE, 20 / 0.25, "server"),
        # The single server's link receives one gradient at a time.
        ("async 16+1 dedicated", Costs(0.5, 10, 125.0), LINK, 100, "link"),
        # An update takes the server once for all synchronous gradients.
        ("sync 4+1", Costs(0.5, 10, 0.0, update=0.25), FREE, 40 / 0.75, None),
        # A gradient takes 0.1 s. Two workers are not on the server's node: they receive the
        # parameters after 0.15 and 0.2 s, and push the gradients from 0.25 and 0.3 s.
        ("sync 3+1", Costs(0.1, 1, 12.5), SLOW_LINK, 3 / 0.45, None),
        # DDP hides nothing of one part, but of more parts up to two thirds of a step.
        ("all-reduce 2", Costs(1.0, 10, 25.0), LINK, 20 / (1 + 0.02), None),
        ("all-reduce 2", Costs(1.0, 10, 250.0), LINK, 20 / (1 + 0.02), None),
        ("all-reduce 2", Costs(1.0, 10, 2500.0), LINK, 20 / (1 + 2 - 2 / 3), None),
        # The largest of four normal values is 1.03 standard deviations above the mean.
        ("sync 4+1", Costs(0.1, 1, 0.0, spread=0.3), FREE, 4 / (0.1 * (1 + 0.3 * 1.03)), None),
    ],
)
def test_the_throughput_is_that_computed_by_hand(text, costs, cluster, expected, limit):
    found, staleness, limited = predicted_speed(costs, cluster, configuration(text))
    assert found == pytest.approx(expected, rel=0.02)
    if limit is not None:
        assert limited == limit
    if limit == "compute":
        assert staleness == configuration(text).workers - 1


def test_a_backup_worker_uses_the_link_though_its_gradient_is_discarded():
    costs, link = Costs(0.1, 10, 12.5), Cluster(gigabits=1, latency=0)
    assert throughput("sync 4+1 backup=1", costs, link) < throughput("sync 3+1", costs, link)
    assert throughput("sync 4+1 backup=1", costs) == pytest.approx(throughput("sync 3+1", costs))


def test_a_shared_server_has_less_traffic_than_a_dedicated_one():
    costs, link = Costs(0.2, 10, 125.0), Cluster(latency=0)
    for text in ("async 4+4", "async 2+1"):  # A part of the traffic stays on the node...
        assert throughput(text, costs, link) > throughput(f"{text} dedicated", costs, link)


def test_synchronous_workers_wait_for_the_slowest_unless_it_is_a_backup():
    costs = Costs(0.1, 1, 0.0, spread=0.3)
    plain, backup = throughput("sync 4+1", costs), throughput("sync 4+1 backup=1", costs)
    assert 0.1 < 3 / backup < 4 / plain
    # The workers of one node are slow together, so they wait for each other less often.
    assert throughput("sync 4+1", costs, Cluster(accelerators=4, gigabits=0)) > plain
    assert throughput("all-reduce 4", costs) == pytest.approx(plain)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("async 2+1 bound=1", "without bound="),
        ("mixed 4+1 group=2", "on one node, which has 1, .*: give cluster.accelerators=2"),
        ("sync 1020+5 dedicated", "most 1024 nodes, .* which takes 1025: give cluster.nodes=1025"),
    ],
)
def test_what_is_not_predicted_is_refused(text, message):
    costs = Costs(1.0, 1, 1.0)
    with pytest.raises(InputError, match=message):
        plan_cluster(costs, FREE, samples=1, configurations=[configuration(text)])


COSTS = Costs(0.11, 32, 100.0, exchange=0.002, gradient=0.02, update=0.02, spread=0.07)


def test_a_plan_stops_where_more_nodes_do_not_pay():
    plan = plan_cluster(COSTS, Cluster(nodes=32), samples=1e6, saved=0.25)
    assert {row.kind for row in plan.stops} == {"all-reduce", "sync", "async"}
    one = plan.rows[0]
    assert (one.configuration, one.speedup, one.efficiency) == ("one", 1, 1)
    assert one.hours == pytest.approx(1e6 / (32 / COSTS.step) / 3600)
    for row in plan.rows:
        assert row.nodes <= 32
        assert row.efficiency == pytest.approx(row.speedup / row.nodes)
        assert row.hours_pruned is not None
        assert row.hours_pruned == pytest.approx(0.75 * row.hours)
    assert plan.recommended in plan.stops


@pytest.mark.parametrize(("gigabits", "accelerators"), [(0.05, 1), (1, 4), (10, 1)])
def test_nothing_slower_than_one_node_is_recommended(gigabits, accelerators):
    costs = dataclasses.replace(COSTS, step=0.1, megabytes=500.0)
    cluster = Cluster(nodes=64, accelerators=accelerators, gigabits=gigabits)
    plan = plan_cluster(costs, cluster, samples=1e6)
    one = plan.rows[0]
    assert all(row.hours < one.hours for row in plan.stops)
    assert plan.recommended.hours <= one.hours
    if not plan.stops:
        assert plan.recommended is one


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("async 1+1", "one"), "one"),
        (("async 4+1", "sync 4+1", "all-reduce 4"), "all-reduce 4"),
        ((), "all-reduce 4 group=1"),
    ],
)
def test_the_simplest_of_equally_good_configurations_is_recommended(given, expected):
    costs = Costs(0.1, 100, 10.0)
    cluster = Cluster(nodes=4, gigabits=0, latency=0)
    chosen = [configuration(text) for text in given]
    plan = plan_cluster(costs, cluster, samples=1e5, configurations=chosen)
    assert plan.recommended.configuration == expected


def test_nodes_with_several_accelerators_are_compared_with_one_such_node():
    plan = plan_cluster(COSTS, Cluster(nodes=8, accelerators=4), samples=1e6)
    assert plan.rows[0].configuration == "all-reduce 4"
    assert (plan.rows[0].nodes, plan.rows[0].speedup) == (1, 1)
    mixed = [row for row in plan.rows if row.kind == "mixed"]
    assert [(row.workers, row.nodes) for row in mixed] == [(8, 2), (16, 4), (32, 8)]
    assert all("group=4" in row.configuration for row in mixed)
    given = [configuration(text) for text in ("async 8+2", "async 8+2 dedicated")]
    cluster = Cluster(accelerators=4)
    rows = plan_cluster(COSTS, cluster, samples=1e6, configurations=given).rows
    assert [row.nodes for row in rows] == [2, 4]


def test_what_pruning_saves_is_that_of_the_recipe():
    recipe = make_recipe({"data": {"name": "digits"}, "training": {"epochs": 4}})
    full = recipe.replaced("pruning", policy="full")
    assert sample_steps(full, 1000) == (4000, None)
    window = {"policy": "fine-pruning", "window": 4, "start": 0, "block": 1, "count": 1}
    pruned = recipe.replaced("pruning", **window, prune=0.5)
    _, saved = sample_steps(pruned, 1280)
    assert saved is not None
    assert 0 < saved <= 0.5


GIVEN = (
    *("cluster.nodes=8", "cluster.gigabits=25", "costs.step=0.2", "costs.samples=32"),
    *("costs.megabytes=0.25", "costs.exchange=0.003", "costs.update=0.002"),
)


def test_the_command_predicts_from_given_costs(tmp_path):
    recipe, out = tmp_path / "small.toml", tmp_path / "out"
    recipe.write_text('[data]\nname = "digits"\ntrain_size = 256\n')
    command = ["scale", recipe, "--predict", *GIVEN, "--out", out]
    told = json.loads(printed(*command, "training.epochs=3", "--json"))
    assert told["cluster"] == {"nodes": 8, "accelerators": 1, "gigabits": 25, "latency": 5e-5}
    assert told["costs"]["step"] == 0.2
    assert max(row["nodes"] for row in told["rows"]) == 8
    assert json.loads((out / "predicted.json").read_text())["rows"] == told["rows"]
    said = " ".join(printed(*command, "one", "async 2+1").split())
    assert "Predicted configurations" in said
    assert "recommended: async 2+1" in said


def test_costs_come_from_runs_of_one_process_and_of_one_worker_with_a_server():
    sizes: dict[str, Any] = {"samples": 64, "batch_size": 32, "parameters": 1_000_000}
    one = made_scaled("one", [1.0] * 3, [1.0] * 3, **sizes)
    assert costs_of_runs([one]) == Costs(0.5, 32, 4.0)
    report = {"seconds": {"apply": 0.3}, "staleness": [2]}
    served = made_scaled("async 1+1", [1.4] * 3, [1.0] * 3, distributed=report, **sizes)
    costs = costs_of_runs([served, one])
    assert (costs.exchange, costs.update) == pytest.approx((0.05, 0.15))
    assert dataclasses.replace(costs, exchange=0.0, update=0.0) == Costs(0.5, 32, 4.0)
    with pytest.raises(InputError, match="a run of 'one' to measure a step, got async 1"):
        costs_of_runs([served])


@pytest.mark.usefixtures("fast_runs")
def test_a_step_is_measured_by_training(tmp_path):
    recipe = make_recipe(
        {
            "data": {"name": "digits", "train_size": 128},
            "training": {"batch_size": 32, "epochs": 40, "milestones": [20]},
            "run": {"device": "cpu", "threads": 1},
        }
    )
    costs = measured_costs(recipe, tmp_path / "measured", {"exchange": 0.25})
    assert (costs.samples, costs.exchange, costs.update) == (32, 0.25, 0)
    assert costs.megabytes == pytest.approx(0.248, rel=0.01)  # LeNet has 62,006 parameters.
    assert 0 < costs.step < 10
