"""SeededSamples: the samples of a user-defined dataset, reproducible one by one, and their loaders.

The random numbers that a transform draws depend only on the run's seed, the epoch and the index of
the sample. They are therefore the same with any number of loader workers or ranks and after a
resume, and evaluation does not change the random numbers of the training.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, default_collate

from fineprune.datasets.loader_process import LoaderPool
from fineprune.labels.dataset_attributes import same_random_numbers
from fineprune.pruning.sampler import PruningSampler
from fineprune.training.data.run_data import Fetch


class SeededSamples(Dataset[tuple[int, Any]]):
    """The samples of a map-style dataset, whose random transforms are seeded for each sample.

    A key is a pair ``(epoch, index)``, and an item is a pair ``(index, sample)``.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, Any]:
        epoch, index = key
        with seeded_generators(self._seed, epoch, index):
            return index, self.dataset[index]


class EpochIndices(Sampler[tuple[int, int]]):
    """Yields the indices of a sampler as pairs ``(epoch, index)``."""

    def __init__(self, sampler: PruningSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self._sampler.epoch
        return ((epoch, index) for index in self._sampler)


class PlainSamples(Dataset[Any]):
    """Samples of a dataset for evaluation, which are the same every time they are read."""

    def __init__(self, dataset: Any) -> None:
        self._samples = SeededSamples(dataset, seed=0)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[0, index][1]


def sample_fetch(make: Callable[[], Any], *, seed: int, workers: int, device: str) -> Fetch:
    """Return a function that loads any batch of a user's dataset, for ``Data.make_fetch``.

    ``make`` returns the user's training set. Each loader process calls it, so it must be picklable
    if there are any; with 0 ``workers``, this process loads.
    """
    made = functools.partial(_batch_loader, make, seed)
    load_all = LoaderPool(workers, made).map if workers else functools.partial(map, made())

    def fetch(index: torch.Tensor, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [index] if not workers else index.split(-(-len(index) // workers))
        loaded = load_all([(epoch, i) for i in part.tolist()] for part in parts)
        x, y = (torch.cat(halves).to(device) for halves in zip(*loaded, strict=True))
        return x, y

    return fetch


def _batch_loader(make: Callable[[], Any], seed: int) -> Callable[[Sequence[tuple[int, int]]], Any]:
    samples = SeededSamples(make(), seed)
    return lambda keys: default_collate([samples[key][1] for key in keys])


@contextlib.contextmanager
def seeded_generators(seed: int, epoch: int = 0, index: int = 0) -> Iterator[None]:
    """Seed the global generators that a user's code draws from, and restore them afterwards."""
    with same_random_numbers():
        sample_seed = int(np.random.SeedSequence([seed, epoch, index]).generate_state(1)[0])
        torch.default_generator.manual_seed(sample_seed)
        np.random.seed(sample_seed)  # noqa: NPY002
        random.seed(sample_seed)
        yield
