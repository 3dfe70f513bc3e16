"""The report on a scaling experiment: one self-contained HTML file."""

from collections.abc import Sequence
from pathlib import Path

from fineprune.experiments.scale_table import ScaleRow, Scaling
from fineprune.report.facts import distinct, facts, machine, unsteady
from fineprune.report.figures.drawing import drawn
from fineprune.report.page_template import write_page
from fineprune.report.scaling.figures import (
    draw_loss,
    draw_phases,
    draw_speedup,
    draw_staleness,
    draw_throughput,
)
from fineprune.report.scaling.tables import scale_tables
from fineprune.runs.files import RECIPE


def write_scale_report(scaling: Scaling, rows: Sequence[ScaleRow], path: Path) -> None:
    """Write a report on a scaling experiment as one self-contained HTML file."""
    runs = [scaled.run for scaled in scaling.runs]
    drawings = drawn(
        draw_throughput(rows),
        draw_speedup(rows),
        draw_loss(scaling.runs, rows[0].target_loss),
        draw_staleness(rows),
        draw_phases(rows),
    )
    write_page(
        path,
        "results.html.j2",
        title=f"{scaling.title}: workers and servers",
        lead="Strategies of distributed training, with the results of Campos et al. (ICCS 2017).",
        parts=[*scale_tables(rows, paper=True), *drawings],
        notes=scale_caveats(scaling),
        facts=facts(runs),
        recipes=[(runs[0].path / RECIPE).read_text(encoding="utf-8").strip()],
    )


def scale_caveats(scaling: Scaling) -> list[str]:
    """Return sentences on the limits of the results."""
    runs = [scaled.run for scaled in scaling.runs]
    hardware = runs[0].summary.hardware
    # Servers and the driver also need a core each, on whichever node they are.
    busy = max(
        scaled.configuration.workers * scaled.run.summary.hardware.threads
        + (scaled.configuration.servers + 1 if scaled.configuration.servers else 0)
        for scaled in scaling.runs
    )
    kind = runs[0].summary.evaluated_on
    caveats = [
        f"Accuracies are measured on the {kind} set after the last epoch. With one seed, "
        f"differences below one percentage point may be due to chance.",
        "An update uses the same number of samples in every configuration. Workers whose gradients "
        "are averaged therefore have smaller batches."
        if scaling.same_update
        else "Every worker has the batch size of the recipe. If the gradients of several workers "
        "are averaged, an update therefore uses more samples, and there are fewer updates per "
        "epoch, with the same learning rate.",
        "The configurations were trained one after another. If the speed of the machine varied, "
        "the ratios vary as well.",
        *unsteady(runs),
        "The paper's results are for ResNet-50 on nodes with four K80 GPUs, connected by "
        "InfiniBand with 56 Gbit/s. They cannot be compared directly with ours.",
    ]
    if hardware.gpu is None and busy > hardware.cores:
        caveats.insert(
            0,
            f"If all processes ran on one machine, up to {busy} threads of workers, servers and "
            f"the driver shared {hardware.cores} cores. Speedups are then lower than on "
            f"separate machines.",
        )
    if policies := distinct(policy for run in runs if (policy := run.summary.policy) != "full"):
        caveats.insert(
            0,
            f"The runs skip samples ({', '.join(policies)}), which those of the paper do not: set "
            f"pruning.policy=full to compare with it.",
        )
    machines = distinct(machine(run.summary) for run in runs)
    if len(machines) > 1:
        caveats.insert(
            0,
            f"The configurations used different hardware or threads ({'; '.join(machines)}), so "
            f"speedups are not those of the configurations alone.",
        )
    return caveats
