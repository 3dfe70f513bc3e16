"""Watches the labels of a plain PyTorch training, which stays the same bit for bit. Takes seconds.

    python examples/label_watch.py

A fifth of the labels of 1,280 handwritten digits are replaced by any other one.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fineprune as fp


def main() -> None:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    true = torch.tensor(digits.target)
    random = torch.Generator().manual_seed(0)
    wrong = torch.randperm(1280, generator=random)[:256]
    labels = true[:1280].clone()
    labels[wrong] = (labels[wrong] + torch.randint(1, 10, (256,), generator=random)) % 10

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_set = fp.Indexed(TensorDataset(x[:1280], labels))  # Batches come with their indices.
    watch = fp.LabelWatch(len(train_set), num_classes=10)

    for _ in range(20):
        for index, (inputs, targets) in DataLoader(train_set, batch_size=64, shuffle=True):
            logits = model(inputs)
            F.cross_entropy(logits, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.record(index, logits, targets)  # The only new line of the loop.

    indices, scores, suggestions = watch.suspects()
    for sample, score, suggestion in zip(indices[:5].tolist(), scores, suggestions, strict=False):
        print(
            f"{score:.2f}  digit {sample}: labelled {labels[sample]}, suggested {suggestion}, "
            f"is {true[sample]}"
        )
    hits = torch.isin(indices[:256], wrong)
    right = suggestions[:256][hits] == true[indices[:256]][hits]
    joint = watch.ranking().joint
    print(
        f"{int(hits.sum())} of the first 256 suspects of 1280 have a wrong label, and the "
        f"suggestion is right for {int(right.sum())} of these"
    )
    print(f"estimated wrong labels: {joint.sum() - joint.trace():.0f}, true: 256")
    with torch.no_grad():
        accuracy = (model(x[1280:]).argmax(1) == true[1280:]).float().mean().item()
    print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
