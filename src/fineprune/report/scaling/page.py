"""The report on a scaling experiment: one self-contained HTML file."""

from collections.abc import Sequence
from pathlib import Path

from fineprune.experiments.scale_table import ScaleRow, Scaling
from fineprune.report.facts import distinct, machine, unsteady, what_was_run
from fineprune.report.page import Line, Sentences, write_page
from fineprune.report.scaling.figures import (
    draw_loss,
    draw_speedup,
    draw_staleness,
    draw_throughput,
)
from fineprune.report.scaling.tables import scale_tables
from fineprune.runs.files import RECIPE


def write_scale_report(scaling: Scaling, rows: Sequence[ScaleRow], path: Path) -> None:
    """Write a report on a scaling experiment as one self-contained HTML file."""
    runs = [scaled.run for scaled in scaling.runs]
    lead = "Strategies of distributed training, with the results of Campos et al. (ICCS 2017)."
    write_page(
        path,
        f"{scaling.title}: workers and servers",
        [
            Line("lead", lead),
            *scale_tables(rows, paper=True),
            draw_throughput(rows),
            draw_speedup(rows),
            draw_loss(scaling.runs, rows[0].target_loss),
            draw_staleness(rows),
            Sentences(scale_caveats(scaling), "What to keep in mind"),
            *what_was_run([runs], [runs[0].path / RECIPE]),
        ],
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
    machines = distinct(machine(run.summary) for run in runs)
    policies = distinct(policy for run in runs if (policy := run.summary.policy) != "full")
    caveats = []
    if len(machines) > 1:
        caveats.append(
            f"The configurations used different hardware or threads ({'; '.join(machines)}), so "
            f"speedups are not those of the configurations alone."
        )
    if policies:
        caveats.append(
            f"The runs skip samples ({', '.join(policies)}), which those of the paper do not: set "
            f"pruning.policy=full to compare with it."
        )
    if hardware.gpu is None and busy > hardware.cores:
        caveats.append(
            f"If all processes ran on one machine, up to {busy} threads of workers, servers and "
            f"the driver shared {hardware.cores} cores. Speedups are then lower than on separate "
            f"machines."
        )
    return [
        *caveats,
        f"Accuracies are measured on the {runs[0].summary.evaluated_on} set after the last epoch. "
        f"With one seed, differences below one percentage point may be due to chance.",
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
