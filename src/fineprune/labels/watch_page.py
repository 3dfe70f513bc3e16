"""The review page of a ``LabelWatch``: its cards from the evidence and the user's data set."""

import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, warn_user
from fineprune.labels.dataset_attributes import labels_of
from fineprune.labels.evidence import Evidence
from fineprune.labels.review_page import Card, Review, review_document
from fineprune.labels.sample_view import view_of
from fineprune.writing import make_folder, replacing


def cards_of(
    evidence: Evidence,
    ranked: Sequence[Sequence[Any]],
    dataset: Any,
    keys: Sequence[str] | None,
    show: Callable[[Any], Any] | None,
) -> list[Card]:
    """Return the cards of some samples.

    Args:
        evidence: The evidence, which has been flushed.
        ranked: The indices, the scores and the suggestions of the samples.
        dataset, keys, show: As for ``LabelWatch.page``.
    """
    samples = evidence.num_samples
    for what, given in (("data set", dataset), ("list of keys", keys)):
        number = None if given is None else len(given) if hasattr(given, "__len__") else "unknown"
        if number not in (None, samples):
            raise InputError(
                f"expected a {what} of {samples} samples, got one of {number}: give that of "
                f"the samples whose indices were recorded"
            )
    items = [None if dataset is None else _item(dataset, index) for index in ranked[0]]
    shown = torch.tensor(ranked[0], dtype=torch.int64, device=evidence.labels.device)
    _compare_labels(evidence.labels[shown].tolist(), items)
    return [
        _card(evidence, index, score, suggestion, item, keys, show)
        for index, score, suggestion, item in zip(*ranked, items, strict=True)
    ]


def all_labels(
    recorded: npt.NDArray[np.int64], num_classes: int, dataset: Any
) -> npt.NDArray[np.int64]:
    """Return the label of each sample, also of those not recorded if the data set gives them.

    Those that it does not give stay -1, which leaves them out of the table, with a warning.
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


def _item(dataset: Any, index: int) -> Any:
    item = dataset[index]
    while getattr(type(item), "is_indexed", False):  # Of ``Indexed``.
        item = item[1]
    return item


def _compare_labels(recorded: Sequence[int], items: Sequence[Any]) -> None:
    """Warn if samples have other labels than those that were recorded, as in another split."""
    pairs = [
        (label, of_item)
        for label, item in zip(recorded, items, strict=True)
        if (of_item := _label_of(item)) is not None
    ]
    others = sum(label != of_item for label, of_item in pairs)
    if others:
        warn_user(
            f"{others} of {len(pairs)} samples on the page have another label in the data set than "
            f"was recorded: unless the training changed labels, this is another data set or split, "
            f"and the page shows the wrong samples",
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


def write_review(review: Review, path: str | os.PathLike[str]) -> None:
    """Write the page, with its folder. An existing file is replaced, and is never half written."""
    target = Path(path)
    # Keys may be paths with bytes that are no UTF-8.
    text = review_document(review).encode("utf-8", "backslashreplace")
    try:
        make_folder(target.parent)
        with replacing(target) as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"expected a file to write the page to, {error}") from error


def _card(
    evidence: Evidence,
    index: int,
    score: float,
    suggestion: int,
    item: Any,
    keys: Sequence[str] | None,
    show: Callable[[Any], Any] | None,
) -> Card:
    picture = text = None
    if item is not None:
        picture, text = view_of(item if show is None else show(item))
    place = torch.tensor([index], device=evidence.labels.device)
    label = evidence.labels[place].long()
    shares = evidence.shares.read(place, label)[0]
    return Card(
        index=index,
        key=None if keys is None else keys[index],
        label=int(label),
        suggestion=suggestion,
        agreement=float(shares[suggestion]),
        score=score,
        picture=picture,
        text=text,
        notes=(
            f"mean probability of the label {float(shares[int(label)]):.2f}",
            f"mean loss {float(evidence.loss[index] / evidence.visits[index].clamp(min=1)):.2f}",
            f"{int(evidence.visits[index])} visits",
        ),
    )
