"""What a second training leaves out: the suspects of a finished run (``data.without``)."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.runs.history import needed_evidence
from fineprune.runs.run import read_run
from fineprune.runs.training_set import UNKNOWN, TrainingSet, read_training_set

_ADVICE = "give a run with the same data section"


@dataclass(frozen=True, eq=False)
class LeftOut:
    """Which samples a second training leaves out.

    Attributes:
        kept: The positions of the samples that stay, among those of the first run, sorted; int64,
            shape (M,).
        digest: The SHA-256 digest of the samples that stay, in hexadecimal.
    """

    kept: npt.NDArray[np.int64]
    digest: str


def left_out(folder: Path, training_set: TrainingSet, fingerprint: str) -> LeftOut:
    """Return what the suspects of a finished run leave of a training set.

    Args:
        folder: The folder of the run (``data.without``).
        training_set: The training set of the second training, before anything is left out for this
            setting.
        fingerprint: That of its data.

    Raises:
        InputError: The folder holds no finished run with evidence on the labels, the run was
            trained on other samples or labels, or it suspects none or all of them.
    """
    summary, number = read_run(folder).summary, len(training_set.index)
    _check_same(folder, training_set, summary.train_samples, fingerprint, summary.data_sha256)
    kept = np.array(needed_evidence(folder, number, "for data.without").without_suspects())
    if len(kept) == number:
        raise InputError(
            f"expected for data.without a run that suspects some labels, got {folder}, which "
            f"suspects none: leave out data.without"
        )
    return LeftOut(kept, hashlib.sha256(training_set.index[kept].tobytes()).hexdigest())


def check_left_out(without: str | None, digest: str | None, begun: str | None) -> None:
    """Check that a run goes on without the samples that were left out when it began.

    ``digest`` and ``begun`` are the ``left_out_digest`` of the data now and then, and ``without``
    is the setting.
    """
    if digest != begun:
        raise InputError(
            f"expected data.without to leave out the same samples as when the run began, got "
            f"{'none' if without is None else f'others from {without}'}: restore that run, or "
            f"train into a new folder"
        )


def _check_same(
    folder: Path, own: TrainingSet, number: int, digest: str, trained: str | None
) -> None:
    """Raise InputError if a run was trained on other samples or labels.

    Args:
        folder: The folder of the run.
        own: The training set of the second training.
        number: The number of samples that the run trained.
        digest: The fingerprint of the data of the second training.
        trained: That of the run; None if it is not known.
    """
    expected = f"expected for data.without a run on the same samples and labels, got {folder}"
    if number != len(own.index):
        raise InputError(
            f"{expected}, which trained {number} samples instead of {len(own.index)}: {_ADVICE}"
        )
    if trained not in (None, digest):
        raise InputError(f"{expected}, whose data differ: {_ADVICE}")
    theirs = read_training_set(folder, number)
    if not np.array_equal(theirs.index, own.index):
        raise InputError(f"{expected}, whose samples differ: {_ADVICE}")
    labels, others = own.trained_labels, theirs.trained_labels
    if not ((labels == others) | (labels == UNKNOWN) | (others == UNKNOWN)).all():
        raise InputError(f"{expected}, whose labels differ: {_ADVICE}")
