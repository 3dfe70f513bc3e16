"""Measures how fast image files are read, decoded, cropped and handed to a training loop.

    python benchmarks/images.py --images 600 --rounds 5 --files 1000000 --listed 10000000

The images are JPEG files of about 500 pixels that this program makes. Four questions are answered:

- How many images per second does one core prepare, compared with a plain loop around Pillow and
  with the decoder alone, which finds its bytes in memory? The three alternate, and times are those
  of the processor, so that other programs hardly matter. The results are medians of the rounds.
- Which share of its time does a training loop wait for data, if it takes half as long again as the
  loader processes need? A step is simulated by sleeping. The loop itself takes a fixed time to
  receive a batch and, on a CPU, to normalise it. This is measured with longer steps, for which each
  batch is ready in time, and is not counted as waiting.
- If the loader processes are the bottleneck, which share of the time of a sample is saved if it is
  skipped? An epoch of all images is compared with one of half of them.
- How long does it take to make the index, for files in folders, in a list and in shards, and how
  much memory does it take, if several processes use it?
"""

import argparse
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Sampler

from fineprune.datasets.broken_files import BrokenFiles
from fineprune.datasets.image_crops import random_resized_crop
from fineprune.datasets.image_decoder import decode
from fineprune.datasets.image_files import ImageFiles, View, collate_replacing
from fineprune.datasets.image_index import load_index
from fineprune.datasets.image_loader import ImageLoader
from fineprune.training.hardware import describe

SIZE, CLASSES = 224, 10

# Maps a finished index, reads all of it in several processes, and prints what they take: the part
# of each process in all memory that it uses (PSS, in which a page of k processes counts 1/k), and
# its private memory that belongs to no file. Both are differences to the time before.
MEMORY = """
import json, os, sys
from pathlib import Path
import numpy as np
from fineprune.datasets.image_index import load_index

def used():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    fields = dict(line.split()[:2] for line in lines[1:])
    return [int(fields[name + ":"]) * 1024 for name in ("Pss", "Anonymous")]

def told(pipe, text):
    os.write(pipe, text.encode())

processes = int(sys.argv[2])
results = []
ready_in, ready_out = os.pipe()
go_in, go_out = os.pipe()
end_in, end_out = os.pipe()  # not the same one: a fast process would take what another waits for
children = []
for _ in range(processes):
    said_in, said_out = os.pipe()
    if not os.fork():
        before = used()
        index = load_index(Path(sys.argv[1]))
        total = sum(int(np.asarray(array).sum()) for array in index._arrays.values())
        told(ready_out, "x")
        os.read(go_in, 1)  # All processes measure while all of them have the index.
        told(said_out, json.dumps([b - a for a, b in zip(before, used())]))
        os.read(end_in, 1)
        os._exit(0)
    children.append(said_in)
for _ in range(processes):
    os.read(ready_in, 1)
told(go_out, "x" * processes)
results = [json.loads(os.read(child, 1000)) for child in children]
told(end_out, "x" * processes)
print(json.dumps([max(values) for values in zip(*results)]))
"""


def make_images(folder: Path, images: int) -> None:
    """Write JPEG files of 500 x 375 and 375 x 500 pixels, about 80 kB each, with some noise."""
    rng = np.random.default_rng(0)
    for number in range(images):
        width, height = (375, 500) if number % 4 == 0 else (500, 375)
        coarse = rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noisy = np.asarray(image) + rng.normal(0, 8, (height, width, 1))
        path = folder / f"class-{number % CLASSES}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def plain(content: bytes, key: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """Prepare an image as a plain loop does: with Pillow alone."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    left, top, width, height, flip = random_resized_crop(*image.size, key=key, flip=True)
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(image)


