"""Write the images of CIFAR-10 as PNG files, one folder per class, for recipes/images.toml.

    python benchmarks/cifar_as_files.py data data/cifar10-files

The first folder contains the CIFAR archive or its files, and the second one is written.
"""

import sys
from pathlib import Path

from PIL import Image

from fineprune.datasets import ImageSet, load_cifar10


def write(images: ImageSet, folder: Path) -> None:
    for name in images.classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
    pixels = images.images.permute(0, 2, 3, 1).numpy()
    for number, (image, label) in enumerate(zip(pixels, images.labels.tolist(), strict=True)):
        Image.fromarray(image).save(folder / images.classes[label] / f"{number:05}.png")


def main() -> None:
    source, out = sys.argv[1], Path(sys.argv[2])
    train, test = load_cifar10(source)
    write(train, out / "train")
    write(test, out / "test")


if __name__ == "__main__":
    main()
