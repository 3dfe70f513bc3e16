"""Data: what a run trains and evaluates on, and the choices that are the same for every source."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError
from fineprune.labels.dataset_attributes import own_names
from fineprune.pruning.pruner import Pruner
from fineprune.pruning.random_streams import stream
from fineprune.runs.training_set import TrainingSet

# Evaluation keeps nothing for a backward pass, so its batches can be larger than those of training.
# On a CPU, they are smaller than on a GPU so that the activations stay in the cache. Both sizes
# divide the size of CIFAR's test set.
_EVALUATION_BATCH = {"cpu": 500, "cuda": 2000}

# The validation part is drawn from this seed instead of the run's, so that runs with different
# seeds can be compared.
FIXED_SEED = 0

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
Fetch = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Data:
    """The data that a run trains and evaluates on.

    Attributes:
        train: The first argument of ``Pruner``: the training dataset, or its number of samples.
        make_loader: Builds the training loader for a pruner; it yields ``(index, (x, y))``.
        make_fetch: Builds a function that takes the indices of a batch (int64, shape (B,)) and an
            epoch and returns ``(x, y)``. Workers of parameter servers load their batches with it.
        evaluation: The batches ``(x, y)`` to evaluate on; they can be iterated more than once.
        evaluated_on: The name of the set to evaluate on, ``test`` or ``validation``.
        num_samples: The number of training samples, N.
        labels: Returns the class of each training sample, integers, shape (N,). It raises
            InputError if the classes of user-defined data are not known.
        training_set: Returns the whole training set, of which ``train`` is a part.
        classes: The number of classes of the network to build.
        blank: Zeros with the shape (1, channels, ...) and dtype of the ``x`` of one sample, to
            build the network, and to check that it fits the data.
        wrong: Which training labels are wrong; bool, shape (N,). None if this is not known.
        labels_digest: The digest of training labels that come from a file of the user, and of
            the names of image files with their labels; None for other data.
        left_out_digest: The digest of the samples that ``data.without`` leaves; None without it.
        samples_digest: What a resumed run and the other processes of a run must find again: the
            digests of the indexes of the training images and, after a space, of the test images,
            if they are files, or the digest of user-defined data; None for other data.
        digest: Returns the digest of the data to train and evaluate on, with what ``data.without``
            leaves out; None if it is not known.
        fetch_overlaps: Whether the function that ``make_fetch`` builds may be called in another
            thread while a step is computed.
    """

    train: Any
    make_loader: Callable[[Pruner], Any]
    make_fetch: Callable[[], Fetch]
    evaluation: Batches
    evaluated_on: str
    num_samples: int
    labels: Callable[[], Any]
    training_set: Callable[[], TrainingSet]
    classes: int
    blank: torch.Tensor
    wrong: npt.NDArray[np.bool_] | None = None
    labels_digest: str | None = None
    left_out_digest: str | None = None
    samples_digest: str | None = None
    digest: Callable[[], str | None] = lambda: None
    fetch_overlaps: bool = True


def number_of_classes(train: Any, name: str, given: int | None) -> int:
    """Return the number of classes: the given one of the recipe, or else that of the training set.

    The attribute ``classes`` of the training set, if it has one, lists the classes.
    """
    listed = len(class_names(train, name))
    if given is not None and given < listed:
        raise InputError(
            f"expected network.classes to be at least {listed}, the classes of {name}, got {given}"
        )
    classes = given or listed
    if not classes:
        raise InputError(
            f"expected network.classes for {name}, whose training set has no attribute classes: "
            f"set network.classes"
        )
    if classes < 2:
        raise InputError(f"expected at least two classes in {name}, got 1: add samples of another")
    return classes


def class_names(train: Any, name: str) -> Sequence[Any]:
    """Return the names of the classes that a training set has; empty if there are none."""
    names = getattr(train, "classes", ())
    if isinstance(names, str) or not hasattr(names, "__len__"):
        raise InputError(
            f"expected the attribute classes of the training set of {name} to list the names of "
            f"the classes, got {names!r}: list them, or remove it and set network.classes"
        )
    named = own_names(train)  # By number, in which a class may be missing.
    return [named.get(label, str(label)) for label in range(max(named, default=len(names) - 1) + 1)]


def evaluation_batch(device: str) -> int:
    """Return the number of samples per evaluation batch of data that fit into memory."""
    return _EVALUATION_BATCH.get(device.partition(":")[0], 500)


def split(num_samples: int, validation: int) -> tuple[Any, Any]:
    """Return the indices of the samples to train on, and of those held out for validation."""
    if validation >= num_samples:
        raise InputError(
            f"expected data.validation to be below {num_samples}, the number of training samples, "
            f"got {validation}"
        )
    order = stream(FIXED_SEED, 0, "validation").permutation(num_samples)
    return np.sort(order[validation:]), np.sort(order[:validation])
