"""A pass over tar shards of JPEG images in which 30 % of the samples are skipped."""

import io
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import fineprune as fp
from fineprune.streams import KeyIndex, PrunedStream

IMAGES, SHARD, BATCH, SKIPPED = 400, 50, 10, 0.3


class KeepSome(fp.FullData):
    """Keeps a random part of the samples in every epoch."""

    def lengths(self) -> list[int]:
        return [int(IMAGES * (1 - SKIPPED))] * self.epochs

    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> fp.EpochPlan:
        kept = np.sort(rng.choice(IMAGES, number, replace=False))
        return fp.EpochPlan(epoch, torch.from_numpy(kept))


def write(folder: Path) -> list[str]:
    chance = np.random.default_rng(0)
    shards = []
    for first in range(0, IMAGES, SHARD):
        shards.append(str(folder / f"{first:08}.tar"))
        with tarfile.open(shards[-1], "w") as tar:
            for place in range(first, first + SHARD):
                coarse = Image.fromarray(chance.integers(0, 256, (16, 16, 3), dtype=np.uint8))
                content = io.BytesIO()
                coarse.resize((160, 160), Image.Resampling.BICUBIC).save(content, "JPEG")
                member = tarfile.TarInfo(f"{place:08}.jpg")
                member.size = content.tell()
                content.seek(0)
                tar.addfile(member, content)
    return shards


def read(shard: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(shard) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            yield member.name, content.read()


def decode(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image)


class Pass:
    """A pass that decodes all images, and one that skips 30 % of them before decoding."""

    params = ("all", "some")
    param_names = ("trained",)
    number, repeat = 1, (3, 10, 20.0)

    def setup(self, trained: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        shards = write(self.folder)
        self.index = KeyIndex.scan(shards, lambda shard: (key for key, _ in read(shard)))

    def teardown(self, trained: str) -> None:
        shutil.rmtree(self.folder)

    def time_pass(self, trained: str) -> None:
        policy = fp.FullData(1) if trained == "all" else KeepSome(1)
        pruner = fp.Pruner(len(self.index), policy, batch_size=BATCH)
        for _ in PrunedStream(pruner, self.index, read, decode=decode).loader(collate_fn=len):
            pass
