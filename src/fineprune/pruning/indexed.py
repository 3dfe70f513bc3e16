"""Indexed: every item of a data set together with its index, and nothing else changed."""

from collections.abc import Callable, Sequence, Sized
from typing import Any, cast

from torch.utils.data import Dataset, IterableDataset, default_collate


class Indexed(Dataset[tuple[int, Any]]):
    """A map-style data set whose items are ``(index, item)``.

    The index is what ties a loss to its sample: a sampler's position cannot, because loaders
    prefetch. Items pass unchanged, whatever they are (tuples, dicts, tensors).

    Args:
        dataset: any map-style data set, a ``Subset`` too; the indices are those of this data set.

    Raises:
        TypeError: the data set is iterable-style or has no length.
    """

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            raise TypeError(
                f"expected a map-style data set with __getitem__ and __len__, got "
                f"{type(dataset).__name__}: samples of a stream cannot be told apart"
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
        """Fetch a batch at once, as the data set itself does where it can."""
        wanted = [int(index) for index in indices]
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is None:
            return [self[index] for index in wanted]
        return list(zip(wanted, fetch(wanted), strict=True))


class IndexedCollate:
    """Let a collate function that knows nothing of indices work on an ``Indexed`` data set.

    It gets the items alone; the indices travel past it. Batches become
    ``(index, collate_fn(items))`` with ``index`` int64 of shape (B,).

    Args:
        collate_fn: the user's own function of a list of items.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, batch: Sequence[tuple[int, Any]]) -> tuple[Any, Any]:
        """Return the indices and the collated items of a list of ``(index, item)``."""
        indices = default_collate([index for index, _ in batch])
        return indices, self.collate_fn([item for _, item in batch])
