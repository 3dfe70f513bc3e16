"""TrainingSet: which samples a run trained, out of which training set, and with which labels.

``history/training_set.npz`` keeps this, so that nobody has to load the data again, which may have
changed since.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError, explaining
from fineprune.runs.files import HISTORY
from fineprune.writing import replacing

TRAINING_SET = "training_set.npz"

# The label of a sample that is left out of the training, and of one whose label is not known.
DROPPED, UNKNOWN = -1, -2


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """The whole training set of a run, before samples were held out or left out.

    Attributes:
        index: The index of each sample that the run trained in this set, sorted; int64, shape (N,).
        labels: The label of each sample of this set, also of those that the run did not train;
            int64, shape (M,). ``DROPPED`` for one that is left out, ``UNKNOWN`` if the data hide
            it.
        classes: The name of each class; empty if the classes have no names.
        keys: What names each sample of this set in tables of labels: the path of an image, or what
            user-defined data give. None if they have only their indices.
    """

    index: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...] = ()
    keys: tuple[str, ...] | None = None

    @property
    def trained_labels(self) -> npt.NDArray[np.int64]:
        """The label of each sample that the run trained; int64, shape (N,)."""
        return self.labels[self.index]

    def name(self, label: int) -> str:
        """Return the name of a class, or its number if the classes have no names."""
        return self.classes[label] if label < len(self.classes) else str(label)

    def key(self, sample: int) -> str | None:
        """Return the key of a sample that the run trained; None without keys."""
        return None if self.keys is None else self.keys[self.index[sample]]


def write_training_set(file: Path, training_set: TrainingSet) -> None:
    """Write a training set, and replace a file at this path atomically."""
    names = {"classes": training_set.classes, "keys": training_set.keys}
    arrays: dict[str, npt.NDArray[Any]] = {
        "index": training_set.index,
        "labels": training_set.labels,
        **{
            name: np.frombuffer(json.dumps(of).encode(), np.uint8)
            for name, of in names.items()
            if of is not None
        },
    }
    with replacing(file) as opened:
        np.savez_compressed(opened, **arrays)  # type: ignore[arg-type]


def read_training_set(folder: Path, num_samples: int) -> TrainingSet:
    """Read the training set of a run."""
    file = folder / HISTORY / TRAINING_SET
    if not file.exists():
        raise InputError(
            f"expected {file}, which lists the samples and labels of the run, found none: train "
            f"again with run.history = true"
        )
    expected = f"expected {num_samples} trained samples in {file}, cannot read it"
    # For a damaged archive, NumPy raises many types of exceptions.
    with explaining(expected, Exception), np.load(file, allow_pickle=False) as arrays:
        names = {
            name: tuple(json.loads(arrays[name].tobytes()))
            for name in ("classes", "keys")
            if name in arrays
        }
        read = TrainingSet(arrays["index"], arrays["labels"], **names)
        if read.index.shape != (num_samples,) or len(read.keys or read.labels) != len(read.labels):
            raise ValueError(f"it has {len(read.index)} samples")
        return read
