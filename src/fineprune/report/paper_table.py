"""The results of [P] Tables 1 and 2 together with ours, with one line per network."""

from collections.abc import Sequence

from fineprune.experiments.arm_table import BASELINE, Group, group_rows
from fineprune.report.paper import EPOCHS, RESULTS, paper_result
from fineprune.report.table import Table, decimal, percent, points

_METHOD = "fine-pruning"

_HEADERS = (
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
    "pruned minus regular, points: paper",
    "ours",
)


def paper_table(groups: Sequence[Group]) -> Table | None:
    """Return a table with one line for each group whose network and dataset are in the paper.

    Accuracies are means of the best three evaluations of a run, as in the paper. Our time saved is
    the wall-clock time saved relative to the full run. A group has no line if it has no
    ``paper_result``, or if it has no full or no fine-pruned run. The result is None without lines.
    """
    lines = [line for group in groups if (line := _line(group)) is not None]
    if not lines:
        return None
    note = (
        "Accuracies are means of the best three evaluations of a run on the test set, as in the "
        "paper. What is skipped is a setting, which our recipes choose by the paper's savings, so "
        "the time saved is an input and no result."
    )
    title = "The paper's Tables 1 and 2, compared with ours"
    return Table(title, _HEADERS, lines, " ".join([note, *paper_notes(groups)]))


def paper_notes(groups: Sequence[Group]) -> list[str]:
    """Return sentences on how the runs in the table differ from those of the paper."""
    shorter = sorted({epochs for g in groups if (epochs := _epochs(g)) not in (None, EPOCHS)})
    if not shorter:
        return []
    numbers = ", ".join(str(number) for number in shorter)
    return [
        f"Lines with {numbers} epochs use a shortened schedule, whereas the paper trains for "
        f"{EPOCHS} epochs. They show what the method saves, but their accuracies cannot be "
        f"compared with the paper's."
    ]


def _line(group: Group) -> tuple[str, ...] | None:
    epochs = _epochs(group)
    if epochs is None:
        return None
    rows = {row.arm: row for row in group_rows(group)}
    full, pruned = rows[BASELINE], rows[_METHOD]
    paper = RESULTS[group.first.network]
    return (
        group.first.network,
        str(epochs),
        str(pruned.seeds),
        percent(pruned.skipped),
        percent(paper.time_saved),
        percent(pruned.time_saved),
        decimal(paper.overhead_seconds, 2),
        decimal(pruned.seconds_bookkeeping, 2),
        percent(paper.accuracy_regular),
        percent(full.accuracy_best3),
        percent(paper.accuracy_pruned),
        percent(pruned.accuracy_best3),
        f"{100 * (paper.accuracy_pruned - paper.accuracy_regular):+.2f}",
        points(pruned.best3_difference),
    )


def _epochs(group: Group) -> int | None:
    """Return the number of epochs of a group that has a line in the table; None if it has none."""
    if paper_result(group) is None or not {BASELINE, _METHOD} <= set(group.arms):
        return None
    return group.of(_METHOD)[0].summary.epochs
