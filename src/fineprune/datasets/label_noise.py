"""Label noise: a known share of wrong labels, which depends on its own seed only."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fineprune.datasets.image_set import class_number
from fineprune.errors import InputError
from fineprune.pruning.random_streams import stream

# The class of each sample, from 0; shape (N,).
Labels = npt.NDArray[np.int64]


def symmetric_noise(labels: Labels, classes: int, share: float, seed: int) -> Labels:
    """Replace a share of the labels by other classes, each of which has the same probability.

    Of N labels, exactly ``round(share * N)`` are replaced; which of them, and by which classes,
    depends on the seed only. What a smaller share replaces, a larger one replaces in the same way.
    """
    number = round(share * len(labels))
    if number and classes < 2:
        raise InputError(f"expected at least two classes with label noise, got {classes}")
    rng = stream(seed, 0, "label-noise")
    replaced = rng.permutation(len(labels))[:number]
    # A shift is drawn for every label, so that the new classes do not depend on the share.
    shifts = rng.integers(1, max(classes, 2), size=len(labels))[replaced]
    noisy = labels.copy()
    noisy[replaced] = (labels[replaced] + shifts) % classes
    return noisy


def mapped_noise(labels: Labels, mapping: Mapping[int, int], share: float, seed: int) -> Labels:
    """Replace a share of the labels of some classes, each class by the one that it is mapped to.

    Of a mapped class with n labels, exactly ``round(share * n)`` are replaced; which of them
    depends on the seed.
    """
    order = stream(seed, 0, "label-noise").permutation(len(labels))
    noisy = labels.copy()
    for source, target in mapping.items():
        members = order[labels[order] == source]
        noisy[members[: round(share * len(members))]] = target
    return noisy


def class_map(pairs: Sequence[str], classes: Sequence[str]) -> dict[int, int]:
    """Read a class map such as ``["cat->dog", "3->5"]``, of names or numbers of classes."""
    mapping: dict[int, int] = {}
    for pair in pairs:
        ends = [end.strip() for end in pair.split("->")]
        if len(ends) != 2:
            raise InputError(
                f"expected data.label_noise_map as a list of texts such as 'cat->dog' or '3->5', "
                f"got {pair!r}"
            )
        source, target = (class_number("data.label_noise_map", end, classes) for end in ends)
        if source == target:
            raise InputError(
                f"expected data.label_noise_map to replace a class by another one, got {pair!r}"
            )
        if source in mapping:
            raise InputError(
                f"expected data.label_noise_map to replace each class once, got {ends[0]!r} twice"
            )
        mapping[source] = target
    return mapping
