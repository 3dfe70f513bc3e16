"""The report: one HTML file that needs nothing else, for a browser, a phone or paper."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from fineprune.errors import InputError
from fineprune.experiments.arm_table import BASELINE, Group, Row, group_rows, grouped
from fineprune.report.facts import distinct, facts, hardware
from fineprune.report.figures import Drawing, draw_all
from fineprune.report.paper import paper_rows
from fineprune.report.paper_table import HEADERS, paper_lines, paper_notes
from fineprune.report.tables import COLUMNS
from fineprune.report.verdict import CHANCE_POINTS, METHOD, verdict
from fineprune.runs.files import RECIPE, write_atomically
from fineprune.runs.run import Run


@dataclass(frozen=True)
class Section:
    """What the template is told of one group.

    Attributes:
        anchor: its id in the page.
        heading: such as ``lenet on digits``.
        facts: terms and their values: what was run.
        verdict: sentences.
        rows: one for each arm.
        paper: the paper's lines, where it has any.
        drawings: the figures.
        caveats: sentences.
        recipe: TOML.
        command: how to run it again.
    """

    anchor: str
    heading: str
    facts: list[tuple[str, str]]
    verdict: list[str]
    rows: list[Row]
    paper: list[Row]
    drawings: list[Drawing]
    caveats: list[str]
    recipe: str
    command: str


def write_report(runs: Sequence[Run], path: Path) -> None:
    """Write finished runs up as one self-contained HTML file, a section for each group.

    Args:
        runs: from ``read_runs``.
        path: the file; its folder is made, and a file there is replaced in one step.

    Raises:
        InputError: there is no run, or the runs cannot be told apart.
    """
    if not runs:
        raise InputError("expected at least one finished run to report, got none")
    groups = grouped(runs)
    sections = [_section(group, f"group-{number}") for number, group in enumerate(groups, start=1)]
    page = template("report.html.j2").render(
        title=_title(runs),
        sections=sections,
        columns=COLUMNS,
        overview=_overview(sections),
        paper_headers=HEADERS,
        paper_lines=paper_lines(groups),
        paper_notes=paper_notes(groups),
        overview_columns=[column for column in COLUMNS if column.short is not None],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)


def template(name: str) -> jinja2.Template:
    """Return a page's template, in which all that is filled in is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fineprune.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = Markup  # our own figures only; all else is escaped
    return environment.get_template(name)


def _section(group: Group, anchor: str) -> Section:
    rows = group_rows(group)
    return Section(
        anchor=anchor,
        heading=group.label,
        facts=facts(group.runs),
        verdict=verdict(group, rows),
        rows=rows,
        paper=paper_rows(rows[0]),
        drawings=draw_all(group),
        caveats=_caveats(group, rows),
        recipe=_recipe_text(group),
        command=_command(group),
    )


def _title(runs: Sequence[Run]) -> str:
    titles = distinct(run.title for run in runs)
    return titles[0] if len(titles) == 1 else "Fine-pruning, compared"


def _overview(sections: Sequence[Section]) -> list[tuple[Section, Row]]:
    """Where there are several groups: the method's row of each, or all rows of one without it."""
    if len(sections) == 1:
        return []
    return [(section, row) for section in sections for row in _of_method(section.rows)]


def _of_method(rows: Sequence[Row]) -> Sequence[Row]:
    return [row for row in rows if row.arm == METHOD] or rows


def _caveats(group: Group, rows: Sequence[Row]) -> list[str]:
    kind = group.runs[0].summary["evaluated_on"]
    caveats = [
        f"Accuracies are of the {kind} set. The headline is the last epoch's; the mean of the best "
        f"three, which the paper reports, picks its epochs on the {kind} set itself and so lies "
        f"too high in every arm."
    ]
    if kind == "validation":
        caveats.append(
            "The validation set was held back from the training set. Choices may be made on it; "
            "a final table needs a run on the test set."
        )
    fewest = min(len(group.of(arm)) for arm in group.arms)
    if fewest == 1:
        caveats.append(
            f"With one seed, differences under about {CHANCE_POINTS} points mean nothing: another "
            f"seed would change them by as much."
        )
    elif fewest == 2:
        caveats.append("An interval over two seeds is very wide; three or more say much more.")
    if len(group.arms) > 1:
        caveats.append(
            "Times are wall-clock times of this machine. If it did other work meanwhile, trust the "
            "column “saved in epochs”, and the skipped sample-steps, more than “time saved”."
        )
    if BASELINE not in group.arms:
        caveats.append("There is no full run among these, so nothing is compared with one.")
    elif any(
        row.last_difference is not None and row.last_difference.pairs < (row.seeds or 0)
        for row in rows
    ):
        caveats.append("Some seeds have no full run; differences are over those that do.")
    if len({hardware(run.summary) for run in group.runs}) > 1:
        caveats.append("The runs were made on unlike hardware: their times do not compare.")
    nonfinite = sum(line["nonfinite"] for run in group.runs for line in run.metrics)
    if nonfinite:
        caveats.append(
            f"{nonfinite:,} losses were not finite; they were neither counted nor averaged."
        )
    if paper_rows(rows[0]):
        caveats.append(
            "The paper's lines are of a GTX 1080 Ti and of hyper-parameters that it does not print "
            "in full, and its accuracies are means of the best three."
        )
    return caveats + paper_notes([group])


def _comparison(group: Group) -> Path | None:
    """Return the folder of the comparison that made all runs of a group; None if none did."""
    folders = {run.comparison for run in group.runs}
    folder = folders.pop()
    # Comparisons of earlier versions did not keep their recipe.
    return folder if not folders and folder and (folder / RECIPE).exists() else None


def _recipe_text(group: Group) -> str:
    """Return the recipe that makes the group's runs again: the comparison's, or the method's."""
    method = next((run for run in group.runs if run.summary["policy"] != BASELINE), group.runs[0])
    return ((_comparison(group) or method.path) / RECIPE).read_text(encoding="utf-8").strip()


def _command(group: Group) -> str:
    pruned = any(run.summary["policy"] != BASELINE for run in group.runs)
    if len(group.runs) == 1 or not (pruned or _comparison(group)):
        return "fineprune train recipe.toml"
    seeds = max(len(group.of(arm)) for arm in group.arms)
    return f"fineprune compare recipe.toml --seeds {seeds} --arms {','.join(group.arms)}"
