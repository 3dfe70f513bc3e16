"""Image sets in memory, and batches of them that are made on the device."""

from fineprune.datasets.augment import Augment
from fineprune.datasets.cifar import load_cifar10, load_cifar100
from fineprune.datasets.device_loader import DeviceLoader, evaluation_batches
from fineprune.datasets.digits import load_digits
from fineprune.datasets.download import DownloadError
from fineprune.datasets.image_set import ImageSet, channel_statistics
from fineprune.datasets.synthetic import make_synthetic

__all__ = [
    "Augment",
    "DeviceLoader",
    "DownloadError",
    "ImageSet",
    "channel_statistics",
    "evaluation_batches",
    "load_cifar10",
    "load_cifar100",
    "load_digits",
    "make_synthetic",
]
