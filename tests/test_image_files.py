"""Training on image files: the same result with any loader, broken files, and what is read."""

import dataclasses
import functools
import importlib.util
import multiprocessing
import runpy
import shutil
import signal
import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from made_images import break_files, write_folder
from resuming import outcome, small_recipe, train_through

from fineprune.datasets.broken_files import Broken
from fineprune.datasets.image_crops import View
from fineprune.datasets.image_decoder import decode
from fineprune.datasets.image_list import ImageList, find_images
from fineprune.datasets.synthetic import make_synthetic
from fineprune.errors import InputError, RunError
from fineprune.pruning.pruner import Pruner
from fineprune.runs.files import read_metrics
from fineprune.training.data import EpochLoader, load_data
from fineprune.training.data.files import FileSource
from fineprune.training.recipe_replica import RecipeReplica
from fineprune.training.trainer import train

TRAIN, TEST = 64, 24


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    write_folder(folder / "train", TRAIN)
    write_folder(folder / "test", TEST)
    return folder


def recipe(folder, *changes):
    data = {"name": "images", "train": str(folder / "train"), "test": str(folder / "test")}
    changes = ("training.epochs=3", "training.batch_size=16", "training.evaluate_every=1", *changes)
    pruning = {"policy": "fine-pruning", "window": 3, "start": 2, "prune": 16}
    return small_recipe(*changes, data={**data, "image_size": 32}, pruning=pruning)


@pytest.fixture(scope="module")
def reference(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "reference"
    train(recipe(images), folder)
    return folder


def test_the_network_learns_the_classes(reference):
    lines = read_metrics(reference / "metrics.jsonl")
    # The mean brightness tells them apart.
    assert lines[-1]["test_accuracy"] > 0.9
    assert [line["skipped"] for line in lines] == [0, 16, 0]


@pytest.fixture
def broken(images, tmp_path, monkeypatch):
    """A copy of the images of which four were broken after they had been found."""
    shutil.copytree(images, tmp_path / "copy")
    folder = tmp_path / "copy" / "train"
    found = find_images(folder)
    names = break_files(tmp_path / "copy")
    monkeypatch.setattr(
        "fineprune.training.data.files.find_images",
        lambda source: found if source == folder else find_images(source),
    )
    return tmp_path / "copy", names


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_files_are_replaced_and_each_is_reported_once(workers, broken, tmp_path, caplog):
    folder, names = broken
    changed = recipe(folder, "data.broken_limit=0.1", f"data.workers={workers}")
    train(changed, tmp_path / "run")
    messages = sorted(
        message
        for message in (record.getMessage() for record in caplog.records)
        if message.startswith("broken image")
    )
    assert [message.split(":")[0].removeprefix("broken image ") for message in messages] == sorted(
        map(str, names)
    )
    reasons = {message.partition(": ")[2] for message in messages}
    assert len(reasons) == 4
    assert {reason for reason in reasons if "runcated" not in reason} == {
        "the file is empty",
        "no JPEG, PNG or WebP image",
        "No such file or directory",
    }
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["samples"] for line in lines] == [64, 48, 64]
    assert [line["steps"] for line in lines] == [4, 3, 4]
    assert lines[0]["broken"] == 4
    assert all(line["broken"] <= 4 for line in lines)


def test_too_many_broken_files_end_the_run(broken, tmp_path):
    folder, _ = broken
    for limit, allowed in (("0", 0), ("0.01", 1), ("0.05", 3)):
        with pytest.raises(RunError, match=rf"^[1-4] of 64 images are .* allows {allowed};"):
            train(recipe(folder, f"data.broken_limit={limit}"), tmp_path / f"run-{limit}")


