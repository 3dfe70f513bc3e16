r"""The images of CIFAR-10 as two tasks: four kinds of vehicles, and six kinds of animals.

    export PYTHONPATH=benchmarks
    fineprune train benchmarks/second-task.toml --out runs/vehicles --set \
        data.name=second_task:vehicles network.classes=4 network.weights=none training.epochs=30 \
        training.lr=0.3 training.warmup=4 pruning.policy=full pruning.save=none
    fineprune compare benchmarks/second-task.toml --out runs/animals --seeds 3 --tune

The recipe fine-tunes the network that has learned the vehicles on the animals, for three epochs
(docs/results/fine-tuning.md). Images are read from the folder ``data``.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fineprune.datasets.cifar import load_cifar10
from fineprune.datasets.image_set import ImageSet, channel_statistics
from fineprune.datasets.label_noise import symmetric_noise

VEHICLES = ("airplane", "automobile", "ship", "truck")
ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")
# The images of each task, from the first ones of its classes on.
SAMPLES = 10_000
WRONG, NOISE_SEED = 0.3, 0
PADDING = 4

Task = tuple["Images", "Images", "Images"]


class Images(Dataset[tuple[Tensor, int]]):
    """The images of some classes, which are numbered in the order of ``classes``.

    Args:
        pixels: The normalised images, float32, shape (N, 3, 32, 32).
        targets: The class of each image, int64, shape (N,).
        classes: The name of each class.
        augment: Whether images are moved by up to four pixels and mirrored at random.
    """

    def __init__(
        self, pixels: Tensor, targets: NDArray[np.int64], classes: tuple[str, ...], augment: bool
    ) -> None:
        self.pixels, self.targets, self.classes, self.augment = pixels, targets, classes, augment

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.pixels[index]
        if self.augment:
            height, width = image.shape[1:]
            top, left = torch.randint(2 * PADDING + 1, (2,)).tolist()
            padded = torch.nn.functional.pad(image, (PADDING,) * 4)
            image = padded[:, top : top + height, left : left + width]
            if torch.rand(()) < 0.5:
                image = image.flip(2)
        return image, int(self.targets[index])


def vehicles() -> Task:
    """Return the training set, the test set and the training set without augmentation."""
    return task(VEHICLES, wrong=0.0)


def animals() -> Task:
    """Return the same for the animals."""
    return task(ANIMALS, wrong=0.0)


def animals_wrong() -> Task:
    """Return the same with 30 % wrong labels in the training set."""
    return task(ANIMALS, wrong=WRONG)


def task(classes: tuple[str, ...], wrong: float) -> Task:
    train, test = (of_classes(images, classes) for images in load_cifar10("data"))
    train = train.subset(torch.arange(min(SAMPLES, len(train))))
    statistics = torch.tensor(channel_statistics(train.images))
    mean, deviation = statistics.view(2, 3, 1, 1)
    targets = train.labels.numpy()
    if wrong:
        targets = symmetric_noise(targets, len(classes), wrong, NOISE_SEED)
    known, unknown = ((set_.images / 255 - mean) / deviation for set_ in (train, test))
    return (
        Images(known, targets, classes, augment=True),
        Images(unknown, test.labels.numpy(), classes, augment=False),
        Images(known, targets, classes, augment=False),
    )


def of_classes(images: ImageSet, classes: tuple[str, ...]) -> ImageSet:
    """Return the images of some classes, with labels that number these."""
    numbers = torch.full((len(images.classes),), -1)
    for number, name in enumerate(classes):
        numbers[images.classes.index(name)] = number
    labels = numbers[images.labels]
    chosen = (labels >= 0).nonzero()[:, 0]
    return ImageSet(images.images[chosen], labels[chosen], classes)
