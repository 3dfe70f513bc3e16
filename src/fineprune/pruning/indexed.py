"""Indexed: a data set whose items come with their indices and are otherwise unchanged."""

import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fineprune.errors import InputError, check_whole_number

# A list of more arrays is taken for one of samples.
_MOST_COLUMNS = 3


class IndexedItem(tuple[Any, Any]):
    """The pair ``(index, item)``, of a type of its own, so that collate functions recognise it."""

    __slots__ = ()
    is_indexed = True  # For ``fineprune.labels``, which cannot import these types.


def _advice(dataset: Any) -> str | None:
    """Return what to give instead of what is no map-style data set; None if it is one."""
    if isinstance(dataset, DataLoader):
        return "give loader.dataset, since the batches of a loader have no indices"
    is_set = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not is_set or isinstance(dataset, Mapping | IterableDataset):
        return (
            "give one data set, such as TensorDataset(x, y), or the number of samples; the samples "
            "of a stream have no indices, see fineprune.streams or, for a LabelWatch, yield the "
            "index of each sample with it"
        )
    few = isinstance(dataset, tuple | list) and len(dataset) <= _MOST_COLUMNS
    shapes = {tuple(getattr(part, "shape", ())) for part in dataset} if few else set()
    # Unlike arrays, samples have equal shapes.
    if isinstance(dataset, str) or (len(shapes) > 1 and all(shapes)):
        return "give a data set of samples, such as TensorDataset(x, y), or the number of samples"
    return None


class Indexed(Dataset[tuple[int, Any]]):
    """A map-style data set whose items are ``(index, item)``; the items themselves are unchanged.

    Other attributes, such as ``classes``, are read from and set on the data set itself, as in
    ``loader.dataset.transform = ...``.

    Args:
        dataset: Any map-style data set, for example a ``Subset``, to which the indices refer.

    Raises:
        TypeError: It is something else, such as a stream, a loader or a tuple of arrays.
    """

    is_indexed = True

    def __init__(self, dataset: Any) -> None:
        advice = _advice(dataset)
        if advice is not None:
            raise TypeError(
                f"expected a map-style data set of samples, with __getitem__ and __len__, got "
                f"{type(dataset).__name__}: {advice}"
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
        index = _whole(index)
        if index < 0:
            index = range(len(self))[index]
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
    if not isinstance(given, Integral):
        indexed = given if isinstance(given, Indexed) else Indexed(given)
    length = given if indexed is None else len(indexed)
    return indexed, check_whole_number("the number of samples", length, 1)


@dataclass(frozen=True)
class IndexedCollate:
    """Adapts a collate function to an ``Indexed`` data set.

    Each batch is ``(index, collate_fn(items))``, where ``index`` is int64 of shape (B,). Items that
    are None, such as those of files that cannot be read, are left out with their indices. Items
    without indices, as in an evaluation, are passed to the function unchanged.

    Args:
        collate_fn: Your collate function, which receives a list of items.
        key: The key of the indices in batches that are dicts, such as "index", which the function
            then returns. By default, batches are pairs.
    """

    collate_fn: Callable[[list[Any]], Any]
    key: str | None = None

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Return the indices and the collated items of a list of ``(index, item)`` pairs.

        Raises:
            InputError: All items are None; or the function returned no dict in which the ``key`` is
                free.
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
        if not isinstance(collated, MutableMapping) or self.key in collated:
            keys = list(collated) if isinstance(collated, MutableMapping) else ""
            raise InputError(
                f"expected the collate function to return a dict without {self.key!r}, the key of "
                f"the indices, got {type(collated).__name__} {keys}: give IndexedCollate another "
                f"key, or none to get (index, batch)"
            )
        collated[self.key] = indices
        return collated
