"""What data sets say of their classes, labels and samples, and where they contradict themselves."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import fineprune as fp
from fineprune.errors import InputError
from fineprune.labels.dataset_attributes import classes_of, keys_of, labels_of

N = 24
MOST = 5


class Folder(Dataset[Any]):
    """Has the attributes of torchvision's ``ImageFolder``, or those that are given."""

    root = "images"
    keys: Any
    target_transform: Any

    def __init__(self, labels: Any = range(3), **attributes: Any) -> None:
        labels = [label for label, _ in zip(list(labels) * N, range(N), strict=False)]
        self.samples: Any = [(f"images/{y}/{i}.png", y) for i, y in enumerate(labels)]
        self.targets: Any = labels
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        return path, label


def watched(labels, classes):
    labels = torch.tensor(labels)
    watch = fp.LabelWatch(len(labels), classes)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        logits = 3 * F.one_hot(labels, classes) + torch.randn(len(labels), classes, generator=draw)
        watch.record(torch.arange(len(labels)), logits, labels)
    return watch


def written(watch, path, *arguments, **options):
    watch.page(path, *arguments, most=MOST, **options)
    return path.read_text(encoding="utf-8")


# -- the names of the classes ----------------------------------------------------------------------


def test_names_have_the_numbers_of_class_to_idx(tmp_path):
    names = ["1", "10", "2"]  # As folders are sorted.
    folder = Folder(classes=names, class_to_idx={"1": 0, "2": 1, "10": 2})
    for data in (folder, Subset(folder, range(N)), fp.Indexed(folder)):
        assert classes_of(data, 3) == ["1", "2", "10"]
    page = written(watched(folder.targets, 3), tmp_path / "page.html", folder)
    assert '"classes": ["1", "2", "10"]' in page
    # Of a head with more classes, and of folders that are one class.
    folder = Folder(classes=["cat", "dog"], class_to_idx={"dog": 1, "cat": 3})
    assert classes_of(folder, 5) == ["0", "dog", "2", "cat", "4"]
    assert classes_of(Folder(class_to_idx={"cat": 0, "kitten": 0, "dog": 1}), 2) is None
    # A shorter list does not say which numbers its names have.
    assert classes_of(Folder(classes=["cat", "dog"]), 5) is None


