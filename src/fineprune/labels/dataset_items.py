"""DatasetItems: the samples of a user's data set, for a page, compared with what was recorded."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fineprune.errors import warn_user


class DatasetItems:
    """Returns what ``view_of`` can show of a sample, and compares its label with the recorded one.

    Args:
        dataset: The data set: ``dataset[index]`` for each sample.
        recorded: The label of each sample as it was recorded; int64, shape (N,).
        show: Turns an item into an image or a text; None to show its first part.
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
