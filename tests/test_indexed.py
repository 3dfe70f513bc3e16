"""Indexed adds the index to each item of any map-style data set, with every kind of loader."""

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import fineprune as fp
from fineprune.errors import InputError


class Dicts(Dataset[Any]):
    """A data set whose items are dicts."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"x": torch.tensor([float(index)]), "name": f"sample {index}"}


class Batched(Dicts):
    """A data set that fetches whole batches."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_tuples_become_index_and_batch():
    data = TensorDataset(torch.arange(6) * 10, torch.arange(6) * 100)
    (index, (x, y)), *rest = DataLoader(fp.Indexed(data), batch_size=4)
    assert index.tolist() == [0, 1, 2, 3]
    assert index.dtype == torch.int64
    assert x.tolist() == [0, 10, 20, 30]
    assert y.tolist() == [0, 100, 200, 300]
    assert len(rest) == 1


class Collated(Dicts):
    """A data set that returns a whole batch, with as many entries as it has samples."""

    def __getitems__(self, indices):
        return {"x": torch.zeros(len(indices)), "name": "batch"}


@pytest.mark.parametrize("size", [2, 4])
def test_a_batch_in_place_of_items_is_refused(size):
    with pytest.raises(InputError, match="from __getitems__, got a dict of length 2"):
        next(iter(DataLoader(fp.Indexed(Collated()), batch_size=size)))


@pytest.mark.parametrize("data", [Dicts(), Batched()])
def test_dicts_stay_dicts(data):
    index, item = next(iter(DataLoader(fp.Indexed(data), batch_size=3)))
    assert index.tolist() == [0, 1, 2]
    assert item["x"].flatten().tolist() == [0, 1, 2]
    assert item["name"] == ["sample 0", "sample 1", "sample 2"]


def test_a_subset_counts_from_its_own_start():
    data = fp.Indexed(Subset(Dicts(), [7, 3]))
    assert [(index, item["name"]) for index, item in (data[0], data[1], data[-1])] == [
        (0, "sample 7"),
        (1, "sample 3"),
        (1, "sample 3"),
    ]
    with pytest.raises(IndexError):
        data[-3]


def stateful(pruner, workers):
    return StatefulDataLoader(
        pruner.dataset, batch_size=8, sampler=pruner.sampler, num_workers=workers
    )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("set_first", [True, False])
def test_a_stateful_loader_resumes_in_the_middle_of_a_pruning_epoch(workers, set_first):
    policy = fp.RandomPruning(fp.Schedule(6, 3, 0), prune=32)
    first = fp.Pruner(torch.arange(96), policy, batch_size=8, seed=2)
    loader = stateful(first, workers)
    first.sampler.set_epoch(4)
    batches = iter(loader)
    done = [next(batches)[0] for _ in range(3)]
    state = loader.state_dict()
    expected = [index.tolist() for index, _ in batches]
    assert len(done) + len(expected) == 8

    second = fp.Pruner(torch.arange(96), policy, batch_size=8, seed=2)
    resumed = stateful(second, workers)
    if set_first:
        second.sampler.set_epoch(4)
    resumed.load_state_dict(state)
    assert [index.tolist() for index, _ in resumed] == expected
    assert second.plan.epoch == 4
    # The next epoch starts at its beginning.
    second.sampler.set_epoch(5)
    assert sum(len(index) for index, _ in resumed) == 64


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("data/train", "got str: give a data set"),
        (DataLoader(TensorDataset(torch.zeros(9))), "got DataLoader: give loader.dataset"),
        ([torch.zeros(9, 2), torch.zeros(9)], r"got list: give .* TensorDataset\(x, y\)"),
        ((torch.zeros(8, 3), torch.zeros(8)), r"got tuple: give .* TensorDataset\(x, y\)"),
        ({"x": [1, 2, 3], "y": [0, 1, 0]}, "got dict: give one data set"),
        (Stream(), r"expected a map-style data set .*fineprune\.streams"),
        (object(), "expected a map-style data set"),
        (iter([1]), "expected a map-style data set"),
    ],
)
def test_what_is_no_data_set_is_refused(given, message):
    with pytest.raises(TypeError, match=message):
        fp.Pruner(given, fp.FullData(1))


def test_a_tuple_of_samples_is_a_data_set():
    assert fp.Indexed(((torch.zeros(3), 0), (torch.zeros(3), 1)))[1][1][1] == 1


def test_attributes_are_those_of_the_data_set_itself():
    data = TensorDataset(torch.zeros(9))
    indexed = fp.Pruner(data, fp.FullData(1)).dataset
    with pytest.raises(AttributeError, match="classes"):
        _ = indexed.classes
    indexed.tensors = (torch.ones(9),)
    assert data.tensors[0].sum() == indexed[0][1][0] * 9 == 9
    assert torch.equal(copy.deepcopy(indexed).tensors[0], torch.ones(9))


class Sparse(Dicts):
    """A data set some of whose files cannot be read."""

    def __getitem__(self, index):
        return None if index % 4 == 1 else super().__getitem__(index)


def without_none(items):
    return default_collate([item for item in items if item is not None])


@pytest.mark.parametrize("key", [None, "row"])
def test_samples_that_a_collate_function_leaves_out_have_no_index(key):
    pruner = fp.Pruner(Sparse(), fp.FullData(1), batch_size=4)
    collate = fp.IndexedCollate(without_none, key)

    def trained():
        for _ in pruner.epochs():
            for batch in pruner.loader(collate_fn=collate):
                index, x = (batch["row"], batch["x"]) if key else (batch[0], batch[1]["x"])
                assert x.flatten().tolist() == index.tolist()
                pruner.record(index, torch.rand(len(index)))
                yield from index.tolist()

    seen = list(trained())
    assert sorted(seen) == [index for index in range(12) if index % 4 != 1]
    with pytest.raises(InputError, match="got None for all 1 of them"):
        collate([fp.Indexed(Sparse())[1]])


@pytest.mark.parametrize("data", [Dicts(), Batched()])
@pytest.mark.parametrize("index", [(0, 3), "a", 1.5])
def test_a_sampler_of_anything_else_than_indices_is_one_error(data, index):
    with pytest.raises(InputError, match="expected a sampler that yields the index") as error:
        next(iter(DataLoader(fp.Indexed(data), batch_size=2, sampler=[index, index])))
    assert "\n" not in str(error.value)
