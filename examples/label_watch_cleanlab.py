"""Gives what one training recorded to cleanlab, which then needs no other one. Takes seconds.

    pip install cleanlab
    python examples/label_watch_cleanlab.py

cleanlab asks for probabilities of samples that the network was not trained on. Those of a
``LabelWatch`` are means over the training, of samples that it was trained on; see ``to_cleanlab``.
"""

import torch
import torch.nn.functional as F
from cleanlab.filter import find_label_issues
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fineprune as fp


def main() -> None:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    true = torch.tensor(digits.target)
    random = torch.Generator().manual_seed(0)
    wrong = torch.randperm(len(true), generator=random)[: len(true) // 10]
    labels = true.clone()
    labels[wrong] = (labels[wrong] + torch.randint(1, 10, (len(wrong),), generator=random)) % 10

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    watch = fp.LabelWatch(len(x), num_classes=10)
    data = fp.Indexed(TensorDataset(x, labels))
    for _ in range(20):
        for index, (inputs, targets) in DataLoader(data, batch_size=64, shuffle=True):
            logits = model(inputs)
            F.cross_entropy(logits, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.record(index, logits, targets)

    given, pred_probs = watch.to_cleanlab()
    issues = find_label_issues(
        given, pred_probs, return_indices_ranked_by="self_confidence", n_jobs=1
    )
    hits = int(torch.isin(torch.from_numpy(issues), wrong).sum())
    print(f"cleanlab lists {len(issues)} samples, of which {hits} have a wrong label")
    print(f"{len(wrong)} of {len(true)} labels are wrong")


if __name__ == "__main__":
    main()
