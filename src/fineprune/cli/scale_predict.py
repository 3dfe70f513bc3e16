"""``fineprune scale --predict``: predicts a cluster instead of training on one."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from fineprune.experiments.calibration import calibrated
from fineprune.experiments.cluster_costs import ClusterFile, ClusterShape, Target, read_cluster
from fineprune.experiments.configurations import Configuration
from fineprune.experiments.planner import plan_cluster, plan_dict, sample_steps
from fineprune.runs.files import write_json
from fineprune.training.hardware import resolved
from fineprune.training.recipe import Recipe
from fineprune.writing import make_folder


def cluster_of(file: Path | None, flags: dict[str, Any]) -> ClusterFile:
    """Return the cluster that a file describes, or the default one, with what flags change."""
    described = ClusterFile(ClusterShape(), Target(), {}) if file is None else read_cluster(file)
    given = {name: value for name, value in flags.items() if value is not None}
    changed = dataclasses.replace(described.cluster, **given)
    return dataclasses.replace(described, cluster=changed)


def predict(
    recipe: Recipe,
    described: ClusterFile,
    configurations: Sequence[Configuration],
    folder: Path,
    *,
    title: str,
    as_json: bool,
) -> None:
    """Predict configurations, print them, and write ``predicted.html`` and ``predicted.json``."""
    # Imported here, because matplotlib would delay the start of every command.
    from fineprune.report.scaling.planned import planned_facts, planned_tables, write_plan_page
    from fineprune.report.table import print_tables

    single = resolved(recipe)
    costs, num_samples = calibrated(
        single, described.costs, lambda line: typer.echo(line, err=True)
    )
    samples, saved = sample_steps(single, num_samples, described.target)
    plan = plan_cluster(
        costs,
        described.cluster,
        samples=samples,
        target=described.target,
        saved=saved,
        configurations=configurations,
    )
    make_folder(folder)
    page = folder / "predicted.html"
    write_plan_page(plan, costs, described.cluster, title, single.to_toml(), page)
    found = {
        "cluster": dataclasses.asdict(described.cluster),
        "costs": dataclasses.asdict(costs),
        "target": dataclasses.asdict(described.target),
        **plan_dict(plan),
    }
    write_json(folder / "predicted.json", found)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), **found}))
        return
    console = print_tables(planned_tables(plan))
    for term, fact in planned_facts(plan, costs, described.cluster):
        console.print(f"{term}: {fact}", highlight=False)
    typer.echo(f"report: {page}")
