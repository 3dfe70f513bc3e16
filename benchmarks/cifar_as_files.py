"""Write the images of CIFAR-10 as image files or tar shards, for recipes/images.toml.

    python benchmarks/cifar_as_files.py data data/cifar10-files
    python benchmarks/cifar_as_files.py data data/cifar10-shards --jpeg --shards 8

The first folder contains the CIFAR archive or its files, and the second one is written. Without
``--shards``, there is one folder per class. JPEG files differ a little from the original images.
"""

import argparse
import io
import itertools
import tarfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from fineprune.datasets.cifar import load_cifar10
from fineprune.datasets.image_set import ImageSet


def encoded(images: ImageSet, kind: str) -> Iterator[tuple[str, bytes]]:
    """Yield the class of each image and the bytes of its file."""
    pixels = images.images.permute(0, 2, 3, 1).numpy()
    for image, label in zip(pixels, images.labels.tolist(), strict=True):
        file = io.BytesIO()
        Image.fromarray(image).save(file, kind, quality=95)  # PNG ignores the quality.
        yield images.classes[label], file.getvalue()


def write_folders(images: ImageSet, kind: str, folder: Path) -> None:
    for name in images.classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, (name, content) in enumerate(encoded(images, kind)):
        (folder / name / f"{number:05}.{suffix(kind)}").write_bytes(content)


def write_shards(images: ImageSet, kind: str, folder: Path, shards: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    each = -(-len(images) // shards)
    samples = enumerate(encoded(images, kind))
    for shard in range(-(-len(images) // each)):
        with tarfile.open(folder / f"shard-{shard:04}.tar", "w") as archive:
            for number, (name, content) in itertools.islice(samples, each):
                for extension, text in ((suffix(kind), content), ("cls", name.encode())):
                    member = tarfile.TarInfo(f"{number:05}.{extension}")
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text))


def suffix(kind: str) -> str:
    return "jpg" if kind == "JPEG" else "png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="the folder of CIFAR-10")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--jpeg", action="store_true", help="JPEG instead of PNG files")
    parser.add_argument("--shards", type=int, help="write so many tar files for each set")
    options = parser.parse_args()
    kind = "JPEG" if options.jpeg else "PNG"
    for images, name in zip(load_cifar10(options.source), ("train", "test"), strict=True):
        if options.shards:
            write_shards(images, kind, options.out / name, options.shards)
        else:
            write_folders(images, kind, options.out / name)


if __name__ == "__main__":
    main()
