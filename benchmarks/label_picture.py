r"""Draws the first suspects of a training of ``watched_runs.py``, for the README.

    python benchmarks/label_picture.py --data DIR --run RUNS/asymmetric-1.npz \
        --out docs/images/suspects.jpg

Each image has the label that it was trained with, the class that the training suggests, and whether
the label was wrong.
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from label_ranking import CLASSES, record, recorded
from matplotlib import pyplot as plt

import fineprune as fp
from fineprune.datasets.cifar import load_cifar10

COLUMNS, ROWS, INCHES = 8, 2, 1.15
NAMES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


Labels = npt.NDArray[np.int64]


def watched(run: Path) -> tuple[fp.LabelWatch, Labels, Labels]:
    """Give what a training recorded to a watch; return it, the labels and the true labels."""
    with np.load(run) as file:
        labels, true = file["labels"], file["true"]
    watch = fp.LabelWatch(len(labels), CLASSES)
    given = torch.from_numpy(labels)
    for _, samples, logits in recorded(run):
        record(watch, samples, logits, given)
    return watch, labels, true


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the CIFAR-10 files")
    parser.add_argument("--run", type=Path, required=True, help="a file of watched_runs.py")
    parser.add_argument("--out", type=Path, required=True, help="the picture to write")
    options = parser.parse_args()
    images, _ = load_cifar10(options.data)
    watch, labels, true = watched(options.run)
    indices, _, suggestions = watch.suspects()
    size = (COLUMNS * INCHES, ROWS * (INCHES + 0.42))
    figure, axes = plt.subplots(ROWS, COLUMNS, figsize=size, dpi=130, facecolor="white")
    for axis, index, suggestion in zip(axes.flat, indices, suggestions, strict=False):
        axis.imshow(images.images[index].permute(1, 2, 0).numpy(), interpolation="bicubic")
        axis.set_axis_off()
        wrong = labels[index] != true[index]
        text = f"“{NAMES[labels[index]]}”\n{NAMES[suggestion]}?"
        axis.set_title(text, fontsize=8.5, color="#1a6e3c" if wrong else "#8a8a8a", pad=3)
    figure.tight_layout(pad=0.3, h_pad=0.6)
    figure.savefig(options.out)
    first = indices[: COLUMNS * ROWS]
    print(f"{int((labels[first] != true[first]).sum())} of {len(first)} labels are wrong")


if __name__ == "__main__":
    main()
