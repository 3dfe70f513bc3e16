"""Fine-pruning in a plain PyTorch loop, with three added lines, marked 1 to 3. Takes seconds."""

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
    train_set = TensorDataset(x[:1280], y[:1280])

    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    # The losses are watched in windows of 10 epochs. In the later part of each window, two of three
    # epochs skip the quarter of the samples whose loss most often exceeded the mean of their batch.
    schedule = fp.Schedule(epochs=EPOCHS, window=10, start=4, attenuation=2.0, block=3, count=2)
    policy = fp.FinePruning(schedule, prune=0.25)
    pruner = fp.Pruner(train_set, policy, batch_size=64, seed=SEED)
    loader = DataLoader(pruner.dataset, batch_size=64, sampler=pruner.sampler)  # 1

    for epoch in pruner.epochs():  # 2
        for index, (inputs, targets) in loader:
            losses = F.cross_entropy(model(inputs), targets, reduction="none")
            loss = pruner.record(index, losses)  # 3
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: trained on {len(pruner.plan.kept)} of {len(train_set)} samples")

    with torch.no_grad():
        accuracy: float = (model(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
