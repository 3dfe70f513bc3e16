"""CIFAR-10 and CIFAR-100 in their official binary layout.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), and the page
https://www.cs.toronto.edu/~kriz/cifar.html, which prints the layout and the digests.
"""

import hashlib
import http.client
import secrets
import shutil
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any, BinaryIO
from urllib.parse import urlsplit

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fineprune.datasets.image_set import ImageSet
from fineprune.errors import InputError

_CHANNELS, _SIDE = 3, 32
_PIXEL_BYTES = _CHANNELS * _SIDE * _SIDE
_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class CifarArchive:
    """What one published archive holds.

    Attributes:
        name: how people call it.
        url: where it is published; https only.
        md5: its published digest, in hexadecimal.
        folder: the folder inside it.
        train: name and number of records of each training file.
        test: likewise for testing.
        labels: the number of values of each label byte in front of a record's 3,072 pixel bytes
            (channel by channel, row by row); the last of them is the class.
        names: the file with the classes' names, one a line.
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
        """The archive's own file name."""
        return self.url.rpartition("/")[2]


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


def load_cifar10(
    directory: str | PathLike[str], download: bool = False
) -> tuple[ImageSet, ImageSet]:
    """Load CIFAR-10: 50,000 training and 10,000 test images of shape (3, 32, 32), 10 classes.

    ``load_archive`` says where the files may lie and which errors there are.
    """
    return load_archive(CIFAR10, directory, download)


def load_cifar100(
    directory: str | PathLike[str], download: bool = False
) -> tuple[ImageSet, ImageSet]:
    """Load CIFAR-100 with its 100 fine classes; the same numbers and shapes as CIFAR-10.

    ``load_archive`` says where the files may lie and which errors there are.
    """
    return load_archive(CIFAR100, directory, download)


def load_archive(
    archive: CifarArchive, directory: str | PathLike[str], download: bool = False
) -> tuple[ImageSet, ImageSet]:
    """Load what ``archive`` describes from ``directory``.

    The directory is, or holds, the archive's folder; or it holds the archive itself, which is then
    checked against its digest and unpacked beside it. With ``download`` a missing archive is
    fetched first. Nothing half-written stays behind after an error or an interrupt.

    Returns:
        (train, test).

    Raises:
        InputError: neither folder nor archive is there, or a file of the folder is missing.
        InputError: the archive does not have its digest or cannot be unpacked, a file has another
            size, or a label is out of range.
        ConnectionError: the download failed.
    """
    folder = _folder(archive, Path(directory), download)
    classes = _class_names(archive, folder)
    return (
        _read(archive, folder, archive.train, classes),
        _read(archive, folder, archive.test, classes),
    )


def _folder(archive: CifarArchive, directory: Path, download: bool) -> Path:
    if (directory / archive.train[0][0]).is_file():
        return directory
    folder = directory / archive.folder
    if folder.is_dir():
        return folder
    packed = directory / archive.file
    if packed.is_file():
        with packed.open("rb") as stream:
            digest = hashlib.file_digest(stream, _md5).hexdigest()
        _check_digest(archive, digest, f"{packed}: delete it and download it again")
    elif download:
        _download(archive, directory)
    else:
        raise InputError(
            f"expected {archive.name} as {archive.folder} or {archive.file} in {directory}, found "
            f"neither: put {archive.url} there, or set data.download = true (in Python: "
            f"download=True)"
        )
    _unpack(archive, packed)
    return folder


def _download(archive: CifarArchive, directory: Path) -> None:
    _require_https(archive.url)
    directory.mkdir(parents=True, exist_ok=True)
    opener = urllib.request.build_opener(_HttpsRedirects)
    try:
        with opener.open(archive.url, timeout=_TIMEOUT_SECONDS) as response:
            length = response.headers.get("Content-Length")
            save_download(archive, directory, response, None if length is None else int(length))
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(
            f"expected to download {archive.url} to {directory}, got {error!r}: "
            f"try again, or put {archive.file} there yourself"
        ) from error


