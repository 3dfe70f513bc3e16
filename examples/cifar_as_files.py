"""Write CIFAR-10 as image files, for recipes/images.toml: one folder per class.

    python examples/cifar_as_files.py data data/cifar10-files

The first folder contains the CIFAR archive or its files, and the second one is written.
"""

import argparse
from pathlib import Path

from PIL import Image

from fineprune.datasets.cifar import load_cifar10
from fineprune.datasets.image_set import ImageSet


def write(images: ImageSet, folder: Path) -> None:
    for name in images.classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
    pixels = images.images.permute(0, 2, 3, 1).numpy()
    for number, (image, label) in enumerate(zip(pixels, images.labels.tolist(), strict=True)):
        Image.fromarray(image).save(folder / images.classes[label] / f"{number:05}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="the folder of CIFAR-10")
    parser.add_argument("out", type=Path, help="the folder to write")
    options = parser.parse_args()
    for images, name in zip(load_cifar10(options.source), ("train", "test"), strict=True):
        write(images, options.out / name)
