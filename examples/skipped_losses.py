"""A loop that computes the losses of skipped samples, which some policies need. Takes seconds."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fineprune as fp

EPOCHS = 20
BATCH = 64


def main() -> float:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train, test = slice(0, 1280), slice(1280, None)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    pruner = fp.Pruner(1280, fp.Kakurenbo(EPOCHS, prune=0.5), batch_size=BATCH)
    trained = evaluated = 0
    for _ in pruner.epochs():
        for index in pruner.sampler.order().split(BATCH):
            losses = F.cross_entropy(model(x[train][index]), y[train][index], reduction="none")
            pruner.record(index, losses).backward()
            optimizer.step()
            optimizer.zero_grad()
            trained += len(index)

        skipped = pruner.to_rescore()  # None if the policy needs nothing.
        if skipped is not None:
            model.eval()
            with torch.no_grad():
                for index in skipped.split(512):
                    logits = model(x[train][index])
                    losses = F.cross_entropy(logits, y[train][index], reduction="none")
                    pruner.rescore(index, losses)
                    evaluated += len(index)
            model.train()

    with torch.no_grad():
        accuracy: float = (model(x[test]).argmax(1) == y[test]).float().mean().item()
    print(
        f"trained {trained} of {1280 * EPOCHS} sample-steps, evaluated {evaluated} others, "
        f"test accuracy {accuracy:.1%}"
    )
    return accuracy


if __name__ == "__main__":
    main()
