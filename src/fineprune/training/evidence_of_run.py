"""The evidence on the labels that a finished run has kept, for policies that begin with it."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fineprune.errors import InputError
from fineprune.labels.label_watch import LabelWatch
from fineprune.runs.history import needed_evidence
from fineprune.runs.run import read_run
from fineprune.runs.training_set import UNKNOWN, read_training_set

if TYPE_CHECKING:  # The data are those of a recipe, which reads the evidence.
    from fineprune.training.data import Data


def evidence_of_run(setting: str, folder: Path) -> LabelWatch:
    """Read the evidence of a finished run, which a setting of the pruning section names."""
    number = read_run(folder).summary.train_samples
    return needed_evidence(folder, number, f"for pruning.{setting}")


def check_same_samples(setting: str, folder: Path, data: "Data") -> None:
    """Check that the run that a setting names was trained on the samples and labels of a recipe."""
    summary = read_run(folder).summary
    expected = f"expected for pruning.{setting} a run on the same samples and labels, got {folder}"
    if summary.train_samples != data.num_samples:
        raise InputError(
            f"{expected}, which trained {summary.train_samples} samples instead of "
            f"{data.num_samples}: give a run with the same data section"
        )
    digest = data.digest()
    if None not in (digest, summary.data_sha256) and digest != summary.data_sha256:
        raise InputError(f"{expected}, whose data differ: give a run with the same data section")
    theirs, ours = read_training_set(folder, data.num_samples), data.training_set()
    what = "samples"
    if np.array_equal(theirs.index, ours.index):
        what = "labels"
        given, own = theirs.trained_labels, ours.trained_labels
        if ((given == own) | (given == UNKNOWN) | (own == UNKNOWN)).all():
            return
    raise InputError(f"{expected}, whose {what} differ: give a run with the same data section")
