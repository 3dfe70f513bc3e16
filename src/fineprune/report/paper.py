"""The results of [P], "Data fine-pruning" (Li, He, Ren, Mao, NPC 2018), for comparison with ours.

They are those of Tables 1 and 2: CIFAR-10, 200 epochs, one GTX 1080 Ti. The accuracies are means of
the three best test accuracies of a run. The paper prints neither the number of runs nor all
hyper-parameters.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fineprune.experiments.arm_table import (
    BASELINE,
    Group,
    Row,
    group_rows,
    paired_difference,
    paired_runs,
)
from fineprune.report.table import Table, decimal, percent, points, table_of, whole


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
        The results; None if the paper has none for this network, or for other data than images of
        CIFAR-10 with their own labels, evaluated on the test set.
    """
    first = group.first
    own = first.suspicion is None and first.labels_sha256 is None
    if first.dataset != "cifar10" or first.evaluated_on != "test" or not own:
        return None
    return RESULTS.get(first.network)


def paper_table(groups: Sequence[Group]) -> Table | None:
    """Return the paper's Tables 1 and 2 with ours: one line for each group that they contain.

    Accuracies are means of the best three evaluations of a run, as in the paper. Our time saved is
    the wall-clock time saved relative to the full run. A group has no line if it has no
    ``paper_result``, or if it has no full or no fine-pruned run. The result is None without lines.
    """
    lines = [
        (group, paper, {row.arm: row for row in group_rows(group)}[_METHOD])
        for group in groups
        if (paper := paper_result(group)) and {BASELINE, _METHOD} <= set(group.arms)
    ]
    if not lines:
        return None
    note = (
        f"Accuracies are means of the best three evaluations of a run on the test set, as in the "
        f"paper; they are too high, because epochs are selected on the evaluated set. What is "
        f"skipped is a setting, which our recipes choose by the paper's savings. The paper trains "
        f"{TRAIN_SAMPLES:,} samples for {EPOCHS} epochs on a GTX 1080 Ti, with hyper-parameters "
        f"that it does not print in full: lines with fewer samples or epochs show what the method "
        f"saves, but their accuracies cannot be compared with the paper's."
    )
    return table_of("The paper's Tables 1 and 2, compared with ours", lines, _COLUMNS, note)


def _best(group: Group, arm: str) -> str:
    return percent(statistics.fmean(run.summary.accuracy_best3 for run in group.of(arm)))


def _difference(group: Group) -> str:
    pairs = paired_runs(group, _METHOD, BASELINE)
    return points(paired_difference(pairs, lambda summary: summary.accuracy_best3))


_COLUMNS: Sequence[tuple[str, Callable[[tuple[Group, PaperResult, Row]], str]]] = (
    ("network", lambda of: of[0].first.network),
    ("epochs", lambda of: str(of[0].of(_METHOD)[0].summary.epochs)),
    ("samples", lambda of: whole(of[0].first.train_samples)),
    ("seeds", lambda of: str(of[2].seeds)),
    ("skipped, %", lambda of: percent(of[2].skipped)),
    ("time saved, %: paper", lambda of: percent(of[1].time_saved)),
    ("ours", lambda of: points(of[2].time_saved)),
    ("overhead, s: paper", lambda of: decimal(of[1].overhead_seconds, 2)),
    ("ours", lambda of: decimal(of[2].seconds_bookkeeping, 2)),
    ("regular, %: paper", lambda of: percent(of[1].accuracy_regular)),
    ("ours", lambda of: _best(of[0], BASELINE)),
    ("pruned, %: paper", lambda of: percent(of[1].accuracy_pruned)),
    ("ours", lambda of: _best(of[0], _METHOD)),
    (
        "pruned minus regular, points: paper",
        lambda of: f"{100 * (of[1].accuracy_pruned - of[1].accuracy_regular):+.2f}",
    ),
    ("ours", lambda of: _difference(of[0])),
)
