"""Indexed: a data set whose items come with their indices and are otherwise unchanged."""

import itertools
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fineprune.errors import InputError, check_whole_number

# A list of more arrays is taken for one of samples.
_MOST_COLUMNS = 3

# Of the keys of a dict, an error shows so many.
_SHOWN_KEYS = 3


class IndexedItem(tuple[Any, Any]):
    """The pair ``(index, item)``, of a type of its own, so that collate functions recognise it."""

    __slots__ = ()
    is_indexed = True  # For ``fineprune.labels``, which cannot import these types.


def _are_columns(dataset: Any) -> bool:
    """Return whether a tuple or a list has inputs and labels, rather than samples."""
    if isinstance(dataset, tuple):
        return any(hasattr(part, "shape") for part in dataset)
    if not isinstance(dataset, list) or not 2 <= len(dataset) <= _MOST_COLUMNS:
        return False
    shapes = [tuple(getattr(part, "shape", ())) for part in dataset]
    return all(shapes) and len({shape[0] for shape in shapes}) == 1 and shapes[-1] != shapes[0]


class Indexed(Dataset[tuple[int, Any]]):
    """A map-style data set whose items are ``(index, item)``.

    The index assigns a loss to its sample; the position of the sampler could not, because loaders
    prefetch batches. The items themselves (tuples, dicts, tensors) are unchanged.

    Other attributes, such as ``classes``, are read from and set on the data set itself, as in
    ``loader.dataset.transform = ...``.

    Args:
        dataset: Any map-style data set, for example a ``Subset``. The indices refer to this data
            set.

    Raises:
        TypeError: The data set is iterable-style, has no length, or is a dict with keys other than
            0 to N - 1.
    """

    is_indexed = True

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, Mapping) and set(dataset) != set(range(len(dataset))):
            shown = ", ".join(map(str, itertools.islice(dataset, _SHOWN_KEYS)))
            shown += ", ..." if len(dataset) > _SHOWN_KEYS else ""
            raise TypeError(
                f"expected a data set with items 0 to N - 1, got a dict with the keys {shown}: "
                f"give one data set, such as TensorDataset(x, y), or the number of samples"
            )
        if isinstance(dataset, str):
            raise TypeError(
                f"expected a data set, got the text {dataset!r}: give a data set that reads it, or "
                f"the number of samples"
            )
        if _are_columns(dataset):
            raise TypeError(
                f"expected a data set of samples, got a {type(dataset).__name__} of {len(dataset)} "
                f"arrays: give TensorDataset(x, y), or the number of samples"
            )
        if isinstance(dataset, DataLoader):
            raise TypeError(
                "expected a data set, got a DataLoader, whose batches have no indices: give "
                "loader.dataset"
            )
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            raise TypeError(
                f"expected a map-style data set, with __getitem__ and __len__ and not an "
                f"IterableDataset, got {type(dataset).__name__}: the samples of a stream have no "
                f"indices; see fineprune.streams or, for a LabelWatch, yield the index of each "
                f"sample with it"
            )
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        # Without the first condition, a copy that is not filled yet would ask itself for ever.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "dataset" or name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: int) -> tuple[int, Any]:
        if isinstance(index, list):  # Of a loader with a BatchSampler as its sampler.
            return IndexedItem((torch.tensor(index), self.dataset[index]))
        index = _whole(index)
        if index < 0:
            index += len(self)
            if index < 0:
                raise IndexError(f"index {index - len(self)} is out of range for {len(self)} items")
        return IndexedItem((index, self.dataset[index]))

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, Any]]:
        """Fetch a whole batch, with the data set's own ``__getitems__`` if it has one."""
        wanted = list(map(_whole, indices))
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is None:
            return [self[index] for index in wanted]
        fetched = fetch(wanted)
        items = fetched if isinstance(fetched, Mapping) else list(fetched)
        if isinstance(items, Mapping) or len(items) != len(wanted):
            raise InputError(
                f"expected one item for each of {len(wanted)} indices from __getitems__, got "
                f"a {type(fetched).__name__} of length {len(items)}: return a list of items, and "
                f"make the batch in collate_fn"
            )
        return list(map(IndexedItem, zip(wanted, items, strict=True)))


def _whole(index: Any) -> int:
    try:
        return operator.index(index)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"expected a sampler that yields the index of one sample at a time, got {index!r}: "
            f"yield whole numbers, and let the data set look up what belongs to them"
        ) from error


def indexed_and_length(dataset_or_length: Any) -> tuple[Indexed | None, int]:
    """Return a data set wrapped in ``Indexed`` and its length, or None and the length itself."""
    given = dataset_or_length
    indexed = None
    if isinstance(given, torch.Tensor) and not given.ndim:
        given = given.item()
    if not isinstance(given, Integral):
        indexed = given if isinstance(given, Indexed) else Indexed(given)
    length = given if indexed is None else len(indexed)
    return indexed, check_whole_number("the number of samples", length, 1)


@dataclass(frozen=True)
class IndexedCollate:
    """Adapts a collate function to an ``Indexed`` data set.

    The function receives the items without their indices. Without ``key``, each batch is
    ``(index, collate_fn(items))``, where ``index`` is an int64 tensor of shape (B,). With ``key``,
    the function must return a dict, and ``index`` is put into it under this key.

    Items that are None, such as those of files that cannot be read, are left out with their
    indices. Items without indices are passed to the function unchanged, so the same object works
    for training and evaluation.

    Args:
        collate_fn: Your collate function, which receives a list of items.
        key: The key of the indices in batches that are dicts, such as "index". By default, batches
            are pairs.
    """

    collate_fn: Callable[[list[Any]], Any]
    key: str | None = None

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Return the indices and the collated items of a list of ``(index, item)`` pairs.

        Raises:
            InputError: All items are None; or there is a ``key``, but the function did not return a
                dict, or its result has this key already.
        """
        if not batch or not isinstance(batch[0], IndexedItem):
            return self.collate_fn(list(batch))
        there = [pair for pair in batch if pair[1] is not None]
        if not there:
            raise InputError(
                f"expected samples in a batch, got None for all {len(batch)} of them: leave out "
                f"samples that cannot be read, such as by Subset"
            )
        indices = default_collate([index for index, _ in there])
        collated = self.collate_fn([item for _, item in there])
        if self.key is None:
            return indices, collated
        if not isinstance(collated, MutableMapping):
            raise InputError(
                f"expected the collate function to return a dict, to which {self.key!r} can be "
                f"added, got {type(collated).__name__}: leave out key to get (index, batch)"
            )
        if self.key in collated:
            raise InputError(
                f"expected a batch without {self.key!r}, which is the key of the indices, got one "
                f"with the keys {', '.join(map(str, collated))}: give IndexedCollate "
                f"another key"
            )
        collated[self.key] = indices
        return collated
