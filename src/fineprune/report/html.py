"""The report on comparisons: one self-contained HTML file, for screens and for printing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fineprune.errors import InputError
from fineprune.experiments.arm_table import BASELINE, MARGIN, Group, Row, group_rows, grouped
from fineprune.experiments.controls import COOLDOWN
from fineprune.report.comparison_table import COLUMNS, columns_for, comparison_table
from fineprune.report.facts import comparison_of, distinct, facts, missing, unequal
from fineprune.report.figures.accuracy_over_time import draw_time
from fineprune.report.figures.counts import draw_counts
from fineprune.report.figures.curves import draw_curves
from fineprune.report.figures.drawing import Drawing, drawn
from fineprune.report.figures.evaluations import metrics_by_arm
from fineprune.report.figures.sample_losses import draw_sample_losses
from fineprune.report.figures.samples import draw_samples
from fineprune.report.page_template import write_page
from fineprune.report.paper import paper_notes, paper_result, paper_table
from fineprune.report.suspected_labels import first_suspects
from fineprune.report.table import NOTHING, Table, percent, whole
from fineprune.report.verdict import CHANCE_POINTS, headline, method_of, verdict
from fineprune.report.wrong_labels import found_rows, found_table
from fineprune.runs.files import RECIPE
from fineprune.runs.run import Run, split_by
from fineprune.runs.unfinished import Unfinished

# After this time, a page about runs that train loads itself again.
_RELOAD_SECONDS = 5


def write_report(
    runs: Sequence[Run],
    path: Path,
    margin: float = MARGIN,
    unfinished: Sequence[Unfinished] = (),
    *,
    reloads: bool = False,
) -> None:
    """Write a report on runs as one self-contained HTML file, with one section per group.

    Args:
        runs: The finished runs, from ``read_runs``.
        path: The HTML file. A missing folder is made, and an old file is replaced atomically.
        margin: The margin of equivalence, as a fraction.
        unfinished: Further runs, which are shown apart and not compared.
        reloads: Whether the page loads itself again every few seconds.
    """
    if not runs and not unfinished:
        raise InputError("expected at least one finished run to report, got none")
    groups = grouped(runs)
    sections = [
        _section(group, f"group-{number}", margin) for number, group in enumerate(groups, start=1)
    ]
    write_page(
        path,
        "report.html.j2",
        title=_title([*runs, *unfinished]),
        sections=sections,
        columns=columns_for([row for section in sections for row in section["rows"]]),
        overview=_overview(sections),
        paper=paper_table(groups),
        unfinished=_unfinished_table(unfinished, len(runs)) if unfinished else None,
        unfinished_drawings=_unfinished_drawings(unfinished),
        reload_seconds=_RELOAD_SECONDS if reloads else None,
    )


def draw_first(group: Group) -> list[Drawing]:
    """Draw what each arm reached and what it trained, for which every run has the data."""
    arms = metrics_by_arm(group)
    kind = group.first.evaluated_on
    return drawn(draw_time(arms, kind, group.label), draw_samples(arms, group.label))


def draw_further(group: Group) -> list[Drawing]:
    """Draw every other figure for which the runs have the data."""
    return drawn(draw_curves(group), draw_sample_losses(group), draw_counts(group))


def _unfinished_table(runs: Sequence[Unfinished], finished: int) -> Table:
    lines = []
    for run in runs:
        last = [line.get(f"{run.evaluated_on}_accuracy") for line in run.metrics]
        accuracy = next((value for value in reversed(last) if value is not None), None)
        lines.append(
            (
                run.name,
                f"{len(run.metrics)} of {run.epochs}" if run.epochs else NOTHING,
                percent(accuracy),
                whole(sum(line["samples"] for line in run.metrics)),
                f"{sum(line['seconds'] for line in run.metrics):,.1f}",
            )
        )
    return Table(
        f"Unfinished: {len(runs)} of {len(runs) + finished} runs",
        ("run", "epochs", "last evaluation, %", "samples trained", "train, s"),
        lines,
        "These runs are not compared with others, and no result below contains them.",
    )


def _unfinished_drawings(runs: Sequence[Unfinished]) -> list[Drawing]:
    begun = {run.name: [run.metrics] for run in runs if run.metrics}
    kind = next((run.evaluated_on for run in runs if run.metrics), "test")
    return drawn(
        draw_time(begun, kind, "unfinished runs", finished=False),
        draw_samples(begun, "unfinished runs"),
    )


def _section(group: Group, anchor: str, margin: float) -> dict[str, Any]:
    """Return what the section on a group shows; ``anchor`` is its id in the page."""
    rows, found = group_rows(group, margin), found_rows(group)
    return {
        "anchor": anchor,
        "heading": group.label,
        "facts": facts(group.runs),
        "method": method_of(group),
        "headline": headline(group, rows, margin),
        "first": draw_first(group),
        "verdict": verdict(group, rows, margin),
        "rows": rows,
        "tables": [
            comparison_table(
                part.capitalize(),
                rows,
                [column for column in columns_for(rows) if column.part in (None, part)],
            )
            for part in ("accuracy", "cost")
        ],
        "found": found_table(found) if found else None,
        "suspects": first_suspects(group),
        "further": draw_further(group),
        "caveats": _caveats(group, rows, margin),
        "repeats": _repeats(group),
    }


def _title(runs: Sequence[Run | Unfinished]) -> str:
    titles = distinct(run.title for run in runs)
    return titles[0] if len(titles) == 1 else "Comparisons of fine-pruning"


def _overview(sections: Sequence[dict[str, Any]]) -> Table:
    """Return the table of the method of each group, or of all arms of a group without a method."""
    columns = [column for column in COLUMNS[1:] if column.short is not None]
    lines = [
        (f"{section['heading']}, {row.arm}", *(column.cell(row) for column in columns))
        for section in sections
        for row in [row for row in section["rows"] if row.arm == section["method"]]
        or section["rows"]
    ]
    return Table("Overview", ("group", *(column.header for column in columns)), lines)


def _caveats(group: Group, rows: Sequence[Row], margin: float) -> list[str]:
    kind = group.first.evaluated_on
    caveats = [
        f"Accuracies are measured on the {kind} set. The main result is the accuracy after the "
        f"last epoch. The mean of the best three evaluations, which the paper reports, is too high "
        f"in every arm, because it selects epochs on the {kind} set itself."
    ]
    if kind == "validation":
        caveats.append(
            "The validation set was held out from the training set. Settings may be chosen with "
            "it, but final results must be measured on the test set."
        )
    fewest = min(len(group.of(arm)) for arm in group.arms)
    if fewest == 1:
        caveats.append(
            f"With one seed, differences below about {CHANCE_POINTS} percentage points are not "
            f"meaningful, because another seed would change the accuracy by about as much."
        )
    elif fewest == 2:
        caveats.append("An interval over two seeds is very wide; use three or more seeds.")
    if fewest > 1:
        caveats.append(
            f"The equivalence test is two one-sided t-tests: arms are called equivalent within "
            f"{100 * margin:g} percentage points only if the 90 % interval of their difference is "
            f"inside this margin (p below 0.05). An interval that contains zero does not show that "
            f"two arms are equal."
        )
    if fewest > 1 and len(group.arms) > 2:
        caveats.append(
            "Intervals and p-values are not corrected for the number of comparisons: of 20 arms "
            "without any effect, one is called better or worse on average."
        )
    if len({len(group.of(arm)) for arm in group.arms}) > 1:
        caveats.append(
            "The arms have different numbers of seeds; two arms are compared over the seeds that "
            "both have."
        )
    if len(group.arms) > 1:
        caveats.append(
            "Times are wall-clock times. If the machine did other work at the same time, the "
            "columns “saved in epochs” and “skipped” are more reliable than “time saved”."
        )
    if BASELINE not in group.arms:
        caveats.append("There is no full run, so no arm is compared with full training.")
    elif any(
        row.last_difference is not None and row.last_difference.pairs < (row.seeds or 0)
        for row in rows
    ):
        caveats.append("Some seeds have no full run; differences are over the seeds that have one.")
    if _is_tuned(group):
        caveats.append(
            "The learning rate of each arm was chosen with one seed. If the accuracies of an arm "
            "vary much between its seeds, its rate may be too large."
        )
    caveats += [*missing(group.runs), *unequal(group.runs)]
    nonfinite = sum(line["nonfinite"] for run in group.runs for line in run.metrics)
    if nonfinite:
        caveats.append(
            f"{nonfinite:,} losses were not finite. They received no marks and were left out of "
            f"the mean loss of their batch."
        )
    if paper_result(group) is not None:
        caveats.append(
            "The paper's results were measured on a GTX 1080 Ti, with hyper-parameters that it "
            "does not print in full. Its accuracies are means of the best three evaluations."
        )
    return caveats + paper_notes([group])


def _is_tuned(group: Group) -> bool:
    return any(run.rate_factor is not None for run in group.runs)


def _repeats(group: Group) -> list[tuple[str, list[str]]]:
    """Return the recipes that repeat the group's runs, each with its commands.

    A comparison has one. Other runs have those that they trained with, which their seeds share.
    """
    folder = comparison_of(group.runs)
    if folder is not None and len(group.runs) > 1:
        return [((folder / RECIPE).read_text(encoding="utf-8").strip(), [_compare(group)])]
    parts = split_by(
        lambda run: repr({**run.recipe, "run": {**run.recipe["run"], "seed": None}}), group.runs
    )
    return [
        (
            (runs[0].path / RECIPE).read_text(encoding="utf-8").strip(),
            [_train(run, alone=len(group.runs) == 1) for run in runs],
        )
        for runs in parts.values()
    ]


def _compare(group: Group) -> str:
    arms = [arm for arm in group.arms if not arm.startswith(COOLDOWN)]
    seeds = max(len(group.of(arm)) for arm in group.arms)
    curve = " --curve" if len(arms) < len(group.arms) else ""
    tune = " --tune" if _is_tuned(group) else ""
    return f"fineprune compare recipe.toml --seeds {seeds} --arms {','.join(arms)}{curve}{tune}"


def _train(run: Run, *, alone: bool) -> str:
    if alone:
        return "fineprune train recipe.toml"
    seed, arm = run.summary.seed, run.summary.arm.replace(":", "-")
    return f"fineprune train recipe.toml --out runs/repeated/{arm}-{seed} run.seed={seed}"
