"""Image files: finding them, and decoding batches in this process and in loader processes."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fineprune.datasets.image_list import find_images
from fineprune.training.data import load_data
from fineprune.training.recipe import make_recipe

IMAGES, BATCH = 96, 32


def write(folder: Path) -> None:
    """Write JPEG files of 500 x 375 pixels in two classes."""
    chance = np.random.default_rng(0)
    for number in range(IMAGES):
        coarse = Image.fromarray(chance.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        path = folder / f"{number % 2}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)


class Decode:
    """All batches of an epoch at 224 x 224 pixels."""

    params = (0, 2)
    param_names = ("workers",)
    number, repeat = 1, (3, 10, 20.0)

    def setup(self, workers: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        write(self.folder)
        data = {"name": "images", "train": str(self.folder), "validation": 2, "workers": workers}
        recipe = make_recipe({"data": data, "run": {"device": "cpu"}})
        self.train = load_data(recipe).train
        self.reader = self.train.open()
        self.time_epoch(workers)  # It starts the loader processes.

    def teardown(self, workers: int) -> None:
        del self.reader
        shutil.rmtree(self.folder)

    def time_epoch(self, workers: int) -> None:
        for _ in self.reader.batches(torch.arange(len(self.train)), 0, BATCH):
            pass


class Find:
    """A list of 100,000 files, of which only the first exists."""

    number, repeat = 1, (3, 10, 20.0)

    def setup(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "0.jpg").write_bytes(b"")
        rows = "".join(f"{number}.jpg,{number % 1000}\n" for number in range(100_000))
        (self.folder / "list.csv").write_text(f"path,label\n{rows}")

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def time_list(self) -> None:
        find_images(self.folder / "list.csv")