@pytest.mark.parametrize(
    "attributes",
    [
        {"classes": ["plane", "car", "bird"]},
        {"class_to_idx": {"plane": 0, "car": 1, "bird": 2}},
        {"features": {"label": SimpleNamespace(names=["plane", "car", "bird"])}},
        {"classes": ["plane", "car"], "class_to_idx": {"plane": 1, "car": 2}},
    ],
)
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(N))])
def test_more_names_than_classes_are_an_error_with_two_remedies(attributes, wrap, tmp_path):
    data, labels = wrap(Folder(range(2), **attributes)), [0, 1] * (N // 2)
    watch = watched(labels, 2)
    with pytest.raises(InputError, match=r"only the classes 0 to 1 .*, got .* names") as e:
        watch.page(tmp_path / "page.html", data)
    assert "\n" not in str(e.value)
    assert '"classes": ["x", "y"]' in written(watch, tmp_path / "p.html", data, names=["x", "y"])
    (number,) = re.findall(r"num_classes=(\d)", str(e.value))
    assert "plane" in written(watched(labels, int(number)), tmp_path / "q.html", data)


# -- keys ------------------------------------------------------------------------------------------


class Series:
    """Has what a column of pandas has, with the numbers of the rows before a shuffle as index."""

    def __init__(self, values: Any, index: Any) -> None:
        self.values, self.index = list(values), list(index)

    def __len__(self):
        return len(self.values)

    def __iter__(self):
        return iter(self.values)

    def __getitem__(self, label):
        return self.values[self.index.index(label)]

    def tolist(self):
        return self.values


def test_keys_are_taken_by_position_whatever_they_are_in(tmp_path):
    names = [f"{number}.png" for number in range(N)]
    watch = watched(list(range(3)) * (N // 3), 3)
    expected = written(watch, tmp_path / "page.html", keys=names)
    shuffled = np.random.default_rng(0).permutation(N)
    for keys in (
        Series(names, shuffled),
        Series(names, [f"row {number}" for number in range(N)]),
        np.array(names),
        tuple(names),
    ):
        assert written(watch, tmp_path / "page.html", keys=keys) == expected
    assert keys_of(Folder(keys=Series(names, shuffled))) == names
    for wrong, said in (
        ({name: name for name in names}, "keys as a list .*, got dict"),
        (set(names), "keys as a list .*, got set"),
        ("names", "keys as a list .*, got str"),
    ):
        with pytest.raises(InputError, match=said):
            watch.page(tmp_path / "page.html", keys=wrong)


# -- wrappers that keep the items ------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: fp.Indexed(Subset(data, range(4, N))),
        lambda data: Subset(fp.Indexed(data), range(4, N)),
        lambda data: Subset(Subset(data, range(2, N)), range(2, N - 2)),
        lambda data: ConcatDataset(
            [Subset(data, range(4, 9)), fp.Indexed(Subset(data, range(9, N)))]
        ),
        lambda data: fp.Indexed(Subset(ConcatDataset([data]), range(4, N))),
    ],
)
def test_wrappers_have_the_labels_keys_and_names_of_what_they_wrap(wrap, tmp_path):
    names = {"cat": 0, "dog": 1, "bird": 2}
    data = Folder(class_to_idx=names)
    plain, wrapped = Subset(data, range(4, N)), wrap(data)
    labels = labels_of(wrapped)
    assert labels is not None
    assert labels.tolist() == data.targets[4:]
    assert (
        keys_of(wrapped)
        == keys_of(plain)
        == [path[len("images/") :] for path, _ in data.samples[4:]]
    )
    assert classes_of(wrapped, 3) == list(names)
    watch = fp.LabelWatch(N - 4, 3)  # It has not seen the last samples.
    watch.record(torch.arange(9), torch.randn(9, 3), labels[:9])
    pages = [written(watch, tmp_path / "page.html", dataset) for dataset in (plain, wrapped)]
    assert pages[0] == pages[1]


def test_the_files_of_an_image_folder_are_its_keys_unless_it_names_others():
    folder = Folder()
    assert keys_of(Subset(folder, [2, 0])) == ["2/2.png", "0/0.png"]
    assert keys_of(Subset(folder, [2, 2])) is None
    folder.keys = ["image", "label"]  # Of columns, and not of samples.
    assert keys_of(Subset(folder, [2, 0])) is None
    folder.keys = 7  # Something else.
    assert keys_of(Subset(folder, [2, 0])) == ["2/2.png", "0/0.png"]
    assert keys_of(Folder(root="elsewhere")) is None


def test_names_follow_a_target_transform_that_renumbers_the_classes():
    """Folders named 1 to 10 are sorted as 1, 10, 2, and their labels are made numbers."""
    names = {"1": 0, "10": 1, "2": 2}
    folder = Folder(classes=[*names], class_to_idx=names)
    folder.target_transform = lambda target: [0, 2, 1][target]
    assert classes_of(folder, 3) == ["1", "2", "10"]
    # Numbers that are others each time tell no order, and merged classes have no names.
    once = iter([2, 1, 0, 0, 1, 2])
    for transform in (lambda target: next(once), bool):
        folder.target_transform = transform
        assert classes_of(folder, 3) is None


# -- labels that contradict each other -------------------------------------------------------------


def test_samples_and_targets_that_contradict_each_other_are_not_trusted():
    for edit in (
        lambda folder: setattr(folder, "samples", folder.samples[::-1]),
        lambda folder: setattr(folder, "samples", folder.samples[1:]),
        lambda folder: setattr(folder, "targets", torch.zeros(N, dtype=torch.int64)),
    ):
        folder = Folder()
        assert labels_of(folder) is not None
        edit(folder)
        for dataset in (folder, Subset(folder, range(8)), fp.Indexed(folder)):
            with pytest.raises(InputError, match="attributes samples and targets") as error:
                labels_of(dataset)
        (remedy,) = re.findall(r"set (dataset.targets = .*)", str(error.value))
        exec(remedy, {"dataset": folder})
        assert labels_of(folder).tolist() == [label for _, label in folder.samples]


def test_recorded_labels_are_compared_with_those_of_the_data_set_at_once():
    right = torch.arange(N) % 3
    stale = right.clone()
    stale[5] = -1  # Unknown.
    stale[7:] = right[6:-1]
    x = torch.randn(N, 3)

    def first_batch(data):
        pruner = fp.Pruner(data, fp.Adaptive(20, save=0.3, rates=[0.1] * 20))
        pruner.record(torch.arange(N), F.cross_entropy(x, right, reduction="none"), x, right)
        return pruner

    with pytest.raises(InputError, match=r"others for 17 of 24 .* such as 1 instead of 0 for samp"):
        first_batch(TensorDataset(x, stale))
    folder = Folder()
    folder.samples = folder.samples[::-1]
    with pytest.raises(InputError, match="attributes samples and targets"):
        first_batch(folder)
    assert first_batch(N).watch is not None  # The remedy.
    assert first_batch(TensorDataset(x, right)).watch is not None
