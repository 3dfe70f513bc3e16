"""What a page knows of the samples of a user's data set, compared with what was recorded."""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError, warn_user
from fineprune.labels.dataset_attributes import (
    classes_of,
    keys_of,
    labels_of,
    unambiguous,
    values_of,
)
from fineprune.labels.review_page import Samples

# The names of the classes, in their order or by their numbers.
Names = Sequence[Any] | Mapping[Any, str]


class DatasetItems:
    """Returns what ``view_of`` can show of a sample, and compares its label with the recorded one.

    The recorded labels are int64, of shape (N,). ``show`` turns an item into an image or a text.
    """

    def __init__(
        self, dataset: Any, recorded: npt.NDArray[np.int64], show: Callable[[Any], Any] | None
    ) -> None:
        self._dataset = dataset
        self._recorded = recorded
        self._show = show
        self._compared = self._others = 0

    def __call__(self, index: int) -> Any:
        """Return what is shown of a sample."""
        item = self._dataset[index]
        while getattr(type(item), "is_indexed", False):  # Of ``Indexed``.
            item = item[1]
        label = _label_of(item)
        if label is not None:
            self._compared += 1
            self._others += label != self._recorded[index]
        return item if self._show is None else self._show(item)

    def warn(self) -> None:
        """Warn if samples have other labels than those that were recorded, as in another split."""
        if self._others:
            warn_user(
                f"{self._others} of {self._compared} samples on the page have another label in the "
                f"data set than was recorded: unless the training changed labels, this is another "
                f"data set or split, and the page shows the wrong samples",
                UserWarning,
            )


def _label_of(item: Any) -> int | None:
    """Return the label of a sample of a data set; None if it is not known."""
    label: Any = None
    if isinstance(item, dict):
        label = item.get("label", item.get("labels"))
    elif isinstance(item, tuple | list) and len(item) == 2:
        label = item[1]
    try:
        return operator.index(label)
    except (TypeError, ValueError):  # A tensor of several labels raises the latter.
        return None


def dataset_samples(
    recorded: npt.NDArray[np.int64],
    num_classes: int,
    dataset: Any,
    names: Names | None,
    keys: Any,
    show: DatasetItems | None,
) -> Samples:
    """Return what a page knows of the samples, of which -1 or the labels were recorded.

    The recorded labels are int64, of shape (N,); for the other arguments, see ``LabelWatch.page``.
    """
    number = len(recorded)
    if names is None:
        names = classes_of(dataset, num_classes)
    classes = unambiguous(class_names(names, num_classes))
    if keys is not None:
        keys = _as_keys(keys)
    else:
        found = keys_of(dataset)  # The attribute may be of another kind, such as of columns.
        keys = found if found is not None and len(found) == len(set(found)) == number else None
    for what, given in (("data set", dataset), ("list of keys", keys)):
        length = len(given) if hasattr(given, "__len__") else "unknown"
        if given is not None and length != number:
            raise InputError(
                f"expected a {what} of {number} samples, got one of {length}: give that of the "
                f"samples whose indices were recorded"
            )
    labels = _completed(recorded, num_classes, dataset)
    return Samples(classes, labels, keys, np.arange(number), show)


def class_names(names: Names | None, number: int) -> list[str]:
    """Return the names of so many classes in their order; their numbers if none are given."""
    if isinstance(names, str | set | frozenset):  # The keys of a dict have an order.
        raise InputError(
            f"expected the names of the classes as a list in class order, got a "
            f"{type(names).__name__}"
        )
    numbers = [str(label) for label in range(number)]
    if names is None:
        return numbers
    # A dict is such as id2label of Hugging Face, also as read from JSON.
    pairs = names.items() if isinstance(names, Mapping) else enumerate(names)
    named = {str(label): str(name) for label, name in pairs}
    if set(named) != set(numbers):
        raise InputError(
            f"expected the names of {number} classes, numbered from 0, got {len(named)}, the first "
            f"for class {next(iter(named), 'none')}: name every class once, or leave names out"
        )
    return [named[label] for label in numbers]


def _as_keys(keys: Any) -> list[str]:
    """Return a name for each sample, by position, as text."""
    if isinstance(keys, str | bytes | set | frozenset | Mapping) or not hasattr(keys, "__len__"):
        raise InputError(
            f"expected keys as a list in the order of the data set, got {type(keys).__name__}"
        )
    found = list(map(str, values_of(keys)))
    if len(set(found)) < len(found):
        twice, times = Counter(found).most_common(1)[0]
        raise InputError(
            f"expected a unique key for each sample, got {twice!r} for {times} samples: give keys "
            f"such as paths below one folder"
        )
    return found


def _completed(
    recorded: npt.NDArray[np.int64], num_classes: int, dataset: Any
) -> npt.NDArray[np.int64]:
    """Return the label of each sample, also of those not recorded if the data set gives them.

    Those that it does not give stay -1, which leaves them out of a table, with a warning.
    """
    missing = recorded < 0
    own = labels_of(dataset) if missing.any() else None
    if own is not None and np.array_equal(own[~missing], recorded[~missing]):
        recorded = np.where(missing & (own >= 0) & (own < num_classes), own, recorded)
    unknown = int(np.count_nonzero(recorded < 0))
    if unknown:
        warn_user(
            f"the label of {unknown} of {len(recorded)} samples was never recorded with a finite "
            f"loss, so the table of the page leaves them out: record each sample once, or add "
            f"their labels to the table"
        )
    return recorded
