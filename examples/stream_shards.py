"""A training on tar shards in the layout of WebDataset, which skips 35 % of its steps.

The shards are written first, from the digits. Takes seconds.
"""

import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fineprune as fp
from fineprune.streams import KeyIndex, PrunedStream

EPOCHS = 12
SEED = 0
SHARD_SIZE = 80

Files = dict[str, bytes]


def write_shards(folder: Path, images: np.ndarray, labels: np.ndarray) -> list[str]:
    """Write tar files in which each sample is two files, such as 00017.npy and 00017.cls."""
    shards: list[str] = []
    for first in range(0, len(images), SHARD_SIZE):
        shard = folder / f"digits-{len(shards):03}.tar"
        with tarfile.open(shard, "w") as tar:
            for place in range(first, min(first + SHARD_SIZE, len(images))):
                image = io.BytesIO()
                np.save(image, images[place])
                label = str(labels[place]).encode()
                for ending, data in (("npy", image.getvalue()), ("cls", label)):
                    member = tarfile.TarInfo(f"{place - first:05}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        shards.append(str(shard))
    return shards


def read(shard: str) -> Iterator[tuple[str, Files]]:
    """Yield the key and the files of each sample, as bytes."""
    key, files = None, Files()
    with tarfile.open(shard) as tar:
        for member in tar:
            name, _, ending = member.name.partition(".")
            if name != key and key is not None:
                yield key, files
                files = {}
            key = name
            content = tar.extractfile(member)
            assert content is not None
            files[ending] = content.read()
    if key is not None:
        yield key, files


def keys(shard: str) -> Iterator[str]:
    with tarfile.open(shard) as tar:
        for member in tar:
            name, _, ending = member.name.partition(".")
            if ending == "cls":
                yield name


def decode(files: Files) -> tuple[torch.Tensor, int]:
    image = np.load(io.BytesIO(files["npy"]), allow_pickle=False)
    return torch.as_tensor(image, dtype=torch.float32) / 16, int(files["cls"])


def main(folder: Path) -> float:
    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(1280)
    shards = write_shards(folder, digits.data[order], digits.target[order])
    test_x = torch.tensor(digits.data[1280:], dtype=torch.float32) / 16
    test_y = torch.tensor(digits.target[1280:])

    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    index = KeyIndex.scan(shards, keys)
    policy = fp.Adaptive(EPOCHS, save=0.35)
    pruner = fp.Pruner(len(index), policy, batch_size=64, seed=SEED)
    steps = pruner.total_steps()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    pruner.set_rates(scheduler, by="steps")
    stream = PrunedStream(pruner, index, read, decode=decode, shuffle_buffer=256)
    loader = stream.loader(num_workers=1)

    for epoch in pruner.epochs():
        for number, (inputs, targets) in loader:
            logits = model(inputs)
            losses = F.cross_entropy(logits, targets, reduction="none")
            loss = pruner.record(number, losses, logits, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        print(f"epoch {epoch + 1}: {len(loader)} batches, the loss of the last is {loss:.3f}")

    with torch.no_grad():
        right = int((model(test_x).argmax(1) == test_y).sum())
    accuracy = right / len(test_y)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
