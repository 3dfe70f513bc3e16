"""A plain PyTorch training that skips 35 % of its steps. Takes seconds.

``plain_pytorch_before.py`` is the training before: one line was added and four were changed.
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
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train_set, test_set = TensorDataset(*data[:1280]), TensorDataset(*data[1280:])

    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [18, 24], gamma=0.2)
    pruner = fp.Pruner(train_set, fp.Adaptive(EPOCHS, save=0.35, rates=scheduler), batch_size=64)

    for epoch in pruner.epochs():
        batches = 0
        for index, (x, y) in pruner.loader():
            logits = model(x)
            loss = pruner.record(index, F.cross_entropy(logits, y, reduction="none"), logits, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
        scheduler.step()
        print(f"epoch {epoch + 1}: {batches} batches, the loss of the last is {loss:.3f}")

    right = 0
    with torch.no_grad():
        for x, y in DataLoader(test_set, batch_size=256):
            right += int((model(x).argmax(1) == y).sum())
    accuracy = right / len(test_set)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