def test_broken_files_of_all_ranks_count_together(images, tmp_path, monkeypatch):
    def gather(self, value):
        return [value, {0, 1}, {1, 2, 3}] if isinstance(value, set) else [value]

    monkeypatch.setattr("fineprune.distributed.all_reduce.RankGroup.gather", gather)
    with pytest.raises(RunError, match=r"^4 of 64 images .* allows 3$"):
        train(recipe(images, "data.broken_limit=0.05"), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_that_too_many_broken_files_ended_goes_on_with_a_higher_limit(broken, tmp_path):
    folder, names = broken
    content = (folder / "train" / "dark" / "0007.webp").read_bytes()
    for name in names:
        name.write_bytes(content)
    train_through(0, recipe(folder, "data.broken_limit=0"), tmp_path / "run")
    for name in names:
        name.write_bytes(b"")
    with pytest.raises(RunError):
        train(recipe(folder, "data.broken_limit=0"), tmp_path / "run", resume=True)
    train(recipe(folder, "data.broken_limit=0.1"), tmp_path / "run", resume=True)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["samples"] for line in lines] == [64, 48, 64]
    assert lines[2]["broken"] == 4


def test_a_batch_of_broken_files_ends_the_run(broken, tmp_path):
    folder, names = broken
    kept = {*names, folder / "train" / "dark" / "0003.webp"}
    for path in (folder / "train").rglob("*"):
        if path.is_file() and path not in kept:
            path.write_bytes(b"")
    changes = ("data.broken_limit=1.0", "training.batch_size=2", "pruning.policy=full")
    with pytest.raises(RunError, match="all images of a batch are broken; the last one is"):
        train(recipe(folder, *changes), tmp_path / "run")


def test_broken_test_images_are_left_out_of_the_evaluation(images, tmp_path, caplog):
    shutil.copytree(images, tmp_path / "copy")
    (tmp_path / "copy" / "test" / "dark" / "0001.jpeg").write_bytes(b"")
    data = load_data(recipe(tmp_path / "copy", "data.broken_limit=0.1"))
    for _ in range(2):
        assert sum(len(y) for _, (_, y) in data.evaluation) == TEST - 1
    assert len([record for record in caplog.records if "broken image" in record.message]) == 1


@pytest.mark.parametrize(("evaluated", "expected"), [(False, [9, 9, 9, 5, 5, 9]), (True, [9, 5])])
def test_the_next_good_sample_replaces_a_broken_one(evaluated, expected, images, monkeypatch):
    def read(self, epoch, sample):
        image = torch.full((3, 2, 2), sample, dtype=torch.uint8)
        return image if sample in (9, 5) else Broken(sample, "path", "reason")

    monkeypatch.setattr(FileSource, "read", read)
    train: Any = load_data(recipe(images)).train
    source = dataclasses.replace(train, evaluated=evaluated)
    batch = source.__getitems__([(0, sample) for sample in (7, 8, 9, 4, 5, 6)])
    assert batch.samples.tolist() == expected
    assert batch.x is not None
    assert batch.x[:, 0, 0, 0].tolist() == expected
    assert batch.y.tolist() == source.labels[expected].tolist()
    assert [file.sample for file in batch.broken] == [7, 8, 4, 6]
    nothing = source.__getitems__([(0, 7)])
    assert (nothing.x, len(nothing.y)) == (None, 0)


def pruner_of(settings, data):
    return Pruner(data.num_samples, settings.policy(), seed=0, batch_size=16)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("crop", ["random-resized", "crop"])
def test_workers_of_servers_load_the_batches_of_the_loader(threads, crop, broken):
    settings = recipe(
        broken[0], f"data.workers={threads}", f"data.crop={crop}", "data.broken_limit=0.1"
    )
    data = load_data(settings)
    pruner = pruner_of(settings, data)
    pruner.set_epoch(1)
    loader, fetch = EpochLoader(data.train, pruner.sampler, 16), data.train.open().batch
    assert len(loader) == 3
    order = pruner.sampler.order().split(16)
    for planned, (index, (x, y)) in zip(order, loader, strict=True):
        fetched = fetch(planned, 1)
        assert torch.equal(fetched[0], x)
        assert torch.equal(fetched[1], y)
        assert x.dtype == torch.float32
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert x.shape == (16, 3, 32, 32)
        assert torch.equal(torch.as_tensor(data.train.labels)[index], y)


