"""The results of [P] Tables 1 and 2 together with ours, with one line per network."""

from collections.abc import Sequence

from fineprune.experiments.arm_table import BASELINE, Group, Row, group_rows
from fineprune.report.paper import EPOCHS, RESULTS, paper_result
from fineprune.report.tables import NOTHING, percent, points

_METHOD = "fine-pruning"

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
    "pruned minus regular, points: paper",
    "ours",
)


def paper_lines(groups: Sequence[Group]) -> list[list[str]]:
    """Return one line of cells for each group whose network and dataset are in the paper.

    Accuracies are means of the best three evaluations of a run, as in the paper. Our time saved is
    the wall-clock time saved relative to the full run. A group has no line if it has no
    ``paper_result``, or if it has no full or no fine-pruned run.
    """
    return [line for group in groups if (line := _line(group)) is not None]


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


def _line(group: Group) -> list[str] | None:
    epochs = _epochs(group)
    if epochs is None:
        return None
    rows = {row.arm: row for row in group_rows(group)}
    full, pruned = rows[BASELINE], rows[_METHOD]
    paper = RESULTS[full.network]
    return [
        full.network,
        str(epochs),
        str(pruned.seeds),
        percent(pruned.skipped),
        percent(paper.time_saved),
        percent(pruned.time_saved),
        f"{paper.overhead_seconds:.2f}",
        NOTHING if pruned.seconds_bookkeeping is None else f"{pruned.seconds_bookkeeping:.2f}",
        percent(paper.accuracy_regular),
        percent(full.accuracy_best3),
        percent(paper.accuracy_pruned),
        percent(pruned.accuracy_best3),
        f"{100 * (paper.accuracy_pruned - paper.accuracy_regular):+.2f}",
        points(pruned.best3_difference),
    ]


def _epochs(group: Group) -> int | None:
    """Return the number of epochs of a group that has a line in the table; None if it has none."""
    first: Row = group_rows(group)[0]
    if paper_result(first) is None or not {BASELINE, _METHOD} <= set(group.arms):
        return None
    epochs: int = group.of(_METHOD)[0].summary.epochs
    return epochs
