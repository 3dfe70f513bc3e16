"""The history of a run: the loss of each training sample in each epoch, and what it ended with.

``history/epoch-0001.npy`` holds one loss per sample (float16, shape (N,)): NaN if the epoch did not
train the sample, infinity if the loss was not finite.

``history/evaluated.npy`` holds the labels (row 0) and the predictions (row 1) of the last
evaluation.

``history/evidence.pt`` holds the evidence on the labels after the last epoch, as the state of a
``LabelWatch``. Runs on parameter servers have it only up to ``KEEP_ALL`` classes.
"""

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, reason_of
from fineprune.labels.evidence import KEEP_ALL
from fineprune.labels.label_watch import LabelWatch
from fineprune.runs.files import HISTORY, epoch_files, read_array
from fineprune.runs.training_set import TRAINING_SET, TrainingSet, read_training_set

EVALUATED = "evaluated.npy"
EVIDENCE = "evidence.pt"


def pack_classes(numbers: npt.NDArray[np.integer], classes: int) -> npt.NDArray[np.integer]:
    """Return class numbers in few bytes each; a negative one becomes the largest value."""
    kind = np.min_scalar_type(classes)
    return np.where(numbers < 0, np.iinfo(kind).max, numbers).astype(kind.newbyteorder("<"))


@dataclass(frozen=True, eq=False)
class History:
    """The history of one run, read from its folder.

    Attributes:
        epochs: The epochs that were recorded, counted from 0.
        losses: The loss of each sample in each of these epochs, float16, shape (epochs, N); NaN if
            the epoch did not train the sample, infinity if the loss was not finite.
    """

    epochs: list[int]
    losses: npt.NDArray[np.float16]

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """Whether each epoch trained each sample; bool, shape (epochs, N)."""
        return ~np.isnan(self.losses)


def read_history(
    folder: Path, num_samples: int, index: npt.NDArray[np.int64] | None = None
) -> History | None:
    """Read the history of a run; None if the run kept none.

    Args:
        folder: The folder of the run.
        num_samples: The number of training samples of the run.
        index: The samples to read; int64, shape (n,). Not all of the history is in memory at once
            then. None for all samples.
    """
    files = epoch_files(folder / HISTORY)
    if not files:
        return None
    if list(files) != list(range(len(files))):
        raise InputError(
            f"expected the losses of each epoch from the first one on in {folder / HISTORY}, got "
            f"only those of the epochs {', '.join(str(epoch + 1) for epoch in files)}: restore the "
            f"others"
        )
    kept = []
    for file in files.values():
        losses: npt.NDArray[np.float16] = read_array(file, "the history of a run")
        if losses.dtype != np.float16 or losses.shape != (num_samples,):
            raise InputError(
                f"expected {num_samples} losses (float16) in {file}, got {losses.dtype} of shape "
                f"{losses.shape}"
            )
        kept.append(losses if index is None else losses[index])
    return History(list(files), np.stack(kept))


def read_evaluated(folder: Path, classes: int, accuracy: float) -> npt.NDArray[np.int64] | None:
    """Read the labels and the predictions of the last evaluation; int64, shape (2, n).

    None if the run kept none. A prediction of -1 was not a number.

    Args:
        folder: The folder of the run.
        classes: The number of classes.
        accuracy: The accuracy of this evaluation.
    """
    file = folder / HISTORY / EVALUATED
    if not file.exists():
        return None
    packed = read_array(file, "the history of a run")
    if packed.dtype.kind == "u" and packed.ndim == 2 and len(packed) == 2:
        both = np.where(packed == np.iinfo(packed.dtype).max, -1, packed.astype(np.int64))
        right = float((both[0] == both[1]).mean())
        if both[0].min() >= 0 and both.max() < classes and math.isclose(right, accuracy):
            return both
    raise InputError(
        f"expected predictions of {classes} classes with the accuracy {accuracy} in {file}, as in "
        f"the summary, got others: the file is damaged or of another run"
    )


def has_evidence(folder: Path) -> bool:
    """Return whether a run has kept evidence on its labels."""
    return (folder / HISTORY / EVIDENCE).exists()


def load_tensors(file: Path) -> Any:
    """Return what ``torch.save`` wrote, on the CPU, with ``weights_only=True``.

    Raises:
        Exception: The file is damaged. torch does not notice it if only numbers have changed.
    """
    with zipfile.ZipFile(file) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"its part {damaged} is damaged")
    return torch.load(file, map_location="cpu", weights_only=True)


def read_evidence(
    folder: Path, num_samples: int, purpose: str = "to know about its labels"
) -> tuple[LabelWatch, TrainingSet]:
    """Read the evidence on the labels of a run, and its training set, which must have these.

    Args:
        folder: The folder of the run.
        num_samples: The number of training samples of the run.
        purpose: What needs the evidence, for the error message.
    """
    if not has_evidence(folder):
        raise InputError(
            f"expected a run with {EVIDENCE} {purpose}, got {folder}, which has none: train it "
            f"with run.history = true (with parameter servers, this works only up to {KEEP_ALL} "
            f"classes)"
        )
    file = folder / HISTORY / EVIDENCE
    try:
        state = load_tensors(file)
        watch = LabelWatch(num_samples, state["num_classes"])
        watch.load_state_dict(state)
    except Exception as error:  # torch.load has no error of its own for damaged files.
        raise InputError(
            f"expected the evidence on {num_samples} labels in {file}, cannot read it: "
            f"{reason_of(error)}"
        ) from error
    training_set, recorded = read_training_set(folder, num_samples), watch.evidence().labels.numpy()
    if ((recorded >= 0) & (recorded != training_set.trained_labels)).any():
        raise InputError(
            f"expected evidence on the labels in {folder / HISTORY / TRAINING_SET}, got that on "
            f"others: the files are of different runs"
        )
    return watch, training_set
