import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fineprune.datasets.cifar import CifarArchive, load_archive, load_cifar10, load_cifar100
from fineprune.errors import InputError

TEN = CifarArchive(
    name="tiny ten",
    url="https://example.org/tiny-ten.tar.gz",
    md5="0" * 32,
    folder="tiny-ten-bin",
    train=(("batch_1.bin", 3), ("batch_2.bin", 4)),
    test=(("test.bin", 2),),
    labels=(10,),
    names="names.txt",
)
HUNDRED = replace(
    TEN,
    name="tiny hundred",
    train=(("train.bin", 5),),
    labels=(20, 100),
)


def records_of(archive: CifarArchive, name: str, count: int) -> np.ndarray:
    """Random records: the label bytes, then 3 x 32 x 32 pixels, all uint8."""
    generator = np.random.default_rng(len(name) * 100 + count)
    columns = [generator.integers(0, values, (count, 1), np.uint8) for values in archive.labels]
    return np.hstack([*columns, generator.integers(0, 256, (count, 3072), np.uint8)])


def write_folder(archive: CifarArchive, folder: Path) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    written = {}
    for name, count in archive.train + archive.test:
        written[name] = records_of(archive, name, count)
        (folder / name).write_bytes(written[name].tobytes())
    lines = "".join(f"class_{number}\n" for number in range(archive.labels[-1]))
    (folder / archive.names).write_text(lines + "\n")
    return written


