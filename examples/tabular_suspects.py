"""Finds wrong labels in a table while a small network trains on it. Takes seconds.

    python examples/tabular_suspects.py

Each row describes a tumour by 30 numbers, and the label says whether it is malignant. A fifth of
the malignant ones are labelled benign, as if they had been overlooked. The table fits into memory,
so the loop has no loader: any tensor of row numbers is an index.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import nn

import fineprune as fp

MALIGNANT, BENIGN = 0, 1


def main() -> None:
    table = load_breast_cancer()
    x = torch.tensor(table.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    true = torch.tensor(table.target)
    malignant = (true == MALIGNANT).nonzero().flatten()
    random = torch.Generator().manual_seed(0)
    overlooked = malignant[torch.randperm(len(malignant), generator=random)[: len(malignant) // 5]]
    labels = true.clone()
    labels[overlooked] = BENIGN

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch = fp.LabelWatch(len(x), num_classes=2)
    for _ in range(20):
        for index in torch.randperm(len(x)).split(32):
            logits = model(x[index])
            F.cross_entropy(logits, labels[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.record(index, logits, labels[index])

    indices, scores, _ = watch.suspects()
    for row, score in zip(indices[:5].tolist(), scores.tolist(), strict=False):
        given, right = (table.target_names[part[row]] for part in (labels, true))
        print(f"{score:6.2f}  row {row}: labelled {given}, is {right}")
    hits = int(torch.isin(indices[: len(overlooked)], overlooked).sum())
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == true).float().mean().item()
    print(f"accuracy {accuracy:.1%} on these rows, by their true labels")
    print(f"{hits} of the first {len(overlooked)} suspects of {len(x)} rows have a wrong label")


if __name__ == "__main__":
    main()
