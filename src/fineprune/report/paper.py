"""The results of [P], "Data fine-pruning" (Li, He, Ren, Mao, NPC 2018), for comparison with ours.

They are those of Tables 1 and 2: CIFAR-10, 200 epochs, one GTX 1080 Ti. The accuracies are means of
the three best test accuracies of a run. The paper prints neither the number of runs nor all
hyper-parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fineprune.experiments.arm_table import BASELINE, Difference, Group, Row, group_rows
from fineprune.report.table import Table, decimal, percent, points


@dataclass(frozen=True)
class PaperResult:
    """The results that the paper prints for one network.

    Attributes:
        time_saved: The fraction of the training time that is saved.
        overhead_seconds: The overhead over all 200 epochs, in seconds.
        accuracy_regular: The accuracy of regular training, as a fraction.
        accuracy_pruned: The accuracy with data fine-pruning, as a fraction.
    """

    time_saved: float
    overhead_seconds: float
    accuracy_regular: float
    accuracy_pruned: float


EPOCHS = 200
TRAIN_SAMPLES = 50_000

RESULTS = {
    "lenet": PaperResult(0.1180, 4.27, 0.7515, 0.7472),
    "vgg13": PaperResult(0.0740, 4.33, 0.9392, 0.9356),
    "vgg16": PaperResult(0.0756, 4.26, 0.9379, 0.9344),
    "vgg19": PaperResult(0.0765, 4.30, 0.9335, 0.9330),
    "resnet18": PaperResult(0.1276, 4.08, 0.9125, 0.9116),
    "resnet34": PaperResult(0.1343, 4.21, 0.9286, 0.9285),
    "resnet50": PaperResult(0.1392, 4.18, 0.9375, 0.9346),
    "wrn10": PaperResult(0.1373, 4.12, 0.9213, 0.9178),
    "wrn16": PaperResult(0.1381, 4.25, 0.9422, 0.9420),
    "wrn22": PaperResult(0.1429, 4.32, 0.9508, 0.9471),
}

_METHOD = "fine-pruning"


def paper_result(group: Group) -> PaperResult | None:
    """Return the paper's results for the network and the data of a group.

    Returns:
        The results; None if the paper has none for this network, or for other data than all
        training images of CIFAR-10 with their own labels, evaluated on the test set.
    """
    first = group.first
    whole = first.train_samples == TRAIN_SAMPLES
    own = first.suspicion is None and first.labels_sha256 is None
    if first.dataset != "cifar10" or first.evaluated_on != "test" or not (whole and own):
        return None
    return RESULTS.get(first.network)


def paper_rows(group: Group) -> list[Row]:
    """Return two rows with the paper's results; none if ``paper_result(group)`` is None."""
    result = paper_result(group)
    if result is None:
        return []
    return [
        Row(group=group, arm="paper: full", accuracy_best3=result.accuracy_regular),
        Row(
            group=group,
            arm="paper: pruned",
            time_saved=result.time_saved,
            seconds_bookkeeping=result.overhead_seconds,
            accuracy_best3=result.accuracy_pruned,
            best3_difference=Difference(result.accuracy_pruned - result.accuracy_regular, None, 1),
        ),
    ]


def paper_table(groups: Sequence[Group]) -> Table | None:
    """Return the paper's Tables 1 and 2 with ours: one line for each group that they contain.

    Accuracies are means of the best three evaluations of a run, as in the paper. Our time saved is
    the wall-clock time saved relative to the full run. A group has no line if it has no
    ``paper_result``, or if it has no full or no fine-pruned run. The result is None without lines.
    """
    lines = [_line(group, epochs) for group in groups if (epochs := _epochs(group)) is not None]
    if not lines:
        return None
    headers = tuple(header for header, _ in lines[0])
    cells = [tuple(cell for _, cell in line) for line in lines]
    note = (
        "Accuracies are means of the best three evaluations of a run on the test set, as in the "
        "paper. What is skipped is a setting, which our recipes choose by the paper's savings, so "
        "the time saved is an input and no result."
    )
    title = "The paper's Tables 1 and 2, compared with ours"
    return Table(title, headers, cells, " ".join([note, *paper_notes(groups)]))


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


def _line(group: Group, epochs: int) -> list[tuple[str, str]]:
    """Return the headers and the cells of the line of a group."""
    rows = {row.arm: row for row in group_rows(group)}
    full, pruned = rows[BASELINE], rows[_METHOD]
    paper = RESULTS[group.first.network]
    difference = paper.accuracy_pruned - paper.accuracy_regular
    return [
        ("network", group.first.network),
        ("epochs", str(epochs)),
        ("seeds", str(pruned.seeds)),
        ("skipped, %", percent(pruned.skipped)),
        ("time saved, %: paper", percent(paper.time_saved)),
        ("ours", percent(pruned.time_saved)),
        ("overhead, s: paper", decimal(paper.overhead_seconds, 2)),
        ("ours", decimal(pruned.seconds_bookkeeping, 2)),
        ("regular, %: paper", percent(paper.accuracy_regular)),
        ("ours", percent(full.accuracy_best3)),
        ("pruned, %: paper", percent(paper.accuracy_pruned)),
        ("ours", percent(pruned.accuracy_best3)),
        ("pruned minus regular, points: paper", f"{100 * difference:+.2f}"),
        ("ours", points(pruned.best3_difference)),
    ]


def _epochs(group: Group) -> int | None:
    """Return the number of epochs of a group that has a line in the table; None if it has none."""
    if paper_result(group) is None or not {BASELINE, _METHOD} <= set(group.arms):
        return None
    return group.of(_METHOD)[0].summary.epochs
