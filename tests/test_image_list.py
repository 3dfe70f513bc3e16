"""Which images a folder or a CSV file names, and what is wrong with others."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_images import CLASSES, image_bytes, write_folder

from fineprune.datasets.image_list import find_images, load_images, save_images
from fineprune.errors import InputError

IMAGES = 12
NAME = f"files/bright/0000{image_bytes(0)[1]}"


def write_csv(tmp_path):
    write_folder(tmp_path / "files", IMAGES)
    lines = ["label,note, path"]
    for index in range(IMAGES):
        name = f"{index:04}{image_bytes(index)[1]}"
        lines.append(f'{CLASSES[index % 2]},"a, b",files/{CLASSES[index % 2]}/{name}')
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "list.csv"


def listed(tmp_path, *labels, path=NAME):
    """Write a list in which one image has these labels."""
    write_folder(tmp_path / "files", 2)
    rows = "".join(f"{path},{label}\n" for label in labels)
    (tmp_path / "list.csv").write_text(f"path,label\n{rows}", encoding="utf-8")
    return tmp_path / "list.csv"


SOURCES = {
    "folder": lambda tmp_path: write_folder(tmp_path / "files", IMAGES),
    "csv": write_csv,
}


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_gives_the_bytes_and_classes_of_all_images(source, tmp_path):
    images = find_images(SOURCES[source](tmp_path))
    assert images.classes == CLASSES
    found = sorted((images.read(i), int(images.labels[i])) for i in range(len(images)))
    assert found == sorted((image_bytes(i)[0], i % 2) for i in range(IMAGES))
    assert images.digest() == find_images(SOURCES[source](tmp_path)).digest()
    again = pickle.loads(pickle.dumps(images))
    assert [again.read(i) for i in range(IMAGES)] == [images.read(i) for i in range(IMAGES)]
    assert images.keys()[0] in images.name(0)


@pytest.mark.parametrize("source", SOURCES)
def test_a_saved_list_is_the_same_also_elsewhere_and_after_files_have_come(source, tmp_path):
    whole = SOURCES[source](tmp_path)
    images = find_images(whole)
    save_images(tmp_path / "saved.npz", images)
    new = tmp_path / "moved"
    new.mkdir()
    for path in (tmp_path / "files", tmp_path / "list.csv"):
        if path.exists():
            path.rename(new / path.name)
    (new / "files/dark/0000.png").write_bytes(b"")
    again = load_images(tmp_path / "saved.npz", new / whole.name)
    assert again.digest() == images.digest()
    assert (again.keys(), again.classes) == (images.keys(), images.classes)
    assert again.name(IMAGES - 1).startswith(str(new))
    assert len(again.read(IMAGES - 1)) > 0


@pytest.mark.parametrize("damage", [lambda content: content[:-200], lambda content: b""])
def test_a_damaged_list_of_a_run_is_said_in_one_line(damage, tmp_path):
    images, file = find_images(write_folder(tmp_path / "files", 4)), tmp_path / "saved.npz"
    save_images(file, images)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InputError, match=r"the list of the images of a run in .*saved.npz, can"):
        load_images(file, tmp_path / "files")


def test_folders_below_a_class_belong_to_it_and_other_files_are_counted(tmp_path, caplog):
    root = write_folder(tmp_path / "files", 4)
    deep = root / "dark" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "UPPER.JPG").write_bytes(image_bytes(0)[0])
    for name in ("notes.txt", "dark/list.csv", "dark/a/b/film.gif", "dark/.hidden.jpg"):
        (root / name).write_bytes(b"")
    images = find_images(root)
    names = [images.name(i) for i in range(5)]
    assert str(deep / "UPPER.JPG") in names
    assert np.bincount(images.labels).tolist() == [2, 3]
    assert caplog.messages == [f"{root}: ignored 3 files that are not images"]


WITH_ASCII = """
import sys
from pathlib import Path
from fineprune.datasets.image_list import find_images

