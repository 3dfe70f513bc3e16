"""CIFAR-10 and CIFAR-100 in their official binary layout.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), and the page
https://www.cs.toronto.edu/~kriz/cifar.html, which gives the layout and the digests.
"""

import functools
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch

from fineprune.datasets.download import check_digest, fetch, file_name, unpack
from fineprune.datasets.image_set import ImageSet
from fineprune.errors import InputError

_CHANNELS, _SIDE = 3, 32
_PIXEL_BYTES = _CHANNELS * _SIDE * _SIDE


@dataclass(frozen=True)
class CifarArchive:
    """What one published archive contains.

    A record is one or two label bytes, the last of which is the class, followed by 3,072 pixel
    bytes (channel by channel, row by row).

    Attributes:
        name: The common name of the data set.
        url: The address at which the archive is published; https only.
        md5: The published digest of the archive, in hexadecimal.
        folder: The name of the folder inside the archive.
        train: The name and the number of records of each training file.
        test: The name and the number of records of each test file.
        labels: The number of values that each label byte of a record can take.
        names: The name of the file that lists the names of the classes, one per line.
    """

    name: str
    url: str
    md5: str
    folder: str
    train: tuple[tuple[str, int], ...]
    test: tuple[tuple[str, int], ...]
    labels: tuple[int, ...]
    names: str

    @property
    def file(self) -> str:
        """The file name of the archive."""
        return file_name(self.url)


CIFAR10 = CifarArchive(
    name="CIFAR-10",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    folder="cifar-10-batches-bin",
    train=tuple((f"data_batch_{number}.bin", 10_000) for number in range(1, 6)),
    test=(("test_batch.bin", 10_000),),
    labels=(10,),
    names="batches.meta.txt",
)

CIFAR100 = CifarArchive(
    name="CIFAR-100",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    folder="cifar-100-binary",
    train=(("train.bin", 50_000),),
    test=(("test.bin", 10_000),),
    labels=(20, 100),
    names="fine_label_names.txt",
)


def load_archive(
    archive: CifarArchive, directory: str | PathLike[str], download: bool = False
) -> tuple[ImageSet, ImageSet]:
    """Load the training set and the test set of an archive.

    Args:
        archive: The archive.
        directory: Its folder, or a directory that contains this folder or the archive itself, which
            is then checked against its digest and unpacked there.
        download: Whether to download the archive if the directory contains neither.
    """
    folder = _folder(archive, Path(directory), download)
    classes = _class_names(archive, folder)
    train, test = (_read(archive, folder, files) for files in (archive.train, archive.test))
    return ImageSet(*train, classes), ImageSet(*test, classes)


# Each has 50,000 training and 10,000 test images of shape (3, 32, 32).
load_cifar10 = functools.partial(load_archive, CIFAR10)
load_cifar100 = functools.partial(load_archive, CIFAR100)


def _folder(archive: CifarArchive, directory: Path, download: bool) -> Path:
    if (directory / archive.train[0][0]).is_file():
        return directory
    folder = directory / archive.folder
    if folder.is_dir():
        return folder
    packed = directory / archive.file
    if packed.is_file():
        check_digest(packed, archive.md5, f"{packed}: delete it and download it again")
    elif download:
        fetch(archive.url, archive.md5, directory)
    else:
        raise InputError(
            f"expected {archive.name} as {archive.folder} or {archive.file} in {directory}, found "
            f"neither: put {archive.url} there, or set data.download = true (in Python: "
            f"download=True)"
        )
    return unpack(packed, archive.folder)


def _read(
    archive: CifarArchive, folder: Path, files: tuple[tuple[str, int], ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and the labels of some files."""
    label_bytes = len(archive.labels)
    advice = f"delete the folder and unpack {archive.file} again"
    images, labels = [], []
    for name, count in files:
        path = folder / name
        expected = count * (label_bytes + _PIXEL_BYTES)
        if not path.is_file():
            raise InputError(
                f"expected {archive.name} file {name} in {folder}, found none: {advice}"
            )
        if (given := path.stat().st_size) != expected:
            raise InputError(f"expected {expected} bytes in {path}, got {given}: {advice}")
        records = np.fromfile(path, dtype=np.uint8).reshape(count, -1)
        for column, values in enumerate(archive.labels):
            wrong = np.flatnonzero(records[:, column] >= values)
            if len(wrong):
                raise InputError(
                    f"expected labels 0..{values - 1} in {path}, got {records[wrong[0], column]} "
                    f"in record {wrong[0]} (the first is 0), label byte {column}: {advice}"
                )
        images.append(records[:, label_bytes:])
        labels.append(records[:, label_bytes - 1].astype(np.int64))
    pixels = np.concatenate(images).reshape(-1, _CHANNELS, _SIDE, _SIDE)
    return torch.from_numpy(pixels), torch.from_numpy(np.concatenate(labels))


def _class_names(archive: CifarArchive, folder: Path) -> tuple[str, ...]:
    count = archive.labels[-1]
    path = folder / archive.names
    if not path.is_file():
        return tuple(str(number) for number in range(count))
    names = tuple(path.read_text(encoding="utf-8", errors="replace").split())
    if len(names) != count:
        raise InputError(
            f"expected {count} class names in {path}, got {len(names)}: "
            "delete the file to number the classes instead"
        )
    return names
