"""The results of [P], "Data fine-pruning" (Li, He, Ren, Mao, NPC 2018), for comparison with ours.

They are those of Tables 1 and 2: CIFAR-10, 200 epochs, one GTX 1080 Ti. The accuracies are means of
the three best test accuracies of a run. The paper prints neither the number of runs nor all
hyper-parameters.
"""

from dataclasses import dataclass

from fineprune.experiments.arm_table import Difference, Group, Row


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


def paper_result(group: Group) -> PaperResult | None:
    """Return the paper's results for the network and the data of a group.

    Returns:
        The results; None if the paper has none for this network, or for other data than all
        training images of CIFAR-10 with their own labels, evaluated on the test set.
    """
    first = group.first
    whole = first.train_samples == TRAIN_SAMPLES and first.suspicion is None
    if first.dataset != "cifar10" or first.evaluated_on != "test" or not whole:
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
