"""A training that counts iterations and not epochs, with 35 % of its steps skipped. Takes seconds.

Without pruning, the loop of such a script is often this one::

    batches = iter(loader)
    while True:
        try:
            inputs, targets = next(batches)
        except StopIteration:
            batches = iter(loader)
            inputs, targets = next(batches)
        ...
        step += 1
        if step >= max_steps:
            break

The learning rate changes in every step, so the policy is told of it after the scheduler was made.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fineprune as fp

EPOCHS = 30
SEED = 0


def main() -> float:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train_set, test_set = TensorDataset(x[:1280], y[:1280]), TensorDataset(x[1280:], y[1280:])

    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = fp.Pruner(train_set, fp.Adaptive(EPOCHS, save=0.35), batch_size=64, seed=SEED)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, pruner.total_steps())
    pruner.set_rates(scheduler, by="steps")

    batches = (batch for _ in pruner.epochs() for batch in pruner.loader())
    for index, (inputs, targets) in batches:
        logits = model(inputs)
        losses = F.cross_entropy(logits, targets, reduction="none")
        loss = pruner.record(index, losses, logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if pruner.steps_done % 50 == 0:
            print(f"step {pruner.steps_done}: loss {loss:.3f}")

    right = 0
    with torch.no_grad():
        for inputs, targets in DataLoader(test_set, batch_size=256):
            right += int((model(inputs).argmax(1) == targets).sum())
    accuracy = right / len(test_set)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