def test_batches_are_normalised_and_cropped_as_in_their_epoch(images):
    settings = recipe(images)
    data = load_data(settings)
    pruner = pruner_of(settings, data)
    pruner.set_epoch(1)
    found = find_images(images / "train")
    view = View(32, 37, crop="random-resized", flip=True, seed=0)
    index, (x, y) = next(iter(EpochLoader(data.train, pruner.sampler, 16)))
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    for sample, image, label in zip(index.tolist(), x, y.tolist(), strict=True):
        content = found.read(sample)
        choose = functools.partial(view.choose, epoch=1, index=sample)
        bytes_ = decode(content, choose, 32)
        assert label == found.labels[sample]
        assert torch.allclose(image, (bytes_ / 255 - mean) / std, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_on_a_gpu_are_those_of_the_cpu(workers, images):
    def batches(device):
        settings = recipe(images, f"run.device={device}", f"data.workers={workers}")
        data = load_data(settings)
        return EpochLoader(data.train, pruner_of(settings, data).sampler, 16)

    before = torch.cuda.get_sync_debug_mode()
    on_gpu = []
    try:
        for index, (x, y) in batches("cuda"):
            # Later batches must not overwrite the memory of this one.
            on_gpu.append((index, x, y))
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for (index, x, y), (planned, (expected, labels)) in zip(on_gpu, batches("cpu"), strict=True):
        assert torch.equal(index, planned)
        assert torch.allclose(x.cpu(), expected, atol=1e-5)
        assert torch.equal(y.cpu(), labels)


def test_skipped_samples_are_not_read(images, tmp_path, monkeypatch):
    opened = []
    read = ImageList.read

    def counted(self, image):
        opened.append(self.name(image))
        return read(self, image)

    monkeypatch.setattr(ImageList, "read", counted)
    # Only the last epoch is evaluated.
    changes = ("training.evaluate_every=3", "training.evaluate_last=1")
    train(recipe(images, *changes), tmp_path / "run")
    training = [name for name in opened if "/train/" in name]
    assert len(opened) == len(training) + TEST
    assert len(training) == 64 + 48 + 64
    assert len(set(training[64 : 64 + 48])) == 48


def test_some_training_images_can_be_held_out(images):
    settings = recipe(images, "data.test=none", "data.validation=16", "data.train_size=40")
    data = load_data(settings)
    assert (data.num_samples, data.evaluated_on) == (40, "validation")
    assert data.train.labels is not None
    assert min(np.bincount(data.train.labels)) > 8
    assert sum(len(y) for _, (_, y) in data.evaluation) == 16
    whole = load_data(recipe(images))
    assert whole.evaluated_on == "test"
    assert (data.classes, data.blank.shape) == (2, (1, 3, 32, 32))
    with pytest.raises(InputError, match="train_size to be at most 48, the training images of"):
        load_data(recipe(images, "data.validation=16", "data.train_size=49"))


def test_a_resumed_run_goes_on_with_the_images_it_began_with(images, tmp_path, reference):
    """Also if the folder has been moved, and files have come to the training and the test set."""
    shutil.copytree(images, tmp_path / "one")
    train_through(0, recipe(tmp_path / "one"), tmp_path / "run")
    for part in ("train", "test"):
        dark = tmp_path / "one" / part / "dark"
        (dark / "0000.jpeg").write_bytes((dark / "0001.jpeg").read_bytes())
    (tmp_path / "one").rename(tmp_path / "two")
    train(recipe(tmp_path / "two"), tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(reference)


def test_an_image_that_has_gone_since_a_run_began_is_broken(images, tmp_path):
    shutil.copytree(images, tmp_path / "copy")
    changed = recipe(tmp_path / "copy", "data.broken_limit=0.1")
    train_through(0, changed, tmp_path / "run")
    (tmp_path / "copy/train/dark/0001.jpeg").unlink()
    train(changed, tmp_path / "run", resume=True)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["samples"] for line in lines] == [64, 48, 64]
    assert [lines[0]["broken"], lines[2]["broken"]] == [0, 1]


def test_a_run_without_its_list_goes_on_only_with_the_same_images(images, tmp_path):
    shutil.copytree(images, tmp_path / "copy")
    changed = recipe(tmp_path / "copy")
    train_through(0, changed, tmp_path / "run")
    for part in ("train", "test"):
        (tmp_path / f"run/{part}-images.npz").unlink()
    image = tmp_path / "copy/train/dark/0001.jpeg"
    image.rename(image.with_name("another.jpeg"))
    with pytest.raises(InputError, match="the data with which the run began, got different ones"):
        train(changed, tmp_path / "run", resume=True)


def test_a_worker_that_starts_later_has_the_images_of_the_run(images, tmp_path):
    shutil.copytree(images, tmp_path / "copy")
    settings, indices = recipe(tmp_path / "copy"), torch.arange(TRAIN)
    data = load_data(settings)
    (tmp_path / "run").mkdir()
    data.save(tmp_path / "run")
    made = (data.digests, tmp_path / "run")
    before = RecipeReplica(settings, 0, *made).load((0, 0), indices)
    bright = tmp_path / "copy" / "train" / "bright"
    (bright / "000.jpeg").write_bytes((bright / "0000.jpeg").read_bytes())
    after = RecipeReplica(settings, 1, *made).load((0, 0), indices)
    assert all(map(torch.equal, before, after))
    # On a machine that cannot read the folder of the run.
    with pytest.raises(InputError, match="the data with which the run began, got different ones"):
        RecipeReplica(settings, 2, data.digests, tmp_path / "elsewhere")


@pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="cannot tell who sends a signal")
def test_loader_processes_leave_signals_to_the_training(images):
    settings = recipe(images, "data.workers=2", "training.batch_size=4")
    before = multiprocessing.active_children()  # of other tests
    data = load_data(settings)
    loader = EpochLoader(data.train, pruner_of(settings, data).sampler, 4)
    batches = iter(loader)
    next(batches)
    processes = [one for one in multiprocessing.active_children() if one not in before]
    assert len(processes) == 2
    for name in ("TERM", "INT", "USR1"):
        for process in processes:
            # Not from this process, whose SIGTERM ends them.
            subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)
    assert len(list(batches)) == TRAIN // 4 - 1
    assert all(process.is_alive() for process in processes)
    processes[0].terminate()
    processes[0].join(10)
    assert processes[0].exitcode == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["data.train=none"], "expected data.train, the training images, with data.name"),
        (["data.test=none"], "expected data.test or data.validation with data.name"),
        (["data.crop=centre"], "did you mean"),
        (["data.broken_limit=2"], r"data.broken_limit to be in \[0, 1\], got 2"),
        (["data.resize=31"], "data.resize to be at least 32, the data.image_size that is cut out"),
        (["data.image_size=100000"], r"data.image_size to be in \[1, 8192\], got 100000"),
        (["data.crop_padding=4"], "data.crop_padding with data.name = digits or .* only"),
        (["data.name=digits"], "expected data.train with data.name = images only"),
    ],
)
def test_wrong_settings_are_said_in_one_line(changes, said, images):
    with pytest.raises(InputError, match=said):
        recipe(images, *changes)


def test_without_a_decoder_one_line_says_what_to_install(images, monkeypatch):
    find_spec = importlib.util.find_spec

    def without_pillow(name, *rest):
        return None if name == "PIL" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_pillow)
    with pytest.raises(InputError, match=r"pip install 'fineprune\[images\]'"):
        load_data(recipe(images))


def test_cifar_can_be_written_as_files(tmp_path):
    made, _ = make_synthetic(30, size=8)
    runpy.run_path("examples/cifar_as_files.py")["write"](made, tmp_path)
    found = find_images(tmp_path)
    assert found.classes == made.classes
    order = made.labels.argsort(stable=True)  # Folders are in the order of the classes.
    assert torch.equal(torch.from_numpy(found.labels), made.labels[order].int())
    for image, number in enumerate(order):
        pixels = decode(found.read(image), lambda w, h: View(8, 8).choose(w, h, 0, 0), 8)
        assert torch.equal(pixels, made.images[number])
