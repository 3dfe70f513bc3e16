"""The DataLoader over a pruner's samples, and a check of options that would undo the pruning."""

import inspect
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler

from fineprune.errors import InputError, check_whole_number
from fineprune.pruning.indexed import Indexed, IndexedCollate

# What ``DataLoader`` takes but a pruned training must not change, and why.
_REFUSED = {
    "shuffle": "the pruner's sampler shuffles the samples",
    "sampler": "the pruner's sampler chooses the samples",
    "batch_sampler": "the pruner's sampler chooses the samples",
}


def check_in_order(in_order: bool) -> None:
    """Raise InputError if a loader may yield its batches in another order than the sampler's."""
    if not in_order:
        raise InputError(
            "expected in_order=True, since a resumed epoch continues in the sampler's order, got "
            "False: leave it out"
        )


class PrunedLoader(DataLoader[Any]):
    """A ``DataLoader`` that knows its pruner, and whether it is in the middle of an epoch.

    Attributes:
        pruner: The pruner that made it.
    """

    pruner: Any
    _batches: "weakref.ref[Generator[Any, None, None]] | None" = None

    def __iter__(self) -> Any:
        batches = _unfinished(super().__iter__())
        self._batches = weakref.ref(batches)
        return batches

    @property
    def is_iterating(self) -> bool:
        """Whether somebody holds an iterator that has not reached its end."""
        batches = None if self._batches is None else self._batches()
        return batches is not None and inspect.getgeneratorstate(batches) != inspect.GEN_CLOSED


def _unfinished(batches: Iterator[Any]) -> Generator[Any, None, None]:
    yield from batches


class PrunedLoaders:
    """Makes the loaders of a pruner, and remembers the last one while it is in use.

    It holds no reference to a loader. A pruner is part of reference cycles, and to stop workers
    while a cycle is collected takes torch five seconds for each of them.

    Args:
        sampler: The sampler of the pruner.
        num_samples: Number of samples N in its data set.
        batch_size: The batch size of the pruner, per rank; None if it does not know it.
        drop_last: Whether the pruner counts on a loader that drops an incomplete last batch.
    """

    def __init__(
        self, sampler: Sampler[int], num_samples: int, batch_size: int | None, drop_last: bool
    ) -> None:
        self._sampler = sampler
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._last: tuple[Indexed, dict[str, Any], weakref.ref[PrunedLoader]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which has made no loader."""
        return {**vars(self), "_last": None}

    def get(
        self,
        dataset: Any,
        *,
        batch_size: int | None,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        **options: Any,
    ) -> PrunedLoader:
        """Return the last loader if it was made with the same arguments and is still in use.

        Otherwise, and if that loader is in the middle of an epoch, return a new one. The arguments
        are those of ``Pruner.loader``.
        """
        indexed = dataset if isinstance(dataset, Indexed) else Indexed(dataset)
        if len(indexed) != self._num_samples:
            raise InputError(
                f"expected a data set of the pruner's {self._num_samples} samples, got one of "
                f"{len(indexed)}"
            )
        self._check_options(options)
        if collate_fn is not None and not isinstance(collate_fn, IndexedCollate):
            collate_fn = IndexedCollate(collate_fn)
        arguments: dict[str, Any] = {
            "persistent_workers": num_workers > 0,
            **{name: value for name, value in options.items() if name not in _REFUSED},
            "batch_size": self._checked_batch_size(batch_size),
            "drop_last": self._drop_last,
            "num_workers": num_workers,
            "collate_fn": collate_fn,
        }
        if self._last is not None:
            made_of, made_with, reference = self._last
            last = reference()
            same = made_of.dataset is indexed.dataset and made_with == arguments
            # A second iterator over a loader with persistent workers would end the first one.
            if last is not None and same and not last.is_iterating:
                return last
        loader = PrunedLoader(indexed, sampler=self._sampler, **arguments)
        self._last = indexed, arguments, weakref.ref(loader)
        return loader

    def _check_options(self, options: dict[str, Any]) -> None:
        """Raise InputError if an option of ``DataLoader`` would undo the pruning."""
        for name, why in _REFUSED.items():
            if options.get(name) not in (None, False):
                raise InputError(
                    f"expected no {name}, since {why}, got {options[name]!r}: leave it out"
                )
        if options.get("drop_last", self._drop_last) != self._drop_last:
            raise InputError(
                f"expected drop_last={self._drop_last}, as the pruner has it, got "
                f"{options['drop_last']}: give it to Pruner instead"
            )
        check_in_order(options.get("in_order", True))

    def _checked_batch_size(self, given: int | None) -> int:
        """Return the batch size of a loader, which is that of the pruner if none is given."""
        own = self._batch_size
        size = own if given is None else given
        if size is None:
            raise InputError("expected a batch size, got none: make Pruner(..., batch_size=...)")
        check_whole_number("batch_size", size, 1)
        if own is not None and size != own:
            raise InputError(
                f"expected batch_size={own}, with which the pruner plans batches and counts steps, "
                f"got {size}: give it to Pruner instead"
            )
        return size
