"""Indexed: a data set whose items come with their indices and are otherwise unchanged."""

from collections.abc import Callable, Sequence, Sized
from typing import Any, cast

from torch.utils.data import Dataset, IterableDataset, default_collate


class Indexed(Dataset[tuple[int, Any]]):
    """A map-style data set whose items are ``(index, item)``.

    The index assigns a loss to its sample. The position of the sampler could not, because loaders
    fetch batches in advance. The items themselves (tuples, dicts, tensors) are unchanged.

    Args:
        dataset: Any map-style data set, for example a ``Subset``. The indices refer to this data
            set.

    Raises:
        TypeError: The data set is iterable-style or has no length.
    """

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            raise TypeError(
                f"expected a map-style data set with __getitem__ and __len__, got "
                f"{type(dataset).__name__}: the samples of a stream have no indices"
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: int) -> tuple[int, Any]:
        index = int(index)
        if index < 0:
            index += len(self)
        return index, self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, Any]]:
        """Fetch a whole batch, with the data set's own ``__getitems__`` if it has one."""
        wanted = [int(index) for index in indices]
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is None:
            return [self[index] for index in wanted]
        return list(zip(wanted, fetch(wanted), strict=True))


class IndexedCollate:
    """Adapts the user's collate function to an ``Indexed`` data set.

    The function receives the items without their indices. Each batch is
    ``(index, collate_fn(items))``, where ``index`` is an int64 tensor of shape (B,).

    Args:
        collate_fn: The user's function, which receives a list of items.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, batch: Sequence[tuple[int, Any]]) -> tuple[Any, Any]:
        """Return the indices and the collated items of a list of ``(index, item)`` pairs."""
        indices = default_collate([index for index, _ in batch])
        return indices, self.collate_fn([item for _, item in batch])
