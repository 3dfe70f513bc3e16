"""The paper's Tables 1 and 2 with ours beside them: a line for each network that was run."""

from collections.abc import Sequence

from fineprune.experiments.arm_table import BASELINE, Group, Row, group_rows
from fineprune.report.paper import EPOCHS, RESULTS
from fineprune.report.tables import NOTHING, points
from fineprune.report.verdict import METHOD

HEADERS = (
    "network",
    "epochs",
    "seeds",
    "skipped, %",
    "time saved, %: paper",
    "ours",
    "overhead, s: paper",
    "ours",
    "regular, %: paper",
    "ours",
    "pruned, %: paper",
    "ours",
    "pruned less regular, points: paper",
    "ours",
)


def paper_lines(groups: Sequence[Group]) -> list[list[str]]:
    """Return the cells of a line for each group that the paper has a column for.

    Accuracies are means of the best three evaluations of a run, as the paper's are. "Ours" of the
    time saved is by wall clock against the full run. Groups on other data than CIFAR-10, or
    without a full or a fine-pruned run, have no line.
    """
    return [line for group in groups if (line := _line(group)) is not None]


def paper_notes(groups: Sequence[Group]) -> list[str]:
    """Say in sentences what keeps the table from being a repetition of the paper."""
    shorter = sorted({epochs for g in groups if (epochs := _epochs(g)) not in (None, EPOCHS)})
    if not shorter:
        return []
    numbers = ", ".join(str(number) for number in shorter)
    return [
        f"Lines of {numbers} epochs are of a reduced schedule; the paper's are of {EPOCHS}: they "
        f"show that the code runs and what it saves, not the paper's accuracies."
    ]


def _line(group: Group) -> list[str] | None:
    epochs = _epochs(group)
    if epochs is None:
        return None
    rows = {row.arm: row for row in group_rows(group)}
    full, pruned = rows[BASELINE], rows[METHOD]
    paper = RESULTS[full.network]
    return [
        full.network,
        str(epochs),
        str(pruned.seeds),
        _percent(pruned.skipped),
        _percent(paper.time_saved),
        _percent(pruned.time_saved),
        f"{paper.overhead_seconds:.2f}",
        NOTHING if pruned.seconds_bookkeeping is None else f"{pruned.seconds_bookkeeping:.2f}",
        _percent(paper.accuracy_regular),
        _percent(full.accuracy_best3),
        _percent(paper.accuracy_pruned),
        _percent(pruned.accuracy_best3),
        f"{100 * (paper.accuracy_pruned - paper.accuracy_regular):+.2f}",
        points(pruned.best3_difference),
    ]


def _epochs(group: Group) -> int | None:
    """The epochs of a group that has a line; None where it has none."""
    first: Row = group_rows(group)[0]
    known = (first.dataset, first.evaluated_on) == ("cifar10", "test") and first.network in RESULTS
    if not known or not {BASELINE, METHOD} <= set(group.arms):
        return None
    epochs: int = group.of(METHOD)[0].summary["epochs"]
    return epochs


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.2f}"