print(ascii(find_images(Path(sys.argv[1])).classes))
"""


def test_names_of_classes_are_utf_8_whatever_the_locale(tmp_path):
    write_folder(tmp_path / "files", 4)
    (tmp_path / "files" / "dark").rename(tmp_path / "files" / "Äpfel")
    said = subprocess.run(
        [sys.executable, "-c", WITH_ASCII, tmp_path / "files"],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said == "('bright', '\\xc4pfel')\n"


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (("10", "9", "2"), ("2", "9", "10")),
        (("10", "b", "2"), ("10", "2", "b")),
        # Programs write whole numbers so in a column with gaps.
        (("10.0", "9.0", "2"), ("2", "9", "10")),
        (("1.0", "1.5"), ("1", "1.5")),
    ],
)
def test_numbers_are_sorted_as_numbers_and_names_as_text(labels, classes, tmp_path):
    images = find_images(listed(tmp_path, *labels))
    assert images.classes == classes
    whole = [label.removesuffix(".0") for label in labels]
    assert [classes[i] for i in images.labels] == whole


def test_numbers_below_the_classes_of_the_network_are_kept(tmp_path):
    images = find_images(listed(tmp_path, "10", "9", "2")).with_numbers(11)
    assert images.labels.tolist() == [10, 9, 2]
    assert images.classes == tuple(map(str, range(11)))


def test_only_labels_that_are_kept_as_numbers_are_advised_to_be_kept(tmp_path, caplog):
    for names, advised in ((("1", "2"), True), (("01", "02"), False)):
        root = write_folder(tmp_path / names[0], 4)
        for folder, name in zip(sorted(root.iterdir()), names, strict=True):
            folder.rename(root / name)
        caplog.clear()
        find_images(root).with_numbers(None)
        (message,) = caplog.messages
        assert f"{names[0]} ... {names[1]}, which are numbered 0 to 1 in their order" in message
        assert ("set network.classes" in message) == advised


@pytest.mark.parametrize("form", ["-1", " -1", "-1.0"])
def test_images_with_the_label_minus_one_are_left_out(form, tmp_path, caplog):
    for labels in (("10", form, "9", form, "2"), ("b", form, "a")):
        caplog.clear()
        images = find_images(listed(tmp_path, *labels))
        kept = [label for label in labels if label != form]
        assert [images.classes[label] for label in images.labels] == kept
        assert list(images.classes) == kept[::-1]
        (said,) = caplog.messages
        left_out = len(labels) - len(kept)
        assert f"left out {left_out} images with the label -1, which stands for none" in said


def test_classes_that_differ_in_capitals_or_spaces_are_said(tmp_path, caplog):
    root = write_folder(tmp_path / "files", 6)
    for number, name in enumerate(("Dark", "dark ")):
        (root / name).mkdir()
        (root / name / f"{number}.png").write_bytes(image_bytes(0)[0])
    assert len(find_images(root).classes) == 4
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
        find_images(tmp_path / "data")
    told = re.search("train on (.*), and test on (.*)", str(raised.value))
    assert told
    assert told.groups() == tuple(str(tmp_path / "data" / name) for name in (train, others[0]))
    for folder in told.groups():
        assert find_images(Path(folder)).classes == ("bright", "dark")
    # A train may be a class.
    assert "train" in find_images(write_folder(tmp_path / "more" / "train", 2).parent).classes


def test_a_path_that_a_list_repeats_has_a_key_of_its_own(tmp_path):
    keys = find_images(listed(tmp_path, 0, 1, 1)).keys()
    assert keys == (NAME, f"{NAME}#2", f"{NAME}#3")


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path):
    root = write_folder(tmp_path / "files", 6)
    elsewhere = write_folder(tmp_path / "elsewhere", 4) / "dark"
    (root / "dark" / "more").symlink_to(elsewhere)
    assert len(find_images(root)) == 6 + len(list(elsewhere.iterdir()))
    for link, target in (("again", root / "dark"), ("loop", "..")):
        (root / "dark" / link).symlink_to(target)
        with pytest.raises(InputError, match=r"cannot read it: .* symbolic links"):
            find_images(root)
        (root / "dark" / link).unlink()


def text(tmp_path, name, content):
    write_folder(tmp_path / "files", 2)
    (tmp_path / name).write_text(content.replace("IMAGE", NAME), encoding="utf-8")
    return tmp_path / name


def folder_with(tmp_path, *names):
    for name in names:
        (tmp_path / "files" / name).mkdir(parents=True)
    return tmp_path / "files"


NONSENSE = {
    "nothing there": (lambda t: t / "nowhere", "got .*nowhere, which does not exist"),
    "an empty folder": (lambda t: folder_with(t, "."), "one folder per class .* found none"),
    "images without classes": (
        lambda t: write_folder(t, 2) / "dark",
        "expected one folder per class with its images in .*dark, found none",
    ),
    "an empty class": (
        lambda t: write_folder(t / "files", 2) and folder_with(t, "empty"),
        r"expected images \(.jpg .jpeg .png .webp\) in the class folder .*empty, found none",
    ),
    "another file": (lambda t: text(t, "list.json", "[]"), "got .*list.json, which is none"),
    "no UTF-8": (
        lambda t: (text(t, "list.csv", "").write_bytes(b"\xff\xfe"), t / "list.csv")[1],
        "expected images in .*list.csv, cannot read it",
    ),
}

# The contents of lists in CSV.
LISTS = {
    "IMAGE,dark\n": "in the first line of .*list.csv, got files/bright/0000.jpeg, dark",
    "": "path and label in the first line of .*list.csv, got none",
    "path,label,label\n": "one column for each of path and label .* got path, label, label",
    "path,label\n": "expected images with labels in .* none",
    "path,label\nIMAGE,-1\n": "expected images with labels in .*list.csv, found none",
    "path,label\nIMAGE,dark\nIMAGE\n": "expected 2 values in line 3 of .*, as .*, got 1",
    "path,label\nIMAGE,dark\nIMAGE,\n": "a path and a label in line 3 of .*' and ''",
    "path,label\nIMAGE,1.0\nIMAGE,nan\n": "a path and a label in line 3 of .*' and 'nan'",
    "path,label\nelsewhere/a.jpg,dark\n": "line 2 .* at .*elsewhere/a.jpg, found no file",
    "path,label\nIMAGE,1\nIMAGE,2\nIMAGE,01\n": "one name .*'1' in line 2 .* and '01' in line 4",
    "path,label\nIMAGE,cafe\u0301\nIMAGE,caf\u00e9\n": (
        r"one name for each class, got 'cafe.u0301' in line 2 .* and 'caf.xe9' in line 3"
    ),
}


@pytest.mark.parametrize(("content", "said"), LISTS.items())
def test_a_wrong_list_is_said_in_one_line(content, said, tmp_path):
    with pytest.raises(InputError, match=said) as raised:
        find_images(text(tmp_path, "list.csv", content))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("case", NONSENSE)
def test_a_wrong_source_is_said_in_one_line(case, tmp_path):
    make, said = NONSENSE[case]
    source = make(tmp_path)
    with pytest.raises(InputError, match=said) as raised:
        find_images(source)
    assert "\n" not in str(raised.value)


def test_the_labels_of_a_test_set_must_be_classes_of_the_training_set(tmp_path):
    train = find_images(write_folder(tmp_path / "files", 4))
    assert find_images(listed(tmp_path, "dark")).numbered(train.classes).labels.tolist() == [1]
    with pytest.raises(InputError, match=rf"got 'dim' in .*{NAME}$"):
        find_images(listed(tmp_path, "dark", "dim")).numbered(train.classes)
    other_form = find_images(listed(tmp_path, "cafe\u0301"))
    assert other_form.numbered((*train.classes, "caf\u00e9")).labels.tolist() == [2]
