"""The index of image files: what it finds in folders, lists and shards, and its cache."""

import json
import math
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from made_images import CLASSES, add, image_bytes, write_folder, write_shards

from fineprune.datasets.image_index import cache_folder, load_index
from fineprune.datasets.image_set import class_number
from fineprune.datasets.image_sources import find_images
from fineprune.errors import InputError

IMAGES = 12


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def scans(monkeypatch):
    """The sources that were scanned."""
    scanned = []

    def counted(source):
        scanned.append(source)
        return find_images(source)

    monkeypatch.setattr("fineprune.datasets.image_index.find_images", counted)
    return scanned


def write_csv(tmp_path):
    write_folder(tmp_path / "files", IMAGES)
    lines = ["label,note,path"]
    for index in range(IMAGES):
        name = f"{index:04}{image_bytes(index)[1]}"
        lines.append(f'{CLASSES[index % 2]},"a, b",files/{CLASSES[index % 2]}/{name}')
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "list.csv"


def write_txt(tmp_path):
    write_folder(tmp_path / "files", IMAGES)
    lines = []
    for index in range(IMAGES):
        name = f"{index:04}{image_bytes(index)[1]}"
        lines.append(f"{tmp_path}/files/{CLASSES[index % 2]}/{name} {index % 2}")
    (tmp_path / "list.txt").write_text("\n".join(lines))
    return tmp_path / "list.txt"


def write_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    write_folder(tmp_path / "files", IMAGES)
    names = [f"{index:04}{image_bytes(index)[1]}" for index in range(IMAGES)]
    table = {
        "path": [f"files/{CLASSES[index % 2]}/{name}" for index, name in enumerate(names)],
        "label": [index % 2 for index in range(IMAGES)],
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "list.parquet")
    return tmp_path / "list.parquet"


SOURCES = {
    "folder": lambda tmp_path: write_folder(tmp_path / "files", IMAGES),
    "csv": write_csv,
    "txt": write_txt,
    "parquet": write_parquet,
    "shards": lambda tmp_path: write_shards(tmp_path / "shards", IMAGES, extra=["json"]),
    "one shard": lambda tmp_path: (
        write_shards(tmp_path / "shards", IMAGES, shards=1) / "train-000.tar"
    ),
    "pattern": lambda tmp_path: write_shards(tmp_path / "shards", IMAGES) / "train-*.tar",
}


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_gives_the_bytes_and_classes_of_all_images(source, tmp_path):
    index = load_index(SOURCES[source](tmp_path))
    assert index.classes == (("0", "1") if source in ("txt", "parquet") else CLASSES)
    found = sorted((index.read(i), int(index.labels[i])) for i in range(len(index)))
    assert found == sorted((image_bytes(i)[0], i % 2) for i in range(IMAGES))
    again = load_index(SOURCES[source](tmp_path))
    assert [again.read(i) for i in range(IMAGES)] == [index.read(i) for i in range(IMAGES)]


def test_folders_below_a_class_belong_to_it_and_other_files_are_counted(tmp_path, caplog):
    root = write_folder(tmp_path / "files", 4)
    deep = root / "dark" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "UPPER.JPG").write_bytes(image_bytes(0)[0])
    for name in ("notes.txt", "dark/list.csv", "dark/a/b/film.gif", "dark/.hidden.jpg"):
        (root / name).write_bytes(b"")
    index = load_index(root)
    assert len(index) == 5
    assert [index.name(i) for i in range(5) if "UPPER" in index.name(i)] == [
        str(deep / "UPPER.JPG")
    ]
    assert np.bincount(index.labels).tolist() == [2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        f"{root}: ignored 3 files that are not images"
    ]


WITH_ASCII = """
import sys
from pathlib import Path
from fineprune.datasets.image_index import load_index
from fineprune.errors import InputError

index = load_index(Path(sys.argv[1]))
print(ascii(index.classes), len(index.read(0)))
try:
    load_index(Path(sys.argv[2]))
except InputError as error:
    print(error)
"""


