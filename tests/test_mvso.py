"""The recipe of the distributed training on MVSO: the paper's settings and nodes."""

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.networks.registry import build_network
from fineprune.report.scaling.tables import PAPER_LEARNING
from fineprune.training.optimizer import build_optimizer
from fineprune.training.recipe import Recipe, make_recipe, read_recipe
from fineprune.training.rmsprop_tf import RMSPropTF

ROOT = Path(__file__).parent.parent
PATH = ROOT / "recipes/paper/mvso-resnet50.toml"
# The paper's nodes, with the workers and the servers of the recipe.
NODES = [(1, 4, 1), (2, 8, 1), (4, 16, 3), (8, 32, 7)]
# A row of the table of costs: nodes, images/s, hours, node-hours, and millions of images trained.
COSTS = re.compile(r"^\| (\d) (?:\| [\d.]+ ){3}\| ([\d.]+) \|", re.MULTILINE)


@pytest.fixture
def recipe():
    return read_recipe(PATH)


def test_the_settings_are_those_of_the_paper(recipe: Recipe):
    training, distributed = recipe.training, recipe.distributed
    assert (distributed.strategy, distributed.groups, distributed.servers) == ("mixed", 8, 7)
    assert distributed.placement == "shared"
    assert training.batch_size == 32
    assert training.batch_size * distributed.batches_per_update == 128
    optimizer = build_optimizer([torch.zeros(1)], training)
    assert isinstance(optimizer, RMSPropTF)
    (group,) = optimizer.param_groups
    values = {"lr": 0.1, "decay": 0.9, "epsilon": 1.0, "momentum": 0.0, "weight_decay": 1e-4}
    assert {name: group[name] for name in values} == values
    with torch.device("meta"):
        network = build_network(recipe.network.name, recipe.network.classes or 0, 3)
        assert network(torch.zeros(1, 3, 224, 224)).shape == (1, 1200)
    assert recipe.data.image_size == 224


def test_the_page_has_the_settings_of_each_configuration(recipe: Recipe):
    """The epochs of a row are those of its images trained, with 1.2 million images."""
    page = (ROOT / "docs/mvso.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| `(training.*)` \|$", page, re.MULTILINE)
    changed = {int(nodes): make_recipe(recipe.as_dict(), more.split()) for nodes, more in rows}
    shapes = {
        nodes: (made.distributed.workers, made.distributed.servers)
        for nodes, made in (changed | {8: recipe}).items()
    }
    assert shapes == {nodes: (workers, servers) for nodes, workers, servers in NODES}
    costs = COSTS.findall(page)
    assert len(costs) == 4
    for nodes, millions in costs:
        made = changed.get(int(nodes), recipe)
        assert made.training.epochs == round(float(millions) / 1.2)


@pytest.mark.parametrize(("nodes", "workers", "servers"), NODES)
def test_the_configurations_fit_the_papers_nodes(nodes, workers, servers, recipe, tmp_path):
    (tmp_path / "mvso.toml").write_text(recipe.to_toml())
    changes = [f"distributed.workers={workers}", f"distributed.servers={servers}"]
    arguments = ["slurm", "--nodes", nodes, "--gpus", 4, "--cpus", 16, "--", "train"]
    command = [*map(str, arguments), str(tmp_path / "mvso.toml"), *changes]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert f"--min-nodes {nodes} " in result.output
    assert "--num-cpus=16 --num-gpus=4" in result.output


def test_the_page_has_the_hours_of_the_paper():
    page = (ROOT / "docs/mvso.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.count(" | ") == 5]
    costs = [list(map(float, row)) for row in rows if row[0].isdigit()]
    assert [(row[5], row[2]) for row in costs] == [tuple(line[1:3]) for line in PAPER_LEARNING]
    for nodes, speed, hours, node_hours, millions, _ in costs:
        assert node_hours == pytest.approx(nodes * hours)
        assert millions == pytest.approx(speed * hours * 3600 / 1e6, abs=0.05)