def packed(folder: Path) -> bytes:
    """Return the bytes of an archive that holds a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(folder, folder.name)
    return buffer.getvalue()


def pack(archive: CifarArchive, directory: Path) -> tuple[CifarArchive, bytes]:
    """Return the description with its true digest, and the bytes of such an archive."""
    write_folder(archive, directory / "source" / archive.folder)
    content = packed(directory / "source" / archive.folder)
    return replace(archive, md5=hashlib.md5(content).hexdigest()), content


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """An empty directory apart from where the tests make their archives."""
    directory = tmp_path / "data"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("archive", [TEN, HUNDRED])
@pytest.mark.parametrize("inside", [True, False])
def test_images_and_labels_come_back_as_written(archive, inside, data):
    folder = data / archive.folder
    written = write_folder(archive, folder)
    train, test = load_archive(archive, folder if inside else str(data))
    for part, files in ((train, archive.train), (test, archive.test)):
        records = np.concatenate([written[name] for name, _ in files])
        start = len(archive.labels)
        assert part.labels.tolist() == records[:, start - 1].tolist()
        assert part.images.dtype == torch.uint8
        assert part.images.shape == (len(records), 3, 32, 32)
        # Red, green and blue planes follow one another, each row by row.
        assert part.images[1, 2, 5, 7] == records[1, start + 2 * 1024 + 5 * 32 + 7]
        assert part.images.flatten().tolist() == records[:, start:].flatten().tolist()
        assert part.classes == tuple(f"class_{i}" for i in range(archive.labels[-1]))


def test_missing_names_are_numbers_and_a_wrong_number_of_them_is_refused(data):
    write_folder(TEN, data / TEN.folder)
    (data / TEN.folder / TEN.names).unlink()
    train, _ = load_archive(TEN, data)
    assert train.classes == tuple("0123456789")
    (data / TEN.folder / TEN.names).write_text("cat\ndog\n")
    with pytest.raises(InputError, match=r"expected 10 class names in .*got 2"):
        load_archive(TEN, data)


def test_nothing_there_says_what_to_put_where(data):
    with pytest.raises(InputError) as error:
        load_archive(TEN, data)
    message = str(error.value)
    for told in (TEN.folder, TEN.file, str(data), TEN.url, "download=True"):
        assert told in message
    with pytest.raises(InputError, match=r"cifar-10-binary.tar.gz"):
        load_cifar10(data)
    with pytest.raises(InputError, match=r"cifar-100-binary.tar.gz"):
        load_cifar100(data / "missing")
    assert names_in(data) == []


@pytest.mark.parametrize("change", [-1, 1, -3073])
def test_a_wrong_size_is_told_in_bytes_and_a_missing_file_is_named(change, data):
    write_folder(TEN, data / TEN.folder)
    path, size = data / TEN.folder / "batch_2.bin", 4 * 3073
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"x")
    with pytest.raises(InputError, match=rf"{size} bytes in .*batch_2.bin, got {size + change}:"):
        load_archive(TEN, data)
    path.unlink()
    with pytest.raises(InputError, match=r"file batch_2.bin in .*tiny-ten-bin"):
        load_archive(TEN, data)


@pytest.mark.parametrize(
    ("archive", "name", "column", "value", "told"),
    [
        (TEN, "batch_2.bin", 0, 10, "labels 0..9"),
        (HUNDRED, "test.bin", 0, 20, "labels 0..19"),
        (HUNDRED, "train.bin", 1, 255, "labels 0..99"),
    ],
)
def test_a_label_out_of_range_is_told_with_file_and_record(
    archive, name, column, value, told, data
):
    records = write_folder(archive, data / archive.folder)[name]
    records[1, column] = value
    (data / archive.folder / name).write_bytes(records.tobytes())
    with pytest.raises(ValueError, match=name) as error:
        load_archive(archive, data)
    message = str(error.value)
    assert told in message
    assert f"got {value} in record 1 " in message
    assert f"label byte {column}" in message


def other_folder(content: bytes, folder: Path) -> bytes:
    folder.rename(folder.with_name("another"))
    return packed(folder.with_name("another"))


def outside(content: bytes, folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        member = tarfile.TarInfo("../../outside.txt")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content, _: content[: len(content) // 2], "expected a whole tar.gz archive"),
        (lambda *_: b"<html>no such page</html>", "expected a whole tar.gz archive"),
        (other_folder, "expected a folder tiny-ten-bin inside"),
        (outside, "OutsideDestinationError"),
    ],
)
def test_an_archive_that_is_wrong_is_refused_and_leaves_nothing_behind(
    change, said, tmp_path, data
):
    archive, content = pack(TEN, tmp_path)
    content = change(content, tmp_path / "source" / archive.folder)
    (data / archive.file).write_bytes(content)
    with pytest.raises(InputError, match=f"expected MD5 {archive.md5}, got .*: delete it"):
        load_archive(archive, data)
    with pytest.raises(InputError, match=said) as error:
        load_archive(replace(archive, md5=hashlib.md5(content).hexdigest()), data)
    assert "\n" not in str(error.value)
    assert names_in(data) == [archive.file]
    assert not list(tmp_path.rglob("outside.txt"))


def test_an_interrupt_while_unpacking_leaves_nothing_behind(tmp_path, data, monkeypatch):
    archive, content = pack(TEN, tmp_path)
    (data / archive.file).write_bytes(content)
    extract_all = tarfile.TarFile.extractall

    def interrupted(tar, path, **options):
        extract_all(tar, path, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(tarfile.TarFile, "extractall", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_archive(archive, data)
    assert names_in(data) == [archive.file]


def test_two_processes_may_unpack_at_once(tmp_path, data, monkeypatch):
    archive, content = pack(TEN, tmp_path)
    (data / archive.file).write_bytes(content)
    extract_all = tarfile.TarFile.extractall

    def overtaken(tar, path, **options):
        extract_all(tar, path, **options)
        write_folder(archive, data / archive.folder)

    monkeypatch.setattr(tarfile.TarFile, "extractall", overtaken)
    train, _ = load_archive(archive, data)
    assert len(train) == 7
    assert names_in(data) == [archive.folder, archive.file]


def test_what_is_missing_is_downloaded_and_unpacked(tmp_path, data, monkeypatch):
    archive, content = pack(TEN, tmp_path)
    asked = []

    def send(self, url, output_file, pooch, check_only=False):
        asked.append(url)
        Path(output_file).write_bytes(content)

    monkeypatch.setattr("pooch.HTTPDownloader.__call__", send)
    target = data / "new" / "folder"
    train, test = load_archive(archive, target, download=True)
    assert asked == [archive.url]
    assert (len(train), len(test)) == (7, 2)
    assert names_in(target) == [archive.folder, archive.file]
    load_archive(archive, target, download=True)
    assert len(asked) == 1
