"""What a data set says of its classes and samples without reading these."""

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fineprune.errors import InputError


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


def classes_of(dataset: Any, number: int) -> list[str] | None:
    """Return the names of so many classes by the numbers of their labels, if a data set has them.

    They are those of ``own_names``, or else of the data set that it wraps, as ``Subset`` does. A
    class that ``class_to_idx`` does not name has its number as its name. Otherwise, they must be
    exactly as many, since a shorter list may number the classes in another way.

    Raises:
        InputError: The data set names more classes.
    """
    named, by_number = _names_within(dataset)
    if any(label >= number for label in named):
        some = ", ".join(f"{label}: {named[label]}" for label in sorted(named)[:3])
        raise InputError(
            f"expected a data set that names only the classes 0 to {number - 1} of the watch, got "
            f"{len(named)} names, up to class {max(named)} ({some}, ...): give names=[...], one "
            f"for each of the {number} classes, or make the watch with num_classes={max(named) + 1}"
        )
    if len(named) < number and not (named and by_number):
        return None
    return [named.get(label, str(label)) for label in range(number)]


def _names_within(dataset: Any) -> tuple[dict[int, str], bool]:
    """Return the names by number, and whether these are certain: by the ``class_to_idx`` of data
    whose labels no wrapper can have changed."""
    if named := own_names(dataset):
        return named, isinstance(getattr(dataset, "class_to_idx", None), Mapping)
    inner = getattr(dataset, "dataset", None)
    wrapped = _parts(dataset) or ([] if inner is None else [inner])
    first, *others = map(_names_within, wrapped) if wrapped else [({}, False)]
    same = all(other == first for other in others)
    return (first[0], first[1] and bool(_parts(dataset))) if same else ({}, False)


def own_names(dataset: Any) -> dict[int, str]:
    """Return the name of each class by the number of its label; empty if this is not certain.

    The attribute ``class_to_idx`` says it, before ``target_transform``, which must keep the classes
    apart; without it, the order of the attribute ``classes`` or of the names in Hugging Face's
    column ``label`` or ``labels``.
    """
    numbered = getattr(dataset, "class_to_idx", None)
    if not isinstance(numbered, Mapping):
        features = getattr(dataset, "features", None)
        columns = features if isinstance(features, Mapping) else {}
        column = columns.get("label", columns.get("labels"))
        named = (getattr(dataset, "classes", None), getattr(column, "names", None))
        lists = (names for names in named if isinstance(names, list | tuple | np.ndarray))
        return dict(enumerate(map(str, next(lists, ()))))
    transform = getattr(dataset, "target_transform", None) or (lambda number: number)
    try:
        with same_random_numbers():
            labels, again = ([int(transform(n)) for n in numbered.values()] for _ in range(2))
    except Exception:  # Whatever a user's own function raises.
        return {}
    if labels != again or len(set(labels)) < len(labels):
        return {}
    return {label: str(name) for label, name in zip(labels, numbered, strict=True) if label >= 0}


def unambiguous(classes: Sequence[str]) -> list[str]:
    """Return names by which a table of labels can be read.

    A class whose name another one has, or that is named like the word ``drop``, which leaves a
    sample out, is named by its number. If this is the name of another class, all are named so.
    """
    times = Counter(classes)
    clear = [
        str(number) if times[name] > 1 or name == "drop" else name
        for number, name in enumerate(classes)
    ]
    return clear if len(set(clear)) == len(clear) else [str(i) for i in range(len(classes))]


def keys_of(dataset: Any) -> list[str] | None:
    """Return what names each sample, if a data set says it.

    That is its attribute ``keys``, or the path of each file below the folder of torchvision's
    ``ImageFolder``. Wrappers that keep the items have the keys of what they wrap, if these are one
    for each sample and all different.
    """
    found = _of_each_sample(dataset, _keys_or_paths)
    given = _own_keys(dataset) is not None
    return found if given or found is None or len(set(found)) == len(found) else None


def _own_keys(dataset: Any) -> list[str] | None:
    keys = getattr(dataset, "keys", None)
    if callable(keys) or isinstance(keys, str) or not hasattr(keys, "__len__"):
        return None  # Such as the method of a dict.
    return list(map(str, values_of(keys)))


