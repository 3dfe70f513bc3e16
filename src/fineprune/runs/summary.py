"""Summary: the results of a finished run, as ``summary.json`` holds them."""

import dataclasses
from pathlib import Path

from fineprune.runs.files import read_version

_VERSION = 2

# The name of the digest of what a second training leaves out.
LEFT_OUT = "suspects"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """The machine: the CPU's name, usable cores, threads per process, torch's device, the GPU."""

    cpu: str
    cores: int
    threads: int
    device: str
    gpu: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detection:
    """How well the suspicion of a policy finds the wrong labels, at the end of the training.

    A figure is None if it is not defined.

    Attributes:
        wrong, wrong_share: The number and the share of the training labels that are wrong.
        roc_area: The probability that a wrong label is more suspicious than a right one.
        average_precision: The mean precision over the wrong labels, in the order of the suspicion.
        suspects: The number of samples that the policy itself calls suspicious.
        precision, recall: The share of these whose label is wrong, and of the wrong labels found.
        r_precision: The precision of as many suspects as there are wrong labels.
    """

    wrong: int
    wrong_share: float
    roc_area: float | None
    average_precision: float | None
    suspects: int | None
    precision: float | None
    recall: float | None
    r_precision: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of a finished run. Shares and accuracies are fractions, times are seconds.

    Attributes:
        version: The version of the file's format.
        arm: The name of the run's arm in a comparison; by default that of the policy.
        policy, seed, epochs, network, dataset, parameters: What was trained, and for how long.
        train_samples: The number of training samples, N.
        samples_trained: The number of sample-steps, that is, of samples summed over the epochs.
        samples_full: The number of sample-steps that training on all data takes.
        skipped_share: The share of ``samples_full`` that the plans skipped.
        steps: The number of optimizer steps.
        pruned_epochs: The number of epochs that skipped samples.
        seconds_train: The wall-clock time of the training, with bookkeeping, without evaluation.
        seconds_bookkeeping: The part of it that was spent on losses, counts and plans.
        seconds_evaluate: The wall-clock time of the evaluations.
        accuracy_last, top5_last: The accuracies after the last epoch; None with too few classes.
        accuracy_best3: The mean of the three best accuracies, which the paper reports.
        evaluated_on: The set that the accuracies are measured on, ``test`` or ``validation``.
        hardware, precision, ranks: The machine, ``float32`` or ``bfloat16``, and the number of
            processes that computed gradients.
        versions, git: The versions of fineprune, torch, numpy and Python, and the git revision of
            the working directory, None outside a repository.
        data_sha256, labels_sha256, weights_sha256, left_out_sha256, code_sha256: The digests of
            what the run read: the data; labels from a file or a folder; pretrained weights; what
            ``data.without`` leaves; and the user's own code. None for what it did not read.
        suspicion: How well the policy found the wrong labels; None if these are not known.
    """

    version: int = _VERSION
    arm: str
    policy: str
    seed: int
    epochs: int
    network: str
    dataset: str
    parameters: int
    train_samples: int
    samples_trained: int
    samples_full: int
    skipped_share: float
    steps: int
    pruned_epochs: int
    seconds_train: float
    seconds_bookkeeping: float
    seconds_evaluate: float
    accuracy_last: float
    accuracy_best3: float
    top5_last: float | None
    evaluated_on: str
    hardware: Hardware
    versions: dict[str, str]
    precision: str
    ranks: int
    git: str | None
    weights_sha256: str | None
    labels_sha256: str | None
    data_sha256: str | None
    left_out_sha256: str | None
    code_sha256: str | None
    suspicion: Detection | None

    @property
    def digests(self) -> dict[str, str | None]:
        """The digests of what a run read, which are the same for runs that can be compared."""
        return {
            "data": self.data_sha256,
            "labels": self.labels_sha256,
            "weights": self.weights_sha256,
            LEFT_OUT: self.left_out_sha256,
            "code": self.code_sha256,
        }


def shortened(digest: str | None) -> str | None:
    """Return the first digits of a digest, for people."""
    return None if digest is None else digest[:12]


def read_summary(path: Path) -> Summary:
    """Read and check the summary of a run."""
    advice = ": remove the file and continue the run, which writes it again"
    return read_version(path, Summary, _VERSION, advice)
