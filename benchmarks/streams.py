"""Time of a pass over tar shards in which 30 % of the samples are skipped, beside a full pass.

    python benchmarks/streams.py

The samples are JPEG images. Four kinds of passes take turns in one process, so that other work on
the machine slows all of them down equally: a full one, one that skips before decoding, one that
skips after decoding, and one that reads and numbers the kept samples without decoding any.
"""

import argparse
import io
import json
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import fineprune as fp
from fineprune.streams import KeyIndex, PrunedStream
from fineprune.training.hardware import describe

SKIPPED = 0.3
SHARD_SIZE = 50
BATCH = 10


class KeepSome(fp.FullData):
    """Keeps a random part of the samples in every epoch."""

    def num_kept(self, epoch: int) -> int:
        return int(super().num_kept(epoch) * (1 - SKIPPED))

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> fp.EpochPlan:
        total = super().num_kept(epoch)
        kept = np.sort(rng.choice(total, num_kept, replace=False))
        return fp.EpochPlan(epoch, torch.from_numpy(kept))


def write_shards(folder: Path, images: int, size: int) -> list[str]:
    rng = np.random.default_rng(0)
    shards = []
    for first in range(0, images, SHARD_SIZE):
        shards.append(str(folder / f"{first:08}.tar"))
        with tarfile.open(shards[-1], "w") as tar:
            for place in range(first, min(first + SHARD_SIZE, images)):
                coarse = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
                content = io.BytesIO()
                coarse.resize((size, size), Image.Resampling.BICUBIC).save(content, "JPEG")
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


def read_decoded(shard: str) -> Iterator[tuple[str, np.ndarray]]:
    return ((key, decode(data)) for key, data in read(shard))


def seconds(
    policy: fp.Policy, index: KeyIndex, read: Callable[[str], Any], **options: Any
) -> float:
    pruner = fp.Pruner(len(index), policy, batch_size=BATCH)
    loader = PrunedStream(pruner, index, read, **options).loader(collate_fn=len)
    started = time.perf_counter()
    trained = sum(number for _, number in loader)
    took = time.perf_counter() - started
    assert trained == len(pruner.plan.kept)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder), options.images, options.size)
        started = time.perf_counter()
        index = KeyIndex.scan(shards, lambda shard: (key for key, _ in read(shard)))
        scan = time.perf_counter() - started
        passes: dict[str, Callable[[], float]] = {
            "full": lambda: seconds(fp.FullData(1), index, read, decode=decode),
            "skip before decoding": lambda: seconds(KeepSome(1), index, read, decode=decode),
            "skip after decoding": lambda: seconds(KeepSome(1), index, read_decoded),
            "no decoding": lambda: seconds(KeepSome(1), index, read),
        }
        rounds = [{name: run() for name, run in passes.items()} for _ in range(options.rounds)]
    medians = {name: statistics.median(one[name] for one in rounds) for name in passes}
    about = {**vars(describe("cpu", 1)), "torch": torch.__version__}
    result = {"about": about, "rounds": rounds, "medians": medians, "scan": scan}
    if options.json:
        print(json.dumps(result))
        return
    print(about, f"n = {options.rounds} passes over {options.images} images, scan {scan:.3f} s\n")
    print("| pass | seconds, median | to a full pass |\n|---|---:|---:|")
    for name, median in medians.items():
        print(f"| {name} | {median:.3f} | {median / medians['full']:.2f} |")


if __name__ == "__main__":
    main()
