"""The report on comparisons: one self-contained HTML file, for screens and for printing."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from fineprune.errors import InputError
from fineprune.experiments.arm_table import MARGIN, Group, group_rows, grouped
from fineprune.inspection.inspected import read_inspected
from fineprune.inspection.shown_samples import shown_samples
from fineprune.report.comparison_table import (
    cost_table,
    found_rows,
    found_table,
    headline,
    results_table,
)
from fineprune.report.facts import cautions, comparison_of, distinct, what_was_run
from fineprune.report.figures.counts import draw_counts
from fineprune.report.figures.curves import draw_curves, draw_time
from fineprune.report.figures.sample_losses import draw_sample_losses
from fineprune.report.figures.samples import draw_samples
from fineprune.report.figures.style import Drawing
from fineprune.report.page import Fold, Line, Part, Section, Sentences, write_page
from fineprune.report.paper_one import paper_tables
from fineprune.runs.files import RECIPE
from fineprune.runs.run import Run, split_by

# The number of suspects in a report; ``fineprune inspect`` shows all.
_SUSPECTS = 24


def write_report(runs: Sequence[Run], path: Path, margin: float = MARGIN) -> None:
    """Write a report on runs as one self-contained HTML file, with one section per group.

    Args:
        runs: The finished runs, from ``read_runs``.
        path: The HTML file. A missing folder is made, and an old file is replaced atomically.
        margin: The margin of equivalence, as a fraction.
    """
    if not runs:
        raise InputError("expected at least one finished run to report, got none")
    groups = grouped(runs)
    titles = distinct(run.title for run in runs)
    title = titles[0] if len(titles) == 1 else "Comparisons of fine-pruning"
    several = len(groups) > 1
    sections = [
        Section(f"group-{place}", group.label if several else "", _section(group, margin))
        for place, group in enumerate(groups, start=1)
    ]
    parts: list[Part] = [*sections, *paper_tables(groups)]
    if several:
        link = Markup('<a href="#{}">{}</a>: {}')
        said = [headline(group_rows(group, margin)) for group in groups]
        links = [
            link.format(section.anchor, section.heading, text)
            for section, text in zip(sections, said, strict=True)
        ]
        parts = [Sentences(links), *parts]
    else:
        parts = [Line("lead", groups[0].label), *parts]
        # The ids of a page must be unique, and a person reviews one set of labels at a time.
        if (review := _suspects(groups[0])) is not None:
            parts.append(Fold("Suspected wrong labels", [review]))
    write_page(path, title, parts)


def draw_first(group: Group) -> list[Drawing]:
    """Draw what each arm reached and what it trained, for which every run has the data."""
    return _known(draw_time(group), draw_samples(group))


def draw_further(group: Group) -> list[Drawing]:
    """Draw every other figure for which the runs have the data."""
    return _known(draw_curves(group), draw_sample_losses(group), draw_counts(group))


def _known(*drawings: Drawing | None) -> list[Drawing]:
    return [drawing for drawing in drawings if drawing is not None]


def _section(group: Group, margin: float) -> list[Part]:
    """Return what a page shows of a group."""
    rows, found, further = group_rows(group, margin), found_rows(group), draw_further(group)
    parts: list[Part] = [
        Line("headline", headline(rows)),
        Sentences(cautions(group.runs)),
        *draw_first(group),
        results_table(rows, margin),
        cost_table(rows),
    ]
    if found:
        table = found_table(found)
        parts.append(Fold(table.title, [table]))
    if further:
        parts.append(Fold("Further figures", further))
    return [*parts, *what_was_run([group.runs], _recipes(group))]


def _suspects(group: Group) -> Markup | None:
    """Return the review of the first suspects; None if the runs kept no evidence on labels."""
    try:
        inspected = read_inspected(group.runs)
    except InputError:  # A report needs the results only.
        return None
    number = min(inspected.ranking.num_suspects, _SUSPECTS)
    try:
        show = shown_samples(inspected, own_data=False)
    except InputError:
        show = None
    return Markup(inspected.review(number, show)) if number else None  # It has escaped all names.


def _recipes(group: Group) -> list[Path]:
    """Return the recipe of the group's comparison, or those of its runs, which seeds share."""
    folder = comparison_of(group.runs)
    if folder is not None:
        return [folder / RECIPE]
    parts = split_by(
        lambda run: repr({**run.recipe, "run": {**run.recipe["run"], "seed": None}}), group.runs
    )
    return [of[0].path / RECIPE for of in parts.values()]
