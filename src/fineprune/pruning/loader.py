"""The DataLoader over a pruner's samples, and a check of options that would undo the pruning."""

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


def pruned_loader(
    dataset: Any,
    sampler: Sampler[int],
    num_samples: int,
    *,
    batch_size: int | None,
    drop_last: bool,
    options: dict[str, Any],
) -> DataLoader[Any]:
    """Return a loader over the samples of a pruner.

    Args:
        dataset: The data set; None if there is none.
        sampler: The sampler of the pruner.
        num_samples: Number of samples N of the pruner.
        batch_size: The batch size of the pruner, per rank; None if it does not know it.
        drop_last: Whether the pruner counts on a loader that drops an incomplete last batch.
        options: As for ``Pruner.loader``, which has the same errors.
    """
    if dataset is None:
        raise InputError(
            f"expected a pruner that was given a data set, got one of {num_samples} samples: give "
            f"Pruner the data set, or index your own arrays with plan.kept"
        )
    indexed = dataset if isinstance(dataset, Indexed) else Indexed(dataset)
    if len(indexed) != num_samples:
        raise InputError(
            f"expected a data set of the pruner's {num_samples} samples, got one of {len(indexed)}"
        )
    for name, why in _REFUSED.items():
        given = options.pop(name, None)
        if given not in (None, False):
            raise InputError(f"expected no {name}, since {why}, got {given!r}: leave it out")
    check_in_order(options.get("in_order", True))
    size = options.get("batch_size", batch_size)
    if size is None:
        raise InputError("expected a batch size, got none: make Pruner(..., batch_size=...)")
    check_whole_number("batch_size", size, 1)
    wanted = {"batch_size": size if batch_size is None else batch_size, "drop_last": drop_last}
    for name, own in wanted.items():
        if options.get(name, own) != own:
            raise InputError(
                f"expected {name}={own}, with which the pruner plans batches and counts steps, got "
                f"{options[name]}: give it to Pruner instead"
            )
    collate_fn = options.pop("collate_fn", None)
    if not isinstance(collate_fn, IndexedCollate | None):
        collate_fn = IndexedCollate(collate_fn)
    persistent = options.get("num_workers", 0) > 0
    settings = {"persistent_workers": persistent, **options, **wanted}
    return DataLoader(indexed, sampler=sampler, collate_fn=collate_fn, **settings)
