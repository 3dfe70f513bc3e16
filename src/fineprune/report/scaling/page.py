"""The page of ``fineprune scale``: one HTML file that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path

from fineprune.experiments.scale_table import ScaleRow, Scaling
from fineprune.report.facts import facts
from fineprune.report.html import template
from fineprune.report.scaling.loss_figure import draw_loss
from fineprune.report.scaling.phases_figure import draw_phases
from fineprune.report.scaling.speedup_figure import draw_speedup
from fineprune.report.scaling.staleness_figure import draw_staleness
from fineprune.report.scaling.tables import scale_tables
from fineprune.report.scaling.throughput_figure import draw_throughput
from fineprune.runs.files import write_atomically


def write_scale_report(scaling: Scaling, rows: Sequence[ScaleRow], path: Path) -> None:
    """Write finished configurations up as one self-contained HTML file.

    Args:
        scaling: from ``read_scaling``.
        rows: of its runs, from ``scale_rows``.
        path: the file; its folder is made, and a file there is replaced in one step.
    """
    runs = [one.run for one in scaling.runs]
    drawings = (
        draw_throughput(rows),
        draw_speedup(rows),
        draw_loss(scaling.runs, rows[0].target_loss),
        draw_staleness(rows),
        draw_phases(rows),
    )
    page = template("scale.html.j2").render(
        title=f"{scaling.title}: workers and servers",
        facts=facts(runs),
        tables=scale_tables(rows),
        drawings=[drawing for drawing in drawings if drawing is not None],
        caveats=scale_caveats(scaling),
        recipe=(runs[0].path / "recipe.toml").read_text(encoding="utf-8").strip(),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)


def scale_caveats(scaling: Scaling) -> list[str]:
    """Return sentences on what the numbers do not say."""
    runs = [one.run for one in scaling.runs]
    hardware = runs[0].summary["hardware"]
    threads = max(run.summary["hardware"]["threads"] for run in runs)
    # Servers and the driver work too, wherever they are put.
    busy = max(
        one.configuration.workers * threads
        + (one.configuration.servers + 1 if one.configuration.servers else 0)
        for one in scaling.runs
    )
    kind = runs[0].summary["evaluated_on"]
    caveats = [
        f"Accuracies are of the {kind} set after the last epoch, one seed each: differences under "
        f"a point may be chance.",
        "An update is of as many samples in all configurations: workers whose gradients are "
        "averaged have smaller batches."
        if scaling.same_update
        else "Every worker's batch is the recipe's, so where gradients are averaged an update is "
        "of more samples, and there are fewer updates an epoch, at the same rate.",
        "The runs were made one after another: where the machine's speed varies, so do the ratios.",
        "The paper's lines are of ResNet-50 on nodes of four K80 GPUs, joined by InfiniBand of "
        "56 Gbit/s: they show what was measured there, and do not compare with ours.",
    ]
    if hardware["gpu"] is None and busy > hardware["cores"]:
        caveats.insert(
            0,
            f"Up to {busy} threads of workers, servers and driver shared {hardware['cores']} cores "
            f"(if all were one machine): speedups are lower than on machines of their own.",
        )
    return caveats