def save_download(
    archive: CifarArchive, directory: Path, stream: BinaryIO, size: int | None
) -> Path:
    """Write an archive's bytes into ``directory`` under its own name, all of them or nothing.

    Args:
        archive: what the bytes should be.
        directory: an existing directory.
        stream: the bytes, read to the end.
        size: how many bytes to expect, where that is known.

    Returns:
        The written file.

    Raises:
        InputError: the stream ended early or late, or its bytes have another digest.
    """
    digest = _md5()
    received = 0
    with _temporary(directory, archive.file) as partial:
        with partial.open("xb") as file, _progress(archive, size) as progress:
            for chunk in iter(lambda: stream.read(_CHUNK), b""):
                file.write(chunk)
                digest.update(chunk)
                received += len(chunk)
                progress.update(progress.task_ids[0], completed=received)
        if size is not None and received != size:
            raise InputError(
                f"expected {size} bytes of {archive.url}, got {received}: download it again"
            )
        _check_digest(archive, digest.hexdigest(), f"{archive.url}: download it again")
        return partial.replace(directory / archive.file)


def _unpack(archive: CifarArchive, packed: Path) -> None:
    target = packed.parent / archive.folder
    with _temporary(packed.parent, archive.folder) as partial:
        partial.mkdir()
        try:
            with tarfile.open(packed, "r:gz") as tar:
                tar.extractall(partial, filter="data")
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            raise InputError(
                f"expected a whole tar.gz archive in {packed}, got {error!r} while unpacking it: "
                "see that the disk has room, or delete the archive and download it again"
            ) from error
        if not (partial / archive.folder).is_dir():
            raise InputError(
                f"expected a folder {archive.folder} inside {packed}, found none: "
                "delete the archive and download it again"
            )
        try:
            (partial / archive.folder).rename(target)
        except OSError:
            # Several processes may start on one directory at once; the first one's folder is as
            # good as ours.
            if not target.is_dir():
                raise


def _read(
    archive: CifarArchive,
    folder: Path,
    files: tuple[tuple[str, int], ...],
    classes: tuple[str, ...],
) -> ImageSet:
    label_bytes = len(archive.labels)
    images, labels = [], []
    for name, count in files:
        path = folder / name
        if not path.is_file():
            raise InputError(
                f"expected {archive.name} file {name} in {folder}, found none: "
                f"delete the folder and unpack {archive.file} again"
            )
        expected = count * (label_bytes + _PIXEL_BYTES)
        given = path.stat().st_size
        if given != expected:
            raise InputError(
                f"expected {expected} bytes in {path}, got {given}: "
                f"delete the folder and unpack {archive.file} again"
            )
        records = np.fromfile(path, dtype=np.uint8).reshape(count, label_bytes + _PIXEL_BYTES)
        for column, values in enumerate(archive.labels):
            wrong = np.flatnonzero(records[:, column] >= values)
            if len(wrong):
                raise InputError(
                    f"expected labels 0..{values - 1} in {path}, got {records[wrong[0], column]} "
                    f"in record {wrong[0]} (the first is 0), label byte {column}: "
                    f"delete the folder and unpack {archive.file} again"
                )
        images.append(records[:, label_bytes:])
        labels.append(records[:, label_bytes - 1].astype(np.int64))
    pixels = np.concatenate(images).reshape(-1, _CHANNELS, _SIDE, _SIDE)
    return ImageSet(torch.from_numpy(pixels), torch.from_numpy(np.concatenate(labels)), classes)


def _class_names(archive: CifarArchive, folder: Path) -> tuple[str, ...]:
    count = archive.labels[-1]
    path = folder / archive.names
    if not path.is_file():
        return tuple(str(number) for number in range(count))
    names = tuple(path.read_text(encoding="utf-8").split())
    if len(names) != count:
        raise InputError(
            f"expected {count} class names in {path}, got {len(names)}: "
            "delete the file to number the classes instead"
        )
    return names


class _HttpsRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        _require_https(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_https(url: str) -> None:
    if urlsplit(url).scheme != "https":
        raise InputError(f"expected an https address to download from, got {url}: use https only")


def _check_digest(archive: CifarArchive, digest: str, place: str) -> None:
    if digest != archive.md5:
        raise InputError(f"expected MD5 {archive.md5}, got {digest} for {place}")


def _md5() -> Any:
    # The digest that is published; where policy forbids MD5 for security this use is still allowed.
    return hashlib.md5(usedforsecurity=False)


@contextmanager
def _temporary(directory: Path, name: str) -> Iterator[Path]:
    """Give a name in ``directory`` for something unfinished, and remove what is left of it."""
    path = directory / f".{name}.{secrets.token_hex(8)}.part"
    try:
        yield path
    finally:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def _progress(archive: CifarArchive, size: int | None) -> Iterator[Progress]:
    """Show a bar on a terminal and one plain line elsewhere, on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"downloading {archive.url}", soft_wrap=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        progress.add_task(f"downloading {archive.name}", total=size)
        yield progress