def _keys_or_paths(dataset: Any) -> list[str] | None:
    own = _own_keys(dataset)
    samples, root = (getattr(dataset, name, None) for name in ("samples", "root"))
    if own is not None or not (isinstance(samples, list) and isinstance(root, str | os.PathLike)):
        return own
    folder = os.path.join(os.fspath(root), "")
    paths = [str(sample[0]) for sample in samples if isinstance(sample, tuple)]
    if len(paths) < len(samples) or not all(path.startswith(folder) for path in paths):
        return None
    return [path[len(folder) :].replace(os.sep, "/") for path in paths]


def _parts(dataset: Any) -> list[Any]:
    """Return the data sets whose items, or some of them, a wrapper has; none if it is no such."""
    if isinstance(dataset, ConcatDataset):
        return list(dataset.datasets)
    # The class ``Indexed`` says it of itself, because it cannot be imported here.
    keeps = isinstance(dataset, Subset) or getattr(type(dataset), "is_indexed", False)
    return [dataset.dataset] if keeps else []


def _of_each_sample(dataset: Any, read: Callable[[Any], Any]) -> Any:
    """Return what ``read`` finds in a data set or, for each sample, in those that it wraps.

    None if it finds nothing, or not one value for each sample of a wrapped data set.
    """
    found, parts = read(dataset), _parts(dataset)
    if found is not None or not parts:
        return found
    values: list[Any] = []
    for part in parts:
        of_part = _of_each_sample(part, read)
        if not hasattr(of_part, "__len__") or len(of_part) != len(part):
            return None  # Nothing, or something else, such as the names of the classes.
        values.extend(values_of(of_part))
    return [values[i] for i in dataset.indices] if isinstance(dataset, Subset) else values


def labels_of(dataset: Any) -> npt.NDArray[np.int64] | None:
    """Return the class of each sample, int64, shape (N,), as the data set gives it.

    This is the attribute ``targets`` or ``labels``, as in the data sets of torchvision, whose
    ``target_transform`` is applied; or the second of two tensors of a ``TensorDataset``. Wrappers
    that keep the items have those of what they wrap. None if no whole numbers are given, or others
    each time, as by a random ``target_transform``.

    Raises:
        InputError: The attribute ``samples`` of a data set has other labels than ``targets``.
    """
    try:
        with same_random_numbers():
            given, again = (_of_each_sample(dataset, _own_labels) for _ in range(2))
        if np.ndim(given[0]):  # Such as masks, which are many numbers.
            return None
        labels = np.asarray(given)
        same = again is given or np.array_equal(labels, np.asarray(again))
    except InputError:
        raise
    except Exception:  # Whatever a user's own function raises; ragged; on another device.
        return None
    whole_numbers = labels.dtype.kind in "iu" and labels.shape == (len(dataset),)
    return labels.astype(np.int64) if whole_numbers and same else None


def _own_labels(dataset: Any) -> Any:
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[1].cpu() if len(dataset.tensors) == 2 else None
    found = (getattr(dataset, attribute, None) for attribute in ("targets", "labels"))
    given = next((labels for labels in found if labels is not None), None)
    _check_samples(dataset, given)
    transform = getattr(dataset, "target_transform", None)
    if given is None or transform is None:
        return given
    # A data set gives it a number of Python, also if all are in one array.
    return [transform(target) for target in values_of(given)]


def _check_samples(dataset: Any, given: Any) -> None:
    """Raise InputError if the pairs (path, label) of an ``ImageFolder`` have other labels."""
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list) or not isinstance(given, list | np.ndarray | torch.Tensor):
        return
    listed = [pair[1] for pair in samples if isinstance(pair, tuple) and len(pair) == 2]
    values = list(values_of(given))
    numbers = all(isinstance(label, int) for label in (*listed, *values))
    if numbers and len(listed) == len(samples) and listed != values:
        raise InputError(
            "expected the attributes samples and targets of the data set to give the same labels, "
            "got different ones: set dataset.targets = [label for _, label in dataset.samples]"
        )


def values_of(given: Any) -> Any:
    """Return Python's values of an array, a tensor or a column; other collections as they are."""
    return given.tolist() if hasattr(given, "tolist") else given
