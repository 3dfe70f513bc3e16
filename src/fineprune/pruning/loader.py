"""The DataLoader over a pruner's samples, and a check of options that would undo the pruning."""

from typing import Any

from torch.utils.data import DataLoader, Sampler

from fineprune.errors import InputError, check_whole_number
from fineprune.pruning.indexed import Indexed, IndexedCollate
from fineprune.pruning.step_counts import BatchShape

# What ``DataLoader`` takes but a pruned training must not change, and why.
_CHOSEN = dict.fromkeys(("shuffle", "sampler", "batch_sampler"), "the pruner's sampler chooses")


def check_options(options: dict[str, Any], refused: dict[str, str]) -> None:
    """Raise InputError if a loader is given what would undo the pruning; ``refused`` says why."""
    for name, why in refused.items():
        if options.get(name) not in (None, False):
            raise InputError(
                f"expected no {name}, since {why}, got {options[name]!r}: leave it out"
            )
    check_in_order(options.get("in_order", True))


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
    shape: BatchShape,
    options: dict[str, Any],
) -> DataLoader[Any]:
    """Return a loader over the samples of a pruner; see ``Pruner.loader``.

    ``shape`` has the batch size with which the loader is made, None if the pruner has none.
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
    check_options(options, _CHOSEN)
    size = options.get("batch_size", shape.batch_size)
    if size is None:
        raise InputError("expected a batch size, got none: make Pruner(..., batch_size=...)")
    check_whole_number("batch_size", size, 1)
    wanted = {"batch_size": shape.batch_size or size, "drop_last": shape.drop_last}
    for name, own in wanted.items():
        if options.get(name, own) != own:
            raise InputError(
                f"expected {name}={own}, with which the pruner plans batches and counts steps, got "
                f"{options[name]}: give it to Pruner instead"
            )
    collate_fn = options.get("collate_fn")
    if not isinstance(collate_fn, IndexedCollate | None):
        collate_fn = IndexedCollate(collate_fn)
    settings = {"persistent_workers": options.get("num_workers", 0) > 0, **options, **wanted}
    settings |= {"sampler": sampler, "collate_fn": collate_fn}
    return DataLoader(indexed, **settings)
