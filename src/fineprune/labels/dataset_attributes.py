"""What a data set says of its classes and samples without reading these."""

import contextlib
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset, TensorDataset

from fineprune.errors import warn_user


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the global generators that a data set may draw from, so that nobody notices it."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def classes_of(dataset: Any, number: int) -> Sequence[str] | None:
    """Return the names of at least so many classes, if a data set has them.

    They are its attribute ``classes``, or those of Hugging Face's column ``label`` or ``labels``,
    or else those of the data set that it wraps, such as a ``Subset`` does. They must be exactly as
    many where classes may have been merged: by a wrapper, or by a ``target_transform``.
    """
    found = _own_classes(dataset)
    may_merge = getattr(dataset, "target_transform", None) is not None
    if len(found) == number or (len(found) > number and not may_merge):
        return found
    while (dataset := getattr(dataset, "dataset", None)) is not None:
        found = _own_classes(dataset)
        if len(found) == number:
            return found
    return None


def _own_classes(dataset: Any) -> Sequence[str]:
    features = getattr(dataset, "features", None)
    columns = features if isinstance(features, Mapping) else {}
    column = columns.get("label", columns.get("labels"))
    named = (getattr(dataset, "classes", None), getattr(column, "names", None))
    names = next((names for names in named if isinstance(names, list | tuple)), ())
    return as_numbered(names, dataset)


def as_numbered(names: Sequence[str], dataset: Any) -> Sequence[str]:
    """Return the names of the classes in the order in which a data set numbers its labels.

    The data sets of torchvision name the classes before ``target_transform``, which may give them
    other numbers: folders named 1 to 10 are sorted as 1, 10, 2, for example.
    """
    transform = getattr(dataset, "target_transform", None)
    if transform is None or not hasattr(dataset, "class_to_idx"):
        return names
    try:
        with same_random_numbers():
            numbers, again = ([int(transform(n)) for n in range(len(names))] for _ in range(2))
    except Exception:  # Whatever a user's own function raises.
        return names
    if numbers != again or sorted(numbers) != list(range(len(names))):
        return names
    return [name for _, name in sorted(zip(numbers, names, strict=True))]


def unambiguous(classes: Sequence[str]) -> list[str]:
    """Return names that a table of labels can be read with, with a warning if some are changed.

    A class whose name another one has, or that is named like the word ``drop``, which leaves a
    sample out, is named by its number. If this is the name of another class, all are named so.
    """
    times = Counter(classes)
    clear = [
        str(number) if times[name] > 1 or name == "drop" else name
        for number, name in enumerate(classes)
    ]
    if len(set(clear)) < len(clear):
        clear = [str(number) for number in range(len(classes))]
    changed = [name for name in times if name not in clear]
    if changed:
        warn_user(
            f"classes with the names {', '.join(changed[:3])} are named by their numbers, because "
            f"a table of labels needs one name for each class, other than 'drop'",
            UserWarning,
        )
    return clear


def given_labels(dataset: Any) -> Any:
    """Return what a data set gives as the label of each sample, unchecked; None if it gives none.

    This is the attribute ``targets`` or ``labels``, as in the data sets of torchvision, whose
    ``target_transform`` is applied; or the second of two tensors of a ``TensorDataset``. A
    ``Subset`` has those of the data set of which it is a part. Others may change the labels of what
    they wrap.
    """
    if isinstance(dataset, Subset):
        whole = given_labels(dataset.dataset)
        if not hasattr(whole, "__len__") or len(whole) != len(dataset.dataset):  # type: ignore[arg-type]
            return whole  # None, or something else, such as the names of the classes.
        values = _values(whole)
        return [values[index] for index in dataset.indices]
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[1].cpu() if len(dataset.tensors) == 2 else None
    found = (getattr(dataset, attribute, None) for attribute in ("targets", "labels"))
    given = next((labels for labels in found if labels is not None), None)
    transform = getattr(dataset, "target_transform", None)
    if given is None or transform is None:
        return given
    # A data set gives it a number of Python, also if all are in one array.
    return [transform(target) for target in _values(given)]


def _values(given: Any) -> Any:
    """Return Python's values of an array or a tensor; any other collection as it is."""
    return given.tolist() if hasattr(given, "tolist") else given


def _transforms_labels(dataset: Any) -> bool:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return getattr(dataset, "target_transform", None) is not None


def labels_of(dataset: Any) -> npt.NDArray[np.int64] | None:
    """Return the class of each sample, int64, shape (N,).

    None if no whole numbers are given, or others each time, as by a random ``target_transform``.
    """
    try:
        with same_random_numbers():
            given = given_labels(dataset)
            again = given_labels(dataset) if _transforms_labels(dataset) else given
        if np.ndim(given[0]):  # Such as masks, which are many numbers.
            return None
        labels = np.asarray(given)
        same = again is given or np.array_equal(labels, np.asarray(again))
    except Exception:  # Whatever a user's own function raises; ragged; on another device.
        return None
    whole_numbers = labels.dtype.kind in "iu" and labels.shape == (len(dataset),)
    return labels.astype(np.int64) if whole_numbers and same else None


def keys_of(dataset: Any) -> tuple[str, ...] | None:
    """Return what names each sample, if a data set says it.

    That is its attribute ``keys``, or the path of each file below the folder of torchvision's
    ``ImageFolder``. A ``Subset`` has those of the data set of which it is a part, if they are one
    for each sample and all different.
    """
    keys = getattr(dataset, "keys", None)
    if isinstance(keys, Sequence | np.ndarray) and not isinstance(keys, str):
        return tuple(map(str, keys))
    if isinstance(dataset, Subset):
        whole = keys_of(dataset.dataset)
        if whole is None or len(whole) != len(dataset.dataset):  # type: ignore[arg-type]
            return None
        part = tuple(whole[index] for index in dataset.indices)
        return part if len(set(part)) == len(part) else None
    samples, root = (getattr(dataset, name, None) for name in ("samples", "root"))
    if not (isinstance(samples, list) and isinstance(root, str | os.PathLike)):
        return None
    folder = os.path.join(os.fspath(root), "")
    paths = [sample[0] for sample in samples if isinstance(sample, tuple)]
    if len(paths) < len(samples) or not all(str(path).startswith(folder) for path in paths):
        return None
    return tuple(str(path)[len(folder) :].replace(os.sep, "/") for path in paths)