def decoding(samples: ImageFiles, rounds: int, batch: int) -> dict[str, Any]:
    """Return the milliseconds per image of one core, and how the three ways compare."""
    contents = [samples.index.read(i) for i in range(len(samples))]
    epoch = 0

    def with_pillow() -> None:
        for number in range(len(samples)):
            plain(samples.index.read(number), (0, epoch, number))

    def decoder() -> None:
        for number, content in enumerate(contents):
            key = (0, epoch, number)

            def choose(width: int, height: int, key: tuple[int, int, int] = key) -> Any:
                return random_resized_crop(width, height, key=key, flip=True)

            decode(content, choose, SIZE)

    def pipeline() -> None:
        for first in range(0, len(samples), batch):
            last = min(first + batch, len(samples))
            collate_replacing([samples[epoch, number] for number in range(first, last)])

    ways = {"plain": with_pillow, "decoder": decoder, "pipeline": pipeline}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for epoch in range(rounds + 1):
        for name, way in ways.items():
            seconds = processor_time(way)
            if epoch:  # The first round warms up.
                taken[name].append(seconds / len(samples) * 1e3)

    def speed(other: str) -> float:
        pairs = zip(taken[other], taken["pipeline"], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    medians = {name: statistics.median(times) for name, times in taken.items()}
    return {
        **{f"{name}, ms per image": value for name, value in medians.items()},
        "images per second and core": 1e3 / medians["pipeline"],
        "pipeline to plain": speed("plain"),
        "pipeline to decoder": speed("decoder"),
    }


def processor_time(way: Callable[[], None]) -> float:
    started = time.process_time()
    way()
    return time.process_time() - started


class Keys(Sampler[tuple[int, int]]):
    """The keys of the samples to load, which may be changed between two epochs."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Any:
        return ((0, sample) for sample in self.samples)


def epoch_seconds(loader: Iterable[Any], step: float) -> tuple[float, float, int]:
    """Return the seconds of an epoch whose steps sleep, those spent waiting, and its batches.

    The wait for the first batch is not counted as waiting or as time of the epoch.
    """
    batches, waited = 0, 0.0
    iterator = iter(loader)
    next(iterator)
    started = time.perf_counter()
    while True:
        time.sleep(step)
        before = time.perf_counter()
        batches += 1
        if next(iterator, None) is None:
            break
        waited += time.perf_counter() - before
    return time.perf_counter() - started, waited, batches


def loading(samples: ImageFiles, rounds: int, batch: int, workers: int) -> dict[str, Any]:
    """Return the share of time that a loop waits, and the time that skipping samples saves."""
    keys = Keys()
    loader = ImageLoader(
        samples,
        keys,
        batch_size=batch,
        device="cpu",
        workers=workers,
        broken=BrokenFiles(len(samples), 0),
    )

    def epoch(share: float, step: float) -> tuple[float, float, int]:
        # Repeated, so that an epoch has many batches, also with few files.
        keys.samples = list(range(len(samples))) * max(1, 40 * batch // len(samples))
        keys.samples = keys.samples[: math.ceil(len(keys.samples) * share)]
        return epoch_seconds(loader, step)

    epoch(1, 0)
    handed_over, waits, saved = [], [], []
    for _ in range(rounds):
        (whole, _, many), (half, _, few) = epoch(1, 0), epoch(0.5, 0)
        saved.append((1 - half / whole) / (1 - few / many))
        # If steps take three times as long as loading, each batch is ready when it is asked for.
        _, ready, batches = epoch(0.5, 3 * whole / many)
        handed_over.append(ready / batches)
        seconds, waited, batches = epoch(1, 1.5 * whole / many)
        waits.append(max(0.0, waited - batches * handed_over[-1]) / seconds)
    return {
        "receiving and normalising a batch, ms": 1e3 * statistics.median(handed_over),
        "share of time waited": statistics.median(waits),
        "saved per skipped sample": statistics.median(saved),
    }


def indexing(folder: Path, files: int, listed: int, processes: int) -> dict[str, Any]:
    """Return the seconds per million images to make the index, and the memory that it takes."""
    root = folder / "many"
    for number in range(files):
        if number % 1000 == 0:
            place = root / f"class-{number // 1000:05}"
            place.mkdir(parents=True)
        (place / f"n01440764_{number:08}.JPEG").touch()
    with (folder / "list.csv").open("w") as table:
        table.write("path,label\n")
        for number in range(listed):
            if number == 0:
                table.write("images/class-0/000000.jpg,0\n")
            else:
                table.write(f"n01440764/n01440764_{number:08}.JPEG,{number % 1000}\n")
    with tarfile.open(folder / "many.tar", "w") as archive:
        for number in range(files // 10):
            for suffix, content in (("jpg", b"x" * 1000), ("cls", b"7")):
                member = tarfile.TarInfo(f"{number:08}.{suffix}")
                member.size, member.mtime = len(content), 1.5
                archive.addfile(member, io.BytesIO(content))
    result: dict[str, Any] = {}
    for name, source in (("folders", "many"), ("list", "list.csv"), ("shard", "many.tar")):
        started, processor = time.perf_counter(), time.process_time()
        index = load_index(folder / source)
        seconds = time.perf_counter() - started, time.process_time() - processor
        result[f"{name}, s per million images"] = seconds[0] / len(index) * 1e6
        result[f"{name}, of them computing"] = seconds[1] / len(index) * 1e6
        started = time.perf_counter()
        load_index(folder / source)
        result[f"{name}, from the cache, s"] = time.perf_counter() - started
    if sys.platform == "linux":
        command = [sys.executable, "-c", MEMORY, str(folder / "list.csv"), str(processes)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        shared, private = json.loads(done.stdout)
        result[f"bytes per image and process, of {processes} (PSS)"] = shared / listed
        result["bytes per image and process, private"] = private / listed
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--files", type=int, default=20_000, help="files in folders")
    parser.add_argument("--listed", type=int, default=100_000, help="images in a list")
    parser.add_argument("--processes", type=int, default=4, help="processes that use the index")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        make_images(folder / "images", options.images)
        index = load_index(folder / "images")
        view = View(SIZE, 256, crop="random-resized", flip=True)
        samples = ImageFiles(index, index.labels, view)
        result = {
            "hardware": vars(describe("cpu", 1)),
            "decoding": decoding(samples, options.rounds, options.batch),
            "loading": loading(samples, options.rounds, options.batch, options.workers),
            "index": indexing(folder, options.files, options.listed, options.processes),
        }
    if options.json:
        print(json.dumps(result))
        return
    print(result["hardware"], torch.__version__, f"n = {options.rounds}\n")
    for part in ("decoding", "loading", "index"):
        for figure, value in result[part].items():
            print(f"| {figure} | {value:.3g} |")


if __name__ == "__main__":
    main()
