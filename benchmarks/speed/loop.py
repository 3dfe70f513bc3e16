"""A training of LeNet on synthetic images, from each kind of source."""

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import fineprune as fp
from fineprune.datasets.synthetic import make_synthetic
from fineprune.networks.lenet import LeNet
from fineprune.training.data import EpochLoader, load_data
from fineprune.training.recipe import make_recipe

SAMPLES, BATCH = 2048, 32


def user_data() -> tuple[TensorDataset, TensorDataset]:
    """The same images as a dataset of the user."""
    train, test = (
        TensorDataset(part.images.float() / 255, part.labels) for part in make_synthetic(SAMPLES)
    )
    return train, test


class Epoch:
    """One epoch of 2,048 samples."""

    params = (("synthetic", "speed.loop:user_data"), (False, True))
    param_names = ("data", "recorded")
    number, repeat = 1, (5, 15, 20.0)

    def setup(self, data: str, recorded: bool) -> None:
        sections = {
            "data": {"name": data, **({"train_size": SAMPLES} if data == "synthetic" else {})},
            "network": {"name": "lenet", "classes": 10},
            "run": {"device": "cpu", "threads": 1},
        }
        loaded = load_data(make_recipe(sections))
        self.pruner = fp.Pruner(SAMPLES, fp.FullData(2), batch_size=BATCH)
        next(iter(self.pruner.epochs()))
        self.loader = EpochLoader(loaded.train, self.pruner.sampler, BATCH)
        self.model = LeNet()
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def time_epoch(self, data: str, recorded: bool) -> None:
        for index, (x, y) in self.loader:
            logits = self.model(x)
            losses = F.cross_entropy(logits, y, reduction="none")
            loss = self.pruner.record(index, losses, logits, y) if recorded else losses.mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
