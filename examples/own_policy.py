"""A user's own policy, which skips the samples whose last loss was smallest. Takes seconds."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fineprune as fp

EPOCHS = 30
BATCH = 64


class SkipEasiest(fp.Policy):
    """After a warm-up, every second epoch trains on the half with the largest last losses.

    With several ranks, ``learn`` receives the losses of all of them, so all ranks learn the same.
    """

    name = "skip-easiest"
    needs_losses = True
    setting_names = ("epochs", "warmup")
    array_names = ("last",)

    def __init__(self, epochs: int, warmup: int) -> None:
        super().__init__(epochs)
        self.warmup = warmup

    def begin(self, training: fp.Training) -> None:
        # Samples without a loss are kept.
        self.last = np.full(training.num_samples, np.inf, dtype=np.float32)

    def lengths(self) -> list[int]:
        number = len(self.last)
        pruned = [epoch >= self.warmup and epoch % 2 == 0 for epoch in range(self.epochs)]
        return [number // 2 if skips else number for skips in pruned]

    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> fp.EpochPlan:
        kept = np.sort(np.argsort(-self.last, kind="stable")[:number])
        return fp.EpochPlan(epoch, torch.from_numpy(kept))

    def learn(self, epoch: int, losses: Any, above_mean: Any, ranking: Any) -> None:
        trained = ~np.isnan(losses)
        self.last[trained] = losses[trained]


def main() -> float:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train, test = slice(0, 1280), slice(1280, None)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    # Arrays in memory need no DataLoader. The pruner is given the number of samples instead.
    pruner = fp.Pruner(1280, SkipEasiest(EPOCHS, warmup=4), batch_size=BATCH)
    trained = 0
    for _ in pruner.epochs():
        for index in pruner.sampler.order().split(BATCH):
            losses = F.cross_entropy(model(x[train][index]), y[train][index], reduction="none")
            pruner.record(index, losses).backward()
            optimizer.step()
            optimizer.zero_grad()
            trained += len(index)

    with torch.no_grad():
        accuracy: float = (model(x[test]).argmax(1) == y[test]).float().mean().item()
    print(f"trained {trained} of {1280 * EPOCHS} sample-steps, test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