def test_names_of_classes_are_utf_8_whatever_the_locale(tmp_path):
    write_folder(tmp_path / "files", 4)
    (tmp_path / "files" / "dark").rename(tmp_path / "files" / "Äpfel")
    (tmp_path / "list.csv").write_text("path,label\nfiles/Äpfel/0000.jpeg,0\n", encoding="utf-8")
    said = subprocess.run(
        [sys.executable, "-c", WITH_ASCII, tmp_path / "files", tmp_path / "list.csv"],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    size = len(load_index(tmp_path / "files").read(0))
    assert said[0] == f"('bright', '\\xc4pfel') {size}"
    # Where the encoding of file names is ASCII, no file can be given this name.
    assert not said[1:] or "cannot read it: 'ascii' codec" in said[1]


def test_numbers_are_sorted_as_numbers_and_names_as_text(tmp_path):
    write_folder(tmp_path / "files", 2)
    name = f"files/bright/0000{image_bytes(0)[1]}"
    for labels, classes in (("10 9 2", ("2", "9", "10")), ("10 b 2", ("10", "2", "b"))):
        (tmp_path / "list.txt").write_text("".join(f"{name} {label}\n" for label in labels.split()))
        index = load_index(tmp_path / "list.txt")
        assert index.classes == classes
        assert [classes[i] for i in index.labels] == labels.split()


def touched(path, seconds=10):
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + seconds * 10**9))


