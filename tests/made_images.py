"""Small image files of two classes, which a network can tell apart."""

import io
import tarfile

import numpy as np
from PIL import Image

CLASSES = ("bright", "dark")


def pixels(index, width=40, height=32):
    """Return noise that is bright for an even index and dark for an odd one."""
    rng = np.random.default_rng(index)
    noise = rng.integers(0, 90, (height, width, 3), dtype=np.uint8)
    return noise + np.uint8(150 if index % 2 == 0 else 10)


def encoded(image, kind="JPEG", **options):
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind, **options)
    return file.getvalue()


def image_bytes(index):
    """Return one of four sizes and three formats."""
    kind = ("JPEG", "JPEG", "PNG", "WEBP")[index % 4]
    return encoded(pixels(index, 36 + index % 4, 30 + index % 5), kind), f".{kind.lower()}"


def write_folder(root, images):
    """Write one folder per class; image i is in the class ``CLASSES[i % 2]``."""
    for index in range(images):
        content, suffix = image_bytes(index)
        path = root / CLASSES[index % 2] / f"{index:04}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def break_files(folder, *, missing=True):
    """Break training images in different ways, and return them; ``missing`` also removes one."""
    names = [folder / "train" / CLASSES[i % 2] / f"{i:04}.jpeg" for i in (0, 1, 4, 5)]
    names[0].write_bytes(names[0].read_bytes()[:300])
    names[1].write_bytes(b"")
    names[2].write_bytes(b"%PDF-1.7 no image")
    if missing:
        names[3].unlink()
    return names


def write_shards(folder, images, shards=2, extra=()):
    """Write tar shards; each sample also has the members ``extra``, which are ignored."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        with tarfile.open(folder / f"train-{shard:03}.tar", "w") as archive:
            for index in range(shard, images, shards):
                content, suffix = image_bytes(index)
                add(archive, f"{index:04}{suffix}", content)
                add(archive, f"{index:04}.cls", CLASSES[index % 2].encode())
                for name in extra:
                    add(archive, f"{index:04}.{name}", b"{}")
    return folder


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mtime = 1.5  # Not a whole number, which needs an extended header, as WebDataset writes.
    archive.addfile(member, io.BytesIO(content))
