"""The labels to train on: those of the dataset, those of a file, or with label noise."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fineprune.datasets.label_file import DROP, read_labels
from fineprune.datasets.label_noise import class_map, mapped_noise, symmetric_noise
from fineprune.errors import InputError
from fineprune.training.settings import DataSettings


@dataclass(frozen=True, eq=False)
class WeakLabels:
    """The labels of the images to train on.

    Attributes:
        index: The indices of these images in the training set, sorted; int64, shape (M,).
        wrong: Which of their labels are wrong; bool, shape (M,). None if this is not known.
        whole: The label of each image of the whole training set, -1 for one that is left out;
            int64, shape (N,).
        digest: The SHA-256 digest of the indices and labels, in hexadecimal, if they come from a
            file, which may change; else None.
    """

    index: npt.NDArray[np.int64]
    wrong: npt.NDArray[np.bool_] | None
    whole: npt.NDArray[np.int64]
    digest: str | None

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The labels of these images; int64, shape (M,)."""
        return self.whole[self.index]

    def only(self, kept: npt.NDArray[np.int64]) -> "WeakLabels":
        """Return those of the images at these positions, which are sorted; int64, shape (m,)."""
        wrong = None if self.wrong is None else self.wrong[kept]
        return replace(self, index=self.index[kept], wrong=wrong)


def weak_labels(
    settings: DataSettings,
    own: npt.NDArray[np.integer],
    classes: Sequence[str],
    index: npt.NDArray[np.int64],
    keys: Sequence[str] | None = None,
) -> WeakLabels:
    """Return the labels to train on.

    Args:
        settings: The data section of the recipe.
        own: The labels of the whole training set, which are those of the dataset; shape (N,).
        classes: The name of each class.
        index: The indices of the images to train on, sorted; int64, shape (n,).
        keys: What names each sample of the training set in a table; None for their indices.
    """
    if settings.labels is not None:
        given = read_labels(Path(settings.labels), classes, len(own), keys)
        index = index[given[index] != DROP]
        if not len(index):
            raise InputError(
                f"expected labels of images to train on in {settings.labels}, got only images to "
                f"leave out or hold out"
            )
        known = settings.true_labels == "dataset"
        digest = hashlib.sha256(np.stack([index, given[index]]).tobytes()).hexdigest()
        wrong = given[index] != own[index] if known else None
        return WeakLabels(index, wrong, given, digest)
    whole = own.astype(np.int64)
    if settings.label_noise is None:
        return WeakLabels(index, None, whole, None)
    labels = whole[index]
    share, seed = settings.label_noise, settings.label_noise_seed
    if settings.label_noise_map is None:
        noisy = symmetric_noise(labels, len(classes), share, seed)
    else:
        mapping = class_map(settings.label_noise_map, classes)
        noisy = mapped_noise(labels, mapping, share, seed)
    whole[index] = noisy
    return WeakLabels(index, noisy != labels, whole, None)