CHANGES = {
    "nothing": lambda root: None,
    "an image is added": lambda root: (root / "dark" / "new.jpg").write_bytes(image_bytes(0)[0]),
    "an image is removed": lambda root: next((root / "bright").iterdir()).unlink(),
    "a class is added": lambda root: write_folder(root / "other", 2),
    "a folder is renamed": lambda root: (root / "dark").rename(root / "dim"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_index_is_made_anew_if_a_folder_changes_and_not_otherwise(change, tmp_path, scans):
    root = write_folder(tmp_path / "files", 6)
    past = {path for path in (root, *root.rglob("*")) if path.is_dir()}
    for path in past:
        os.utime(path, ns=(10**18, 10**18))
    first = load_index(root)
    CHANGES[change](root)
    second = load_index(root)
    load_index(root)
    assert len(scans) == (1 if change == "nothing" else 2)
    assert (first.digest == second.digest) == (change == "nothing")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_old_cache_file_is_not_mapped_when_it_is_replaced(tmp_path, monkeypatch):
    def replace(partial, target):
        assert str(target) not in Path("/proc/self/maps").read_text()  # as Windows demands
        os.replace(partial, target)
        replaced.append(target)

    replaced: list[Path] = []
    monkeypatch.setattr(Path, "replace", replace)
    root = write_folder(tmp_path / "files", 4)
    load_index(root)
    touched(root / "dark")
    load_index(root)
    assert len(replaced) == 2


def test_the_index_is_made_anew_if_a_list_or_a_shard_changes(tmp_path, scans):
    listed, shards = write_txt(tmp_path), write_shards(tmp_path / "shards", 4)
    for source, file in ((listed, listed), (shards, shards / "train-001.tar")):
        scans.clear()
        load_index(source)
        load_index(source)
        assert len(scans) == 1
        touched(file)
        load_index(source)
        assert len(scans) == 2
    (shards / "train-002.tar").write_bytes((shards / "train-001.tar").read_bytes())
    assert len(load_index(shards)) == 6


def test_the_names_of_columns_may_have_spaces_around_them(tmp_path):
    listed = write_txt(tmp_path)
    rows = [line.split() for line in listed.read_text().splitlines()]
    spaced = tmp_path / "list.csv"
    spaced.write_text("\n".join(", ".join(row) for row in [["path", "label"], *rows]))
    assert load_index(spaced).keys() == load_index(listed).keys()
    assert load_index(spaced).classes == load_index(listed).classes


def test_only_labels_that_are_kept_as_numbers_are_advised_to_be_kept(tmp_path, caplog):
    for names, advised in ((("1", "2"), True), (("01", "02"), False)):
        root = write_folder(tmp_path / names[0], 4)
        for folder, name in zip(sorted(root.iterdir()), names, strict=True):
            folder.rename(root / name)
        caplog.clear()
        load_index(root).with_numbers(None, root)
        (message,) = caplog.messages
        assert f"{names[0]} ... {names[1]}, which are numbered 0 to 1 in their order" in message
        assert ("set network.classes" in message) == advised


def test_whole_numbers_that_a_program_wrote_as_floats_are_numbers(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    write_folder(tmp_path / "files", 2)
    name, source = f"files/bright/0000{image_bytes(0)[1]}", tmp_path / "list.parquet"

    def written(labels):
        table = {"path": [name] * len(labels), "label": pyarrow.array(labels)}
        parquet.write_table(pyarrow.table(table), source)
        return source

    index = load_index(written([10.0, 9.0, 2.0])).with_numbers(11, source)
    assert index.labels.tolist() == [10, 9, 2]
    assert index.classes == tuple(map(str, range(11)))
    assert load_index(written([1.0, 1.5])).classes == ("1", "1.5")
    with pytest.raises(InputError, match="expected a path and a label in row 2"):
        load_index(written([1.0, math.nan, 0.0]))


def test_labels_with_a_point_are_names_in_a_text_and_told(tmp_path, caplog):
    write_folder(tmp_path / "files", 2)
    name, source = f"files/bright/0000{image_bytes(0)[1]}", tmp_path / "list.csv"

    def written(*labels):
        source.write_text("path,label\n" + "".join(f"{name},{label}\n" for label in labels))
        return source

    assert load_index(written("10.0", "9.0")).classes == ("10.0", "9.0")
    assert "labels such as 10.0, which are names" in caplog.text
    caplog.clear()
    assert load_index(written("1.0", "1.5", "nan")).classes == ("1.0", "1.5", "nan")
    assert not caplog.records
    with pytest.raises(InputError, match=r"expected a label in line 3 .*, got nan"):
        load_index(written("1.0", "nan", "0.0"))


@pytest.mark.parametrize("form", ["-1", " -1", "-1.0"])
def test_images_with_the_label_minus_one_are_left_out(form, tmp_path, caplog):
    write_folder(tmp_path / "files", 2)
    name, source = f"files/bright/0000{image_bytes(0)[1]}", tmp_path / "list.csv"
    for labels in (("10", form, "9", form, "2"), ("b", form, "a")):
        rows = "".join(f"{name},{label}\n" for label in labels)
        source.write_text(f"path,label\n{rows}")
        caplog.clear()
        index = load_index(source)
        kept = [label for label in labels if label != form]
        assert [index.classes[label] for label in index.labels] == kept
        assert list(index.classes) == kept[::-1]
        (said,) = caplog.messages
        left_out = len(labels) - len(kept)
        assert f"left out {left_out} images with the label -1, which stands for none" in said
    source.write_text(f"path,label\n{name},-1\n")
    with pytest.raises(InputError, match=r"expected images in .*, got only 1 without"):
        load_index(source)


def test_images_in_shards_with_the_label_minus_one_are_left_out(tmp_path, caplog):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, label in enumerate((b"3", b"-1", b"1")):
            add(archive, f"{number}.jpg", image_bytes(0)[0])
            add(archive, f"{number}.cls", label)
    index = load_index(tmp_path / "a.tar")
    assert (index.classes, index.labels.tolist()) == (("1", "3"), [1, 0])
    assert "left out 1 images" in caplog.text


def test_classes_that_differ_in_capitals_or_spaces_are_said(tmp_path, caplog):
    root = write_folder(tmp_path / "files", 6)
    for number, name in enumerate(("Dark", "dark ")):
        (root / name).mkdir()
        (root / name / f"{number}.png").write_bytes(image_bytes(0)[0])
    assert len(load_index(root).classes) == 4
    (said,) = caplog.messages
    assert re.search(
        r"2 names of classes .* such as 'Dark' \(.*\) and 'dark' \(.*\): give them", said
    )


@pytest.mark.parametrize(
    ("train", "others"), [("train", ["test", "val"]), ("Training", ["Testing"])]
)
def test_a_folder_of_parts_names_the_folder_to_use(train, others, tmp_path):
    for name in (train, *others):
        write_folder(tmp_path / "data" / name, 2)
    with pytest.raises(InputError, match="expected one folder per class") as raised:
        load_index(tmp_path / "data")
    told = re.search("train on (.*), and test on (.*)", str(raised.value))
    assert told
    assert told.groups() == tuple(str(tmp_path / "data" / name) for name in (train, others[0]))
    for folder in told.groups():
        assert load_index(Path(folder)).classes == ("bright", "dark")
    # A train may be a class.
    assert "train" in load_index(write_folder(tmp_path / "more" / "train", 2).parent).classes


def test_a_class_whose_number_is_written_in_two_ways_is_refused(tmp_path):
    write_folder(tmp_path / "files", 2)
    name = f"files/bright/0000{image_bytes(0)[1]}"
    (tmp_path / "list.txt").write_text(f"{name} 1\n{name} 2\n{name} 01\n")
    with pytest.raises(InputError, match=r"one name for each class, got 1 in line 1 .* and 01 in"):
        load_index(tmp_path / "list.txt")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (lambda: [["a"], ["x"], ["y"]], "one column for each of path and label in .* label, lab"),
        (lambda: [[b"a"], ["x"]], "expected a path as text in row 1 of .*, got bytes"),
        (lambda: [["a"], [{"k": 1}]], "expected a label as text or a number .*, got dict"),
    ],
)
def test_parquet_files_with_other_columns_are_refused(columns, said, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    arrays = list(map(pyarrow.array, columns()))
    table = pyarrow.Table.from_arrays(arrays, names=["path", "label", "label"][: len(arrays)])
    parquet.write_table(table, tmp_path / "list.parquet")
    with pytest.raises(InputError, match=said):
        load_index(tmp_path / "list.parquet")


def test_names_of_thousands_of_digits_are_no_numbers(tmp_path, caplog):
    write_folder(tmp_path / "files", 2)
    name, long = f"files/bright/0000{image_bytes(0)[1]}", "7" * 5000
    (tmp_path / "list.txt").write_text(f"{name} 3\n{name} {long}\n")
    index = load_index(tmp_path / "list.txt").with_numbers(2, tmp_path / "list.txt")
    assert index.classes == ("3", long)
    assert not caplog.records
    assert class_number("a table", "1", index.classes) == 1


def test_a_path_that_a_list_repeats_has_a_key_of_its_own(tmp_path):
    listed = write_txt(tmp_path)
    lines = listed.read_text().splitlines()
    listed.write_text("\n".join([*lines, lines[0], lines[0]]))
    keys = load_index(listed).keys()
    assert len(set(keys)) == IMAGES + 2
    assert keys[-2:] == (f"{keys[0]}#2", f"{keys[0]}#3")


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path):
    root = write_folder(tmp_path / "files", 6)
    elsewhere = write_folder(tmp_path / "elsewhere", 4) / "dark"
    (root / "dark" / "more").symlink_to(elsewhere)
    assert len(load_index(root)) == 6 + len(list(elsewhere.iterdir()))
    for link, target in (("again", root / "dark"), ("loop", "..")):
        (root / "dark" / link).symlink_to(target)
        with pytest.raises(InputError, match=rf"cannot read it: .* symbolic links: .*dark/{link}/"):
            load_index(root)
        (root / "dark" / link).unlink()


@pytest.mark.parametrize("damage", ["shortened", "empty", "another file"])
def test_a_damaged_cache_file_is_made_anew(damage, tmp_path, scans):
    root = write_folder(tmp_path / "files", 6)
    load_index(root)
    (file,) = cache_folder().iterdir()
    content = {"shortened": file.read_bytes()[:-20], "empty": b"", "another file": b"x" * 4096}
    file.write_bytes(content[damage])
    assert [load_index(root).read(i) for i in range(6)]
    assert len(scans) == 2


def test_without_a_folder_for_the_cache_the_index_is_kept_in_memory(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    index = load_index(write_folder(tmp_path / "files", 6))
    assert "set XDG_CACHE_HOME" in caplog.text
    again = pickle.loads(pickle.dumps(index))
    assert [again.read(i) for i in range(6)] == [index.read(i) for i in range(6)]


def test_another_process_opens_the_cache_file_and_notices_another_index(tmp_path):
    root = write_folder(tmp_path / "files", 6)
    index = load_index(root)
    sent = pickle.dumps(index)
    assert len(sent) < 1000
    assert pickle.loads(sent).read(3) == index.read(3)
    (root / "dark" / "new.png").write_bytes(image_bytes(0)[0])
    load_index(root)
    with pytest.raises(InputError, match="as it was at the start"):
        pickle.loads(sent)
    assert index.read(5)  # The mapped file is still there.


def test_the_index_of_a_run_that_has_begun_is_used_although_the_source_has_changed(
    tmp_path, scans, caplog
):
    root = write_folder(tmp_path / "files", 6)
    digest = load_index(root).digest
    gone = root / "dark" / "0001.jpeg"
    content = gone.read_bytes()
    gone.unlink()
    assert load_index(root, digest).digest == digest
    assert "the run goes on with the images of then" in caplog.text
    assert len(scans) == 1
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="found no such file or folder"):
        load_index(root, digest)
    (tmp_path / "elsewhere").rename(root)
    assert len(load_index(root)) == 5
    with pytest.raises(InputError, match="the images and labels with which the run began, got oth"):
        load_index(root, digest)
    assert len(load_index(root)) == 5
    gone.write_bytes(content)
    assert load_index(root, digest).digest == digest


def digest_of(root):
    return load_index(root).digest


def test_several_processes_may_make_the_index_at_the_same_time(tmp_path):
    root = write_folder(tmp_path / "files", 40)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        digests = pool.map(digest_of, [root] * 8)
    assert set(digests) == {load_index(root).digest}
    assert len(list(cache_folder().iterdir())) == 1


def changed_shard(tmp_path, *members_, name="train-000.tar"):
    folder = tmp_path / "shards"
    folder.mkdir()
    with tarfile.open(folder / name, "w") as archive:
        for member in members_:
            add(archive, member, image_bytes(0)[0] if member.endswith("jpg") else b"\xff")
    return folder


def text(tmp_path, name, content):
    write_folder(tmp_path / "files", 2)
    (tmp_path / name).write_text(content.replace("IMAGE", f"files/bright/0000{image_bytes(0)[1]}"))
    return tmp_path / name


def folder_with(tmp_path, *names):
    for name in names:
        (tmp_path / "files" / name).mkdir(parents=True)
    return tmp_path / "files"


def shortened(path):
    path.write_bytes(path.read_bytes()[:1600])
    return path


def with_a_damaged_header(path):
    with tarfile.open(path) as archive:
        second = archive.getmembers()[1]
    content = bytearray(path.read_bytes())
    content[second.offset + 3] ^= 1
    path.write_bytes(content)
    return path


def with_size(path, size, kind=tarfile.REGTYPE):
    """Change the size and the type in the header of the second member, a .cls file."""
    with tarfile.open(path) as archive:
        start = archive.getmembers()[1].offset_data - tarfile.BLOCKSIZE
    content = bytearray(path.read_bytes())
    content[start + 124 : start + 136] = size.ljust(12, b"\0")
    content[start + 156 : start + 157] = kind
    content[start + 148 : start + 156] = b" " * 8
    content[start + 148 : start + 156] = b"%06o\0 " % sum(content[start : start + 512])
    path.write_bytes(content)
    return path


NONSENSE = {
    "nothing there": (lambda t: t / "nowhere", "expected images in .*nowhere, found no such file"),
    "an empty folder": (lambda t: folder_with(t, "."), "one folder per class .* found none"),
    "images without classes": (
        lambda t: write_folder(t, 2) / "dark",
        "expected one folder per class with its images in .*dark, found none",
    ),
    "an empty class": (
        lambda t: write_folder(t / "files", 2) and folder_with(t, "empty"),
        r"expected images \(.jpg .jpeg .png .webp\) in the class folder .*empty, found none",
    ),
    "another file": (lambda t: text(t, "list.json", "[]"), "got .*list.json"),
    "a compressed shard": (lambda t: text(t, "a.tar.gz", ""), r"not compressed\).* got .*a.tar.gz"),
    "a pattern for other files": (
        lambda t: text(t, "a.zip", "").parent / "*.zip",
        "got .*a.zip",
    ),
    "a list without a header": (
        lambda t: text(t, "list.csv", "IMAGE,dark\n"),
        "path and label in .*list.csv, got files/bright/0000.jpeg, dark",
    ),
    "a short line": (
        lambda t: text(t, "list.csv", "path,label\nIMAGE,dark\nIMAGE\n"),
        "expected 2 values in line 3 of .*list.csv, as in its header, got 1",
    ),
    "no label": (
        lambda t: text(t, "list.csv", "path,label\nIMAGE,dark\nIMAGE,\n"),
        "a path and a label in line 3 of .*list.csv, got 'files/.*' and ''",
    ),
    "no label in a text": (
        lambda t: text(t, "list.txt", "IMAGE dark\n\nIMAGE\n"),
        "a path and a label in line 3 of .*list.txt",
    ),
    "several labels": (
        lambda t: text(t, "list.txt", "IMAGE dark\nIMAGE 3 5 7\n"),
        "one label in line 2 of .*list.txt, got 3 labels",
    ),
    "an empty list": (lambda t: text(t, "list.csv", "path,label\n"), "got an empty list"),
    "an empty file": (lambda t: text(t, "list.csv", ""), "path and label in .*list.csv, got none"),
    "wrong paths": (
        lambda t: text(t, "list.csv", "path,label\nelsewhere/a.jpg,dark\n"),
        "image of line 2 of .* at .*elsewhere/a.jpg, found no file: give paths",
    ),
    "no UTF-8": (
        lambda t: (text(t, "list.txt", "").write_bytes(b"\xff\xfe"), t / "list.txt")[1],
        "expected a list of images in .*list.txt, cannot read it",
    ),
    "no Parquet": (
        lambda t: text(t, "list.parquet", "path,label"),
        "expected a Parquet file, cannot read .*list.parquet",
    ),
    "no class in a shard": (
        lambda t: changed_shard(t, "0.jpg"),
        "class of the image 0 of .*train-000.tar in 0.cls, got none: write shards with a .cls",
    ),
    "only JSON in a shard": (
        lambda t: changed_shard(t, "a/0.jpg", "a/0.json"),
        "class of the image a/0 of .* in a/0.cls, got only a/0.json",
    ),
    "a class that is no text": (
        lambda t: changed_shard(t, "0.jpg", "0.cls"),
        r"name or the number of a class in 0.cls of .*, got b'\\xff'",
    ),
    "no images in a shard": (
        lambda t: changed_shard(t, "0.cls"),
        "expected samples with an image and a .cls file in .*shards, found none",
    ),
    "no shard": (
        lambda t: text(t, "a.tar", "x" * 2000),
        "expected a tar file, cannot read .*a.tar: invalid header",
    ),
    "a shard that was cut off": (
        lambda t: shortened(write_shards(t / "shards", 4) / "train-000.tar"),
        "cannot read .*train-000.tar: unexpected end of data",
    ),
    "a damaged header": (
        lambda t: with_a_damaged_header(write_shards(t / "shards", 4) / "train-000.tar"),
        "cannot read .*train-000.tar: no header of a member at byte",
    ),
    "a negative size": (
        lambda t: with_size(write_shards(t / "shards", 4) / "train-000.tar", b"-0000001000"),
        "cannot read .*train-000.tar: .*cls has a negative size",
    ),
    "a class of gigabytes": (
        lambda t: with_size(write_shards(t / "shards", 4) / "train-000.tar", b"77777777777"),
        "cannot read .*train-000.tar: .*cls has 8589934591 bytes, too many for a class",
    ),
    "a sparse file": (
        lambda t: with_size(
            write_shards(t / "shards", 4) / "train-000.tar", b"00000000001", tarfile.GNUTYPE_SPARSE
        ),
        "cannot read .*train-000.tar: .*cls is stored as a sparse file",
    ),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_a_wrong_source_is_said_in_one_line(case, tmp_path):
    make, said = NONSENSE[case]
    source = make(tmp_path)
    with pytest.raises(InputError, match=said) as raised:
        load_index(source)
    assert "\n" not in str(raised.value)
    assert not cache_folder().exists()


def test_the_labels_of_a_test_set_must_be_classes_of_the_training_set(tmp_path):
    write_folder(tmp_path / "files", 4)
    train = load_index(tmp_path / "files")
    name = f"files/dark/0001{image_bytes(1)[1]}"
    test = tmp_path / "test.txt"
    test.write_text(f"{name} dark\n")
    assert load_index(test).numbered(train.classes, test).tolist() == [1]
    test.write_text(f"{name} dark\n{name} dim\n")
    with pytest.raises(InputError, match=r"got 'dim' in line 2 of .*test.txt"):
        load_index(test).numbered(train.classes, test)
    test.write_text(f"{name} cafe\u0301\n", encoding="utf-8")
    with pytest.raises(InputError, match="in another Unicode form: rename one of them"):
        load_index(test).numbered((*train.classes, "caf\u00e9"), test)
    test.write_text(f"{name} cafe\u0301\n{name} caf\u00e9\n", encoding="utf-8")
    with pytest.raises(
        InputError,
        match=r"two Unicode forms of one: 'cafe.u0301' in line 1 .* and 'caf.xe9' in line 2",
    ):
        load_index(test)


# Writes a list and prints how many bytes of private memory each image takes: in the process that
# makes the index, and in one that reads all of a finished one.
MEMORY = """
import json, sys
from pathlib import Path
from fineprune.datasets.image_index import load_index

def anonymous():
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024

before = anonymous()
index = load_index(Path(sys.argv[1]))
names = sum(len(index.name(i)) for i in range(0, len(index), 100))
print(json.dumps([len(index), (anonymous() - before) / len(index), int(index.labels.sum())]))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_images_take_little_private_memory(tmp_path):
    images = 300_000
    write_folder(tmp_path / "files", 2)
    with (tmp_path / "list.txt").open("w") as file:
        file.write(f"files/dark/0001{image_bytes(1)[1]} 0\n")
        for i in range(1, images):
            file.write(f"n01440764/n01440764_{i:07}.JPEG {i % 1000}\n")
    # The second one makes the C library give back all memory that was freed.
    settings = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "MALLOC_TRIM_THRESHOLD_": "65536"}
    for _ in ("made", "from the cache"):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, tmp_path / "list.txt"],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        number, memory, labels = json.loads(done.stdout)
        assert (number, labels) == (images, sum(i % 1000 for i in range(images)))
        assert memory < 5
    assert sum(path.stat().st_size for path in Path(tmp_path / "cache").rglob("*")) < 60 * images
