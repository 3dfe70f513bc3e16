"""Image files, which are read while the training needs them."""

import contextlib
import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.datasets.broken_files import BrokenFiles
from fineprune.datasets.image_decoder import check_decoder, has_more_bits
from fineprune.datasets.image_files import ImageFiles, View
from fineprune.datasets.image_index import ImageIndex, load_index
from fineprune.datasets.image_loader import EvaluationImages, ImageLoader, image_fetch
from fineprune.datasets.label_file import DROP_WORD
from fineprune.pruning.pruner import Pruner
from fineprune.pruning.random_streams import stream
from fineprune.runs.training_set import TrainingSet
from fineprune.training.data.run_data import (
    FIXED_SEED,
    Data,
    Fetch,
    number_of_classes,
    split,
)
from fineprune.training.data.seeded_samples import EpochIndices
from fineprune.training.left_out import left_out
from fineprune.training.recipe import Recipe
from fineprune.training.settings import DataSettings
from fineprune.training.weak_labels import WeakLabels, weak_labels

_LOGGER = logging.getLogger(__name__)


def image_files(recipe: Recipe, digest: str | None) -> Data:
    """Load the indexes of image files, which are read while they are needed."""
    settings, run = recipe.data, recipe.run
    check_decoder()
    # The settings replace None by their defaults.
    assert settings.train is not None
    assert settings.image_size is not None
    assert settings.crop is not None
    assert settings.resize is not None
    assert settings.broken_limit is not None
    limit = settings.broken_limit
    begun = iter((digest or "").split())  # Of the training images, and of the test images.
    source = Path(settings.train)
    index = load_index(source, next(begun, None)).with_numbers(recipe.network.classes, source)
    if DROP_WORD in index.classes:
        _LOGGER.warning(
            "%s has a class %r, so fineprune inspect writes no table of labels for it, since this "
            "word leaves samples out: rename the class, or remove its samples",
            *(source, DROP_WORD),
        )
    if _has_more_bits(index):
        _LOGGER.warning(
            "%s has images of more than 8 bits, of which 8 are kept: the highest of 16 or, in an "
            "image with values below 4096, of 12",
            source,
        )
    classes = number_of_classes(index, settings.train, recipe.network.classes)
    labels, kept, held_out, weak = _chosen(settings, index)
    centre = View(settings.image_size, settings.resize)
    view = replace(centre, crop=settings.crop, flip=settings.flip is not False, seed=run.seed)
    digests = [index.digest]
    if held_out is not None:
        evaluated = ImageFiles(index, index.labels[held_out], centre, held_out)
    else:
        assert settings.test is not None
        source = Path(settings.test)
        test = load_index(source, next(begun, None))
        evaluated = ImageFiles(test, test.numbered(index.classes, source), centre)
        digests.append(test.digest)
    labels_digest = index.digest
    if weak is not None and weak.digest is not None:
        labels_digest = hashlib.sha256(f"{index.digest} {weak.digest}".encode()).hexdigest()

    def training_set() -> TrainingSet:
        return TrainingSet(
            np.arange(len(index)) if kept is None else kept,
            np.array(index.labels if weak is None else weak.whole, np.int64),
            index.classes,
            index.keys(),
        )

    known = hashlib.sha256(" ".join(digests).encode()).hexdigest()
    left = left_out(settings, training_set, lambda: known)
    if left is not None:
        # From here on, ``training_set`` returns what stays.
        kept, labels = left.kept if kept is None else kept[left.kept], labels[left.kept]
        weak = None if weak is None else weak.only(left.kept)
    train = ImageFiles(index, labels, view, kept)
    broken = BrokenFiles(len(train), limit)
    options: dict[str, Any] = {"batch_size": recipe.training.batch_size, "device": run.device}

    def make_loader(pruner: Pruner) -> ImageLoader:
        return ImageLoader(
            train,
            EpochIndices(pruner.sampler),
            workers=settings.workers,
            broken=broken,
            drop_last=recipe.training.drop_last,
            **options,
        )

    def make_fetch() -> Fetch:
        return image_fetch(train, device=run.device, threads=settings.workers, broken=broken)

    return Data(
        train=len(train),
        make_loader=make_loader,
        make_fetch=make_fetch,
        evaluation=EvaluationImages(
            evaluated,
            workers=settings.workers,
            broken=BrokenFiles(len(evaluated), limit),
            **options,
        ),
        evaluated_on="test" if held_out is None else "validation",
        num_samples=len(train),
        # A copy, because torch warns of arrays that cannot be written, such as a mapped file.
        labels=lambda: np.array(labels),
        training_set=training_set,
        classes=classes,
        blank=torch.zeros(1, 3, settings.image_size, settings.image_size),
        wrong=None if weak is None else weak.wrong,
        labels_digest=labels_digest,
        left_out_digest=None if left is None else left.digest,
        samples_digest=" ".join(digests),
        digest=lambda: known,
    )


def _has_more_bits(index: ImageIndex) -> bool:
    """Look at the first and the last image, whose files may be missing."""
    for image in {0, len(index) - 1}:
        with contextlib.suppress(OSError):
            if has_more_bits(index.read(image)):
                return True
    return False


def _chosen(
    settings: DataSettings, index: ImageIndex
) -> tuple[
    npt.NDArray[np.integer],
    npt.NDArray[np.int64] | None,
    npt.NDArray[np.int64] | None,
    WeakLabels | None,
]:
    """Choose the images to train on and to hold out.

    Returns:
        The labels to train with, shape (M,); the images to train on, sorted, int64, shape (M,), or
        None for all of them; those held out for validation, or None; and where the labels come
        from, None if they are those of the data set.
    """
    kept, held_out = None, None
    if settings.validation:
        kept, held_out = split(len(index), settings.validation)
    available = len(index) if kept is None else len(kept)
    limit = settings.limited(available)
    if limit < available:
        # Not the first ones, because an index may be in the order of the classes.
        order = stream(FIXED_SEED, 0, "train_size").permutation(available)
        chosen = np.sort(order[:limit])
        kept = chosen if kept is None else kept[chosen]
    if settings.labels is None and settings.label_noise is None:
        labels = index.labels if kept is None else index.labels[kept]
        return labels, kept, held_out, None
    whole = np.arange(len(index)) if kept is None else kept
    keys = index.keys() if settings.labels is not None else None
    weak = weak_labels(settings, index.labels, index.classes, whole, keys)
    return weak.labels, weak.index, held_out, weak
