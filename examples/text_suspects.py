"""Finds texts with a wrong label while a text classifier trains. Takes seconds.

    python examples/text_suspects.py

The texts are docstrings of four libraries, and the label says from which of them a text comes. A
tenth of the labels are wrong. The classifier is a bag of words. Its training loop has one
additional line, which changes nothing in the training.
"""

import inspect
import re
import zlib
from types import ModuleType

import numpy as np
import scipy.signal
import scipy.special
import scipy.stats
import sklearn.metrics
import sklearn.preprocessing
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fineprune as fp

WORDS = 4096  # Words are hashed into so many rows of the embedding.
LENGTH = 40  # The first words of a text.
LIBRARIES: dict[str, list[ModuleType]] = {
    "numpy": [np],
    "torch": [torch],
    "scipy": [scipy.signal, scipy.special, scipy.stats],
    "sklearn": [sklearn.metrics, sklearn.preprocessing],
}


def docstrings(modules: list[ModuleType]) -> list[str]:
    """Return the docstrings of the functions and classes of a library, without repeats."""
    objects = (getattr(module, name, None) for module in modules for name in sorted(dir(module)))
    # The names of the libraries would give the label away.
    texts = (
        re.sub(r"numpy|torch|scipy|sklearn|np\.", "", inspect.getdoc(o) or "") for o in objects
    )
    return list(dict.fromkeys(text for text in texts if len(text.split()) >= LENGTH // 2))


def hashed(text: str) -> torch.Tensor:
    """Return the rows of the first words of a text; int64, shape (LENGTH,), 0 for no word."""
    words = re.findall(r"[a-z]+", text.lower())[:LENGTH]
    rows = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
    return torch.tensor(rows + [0] * (LENGTH - len(rows)))


def main() -> None:
    found = [docstrings(modules) for modules in LIBRARIES.values()]
    texts = [text for part in found for text in part]
    true = torch.arange(len(found)).repeat_interleave(torch.tensor([len(part) for part in found]))
    random = torch.Generator().manual_seed(0)
    wrong = torch.randperm(len(true), generator=random)[: len(true) // 10]
    labels = true.clone()
    shifts = torch.randint(1, len(found), (len(wrong),), generator=random)
    labels[wrong] = (true[wrong] + shifts) % len(found)
    data = [(hashed(text), label) for text, label in zip(texts, labels, strict=True)]

    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 32, padding_idx=0), nn.Linear(32, len(found)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    watch = fp.LabelWatch(len(data), num_classes=len(found))
    for _ in range(12):
        for index, (rows, label) in DataLoader(fp.Indexed(data), batch_size=32, shuffle=True):
            logits = model(rows)
            F.cross_entropy(logits, label).backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.record(index, logits, label)

    indices, scores, suggestions = watch.suspects()
    names = list(LIBRARIES)
    for sample, score, suggestion in zip(indices[:5], scores, suggestions, strict=False):
        start = " ".join(texts[sample].split()[:7])
        print(
            f"{score:.2f}  labelled {names[labels[sample]]}, suggested {names[suggestion]}, "
            f"is {names[true[sample]]}: {start} ..."
        )
    first = slice(len(wrong))
    hits = torch.isin(indices[first], wrong)
    right = suggestions[first][hits] == true[indices[first]][hits]
    joint = watch.ranking().joint
    with torch.no_grad():
        predicted = model(torch.stack([rows for rows, _ in data])).argmax(1)
    accuracy = (predicted == true).float().mean().item()
    print(f"accuracy {accuracy:.1%} on these texts, by their true labels")
    print(
        f"{int(hits.sum())} of the first {len(wrong)} suspects of {len(true)} texts have a wrong "
        f"label, and the suggestion is right for {int(right.sum())} of these"
    )
    print(f"estimated wrong labels: {joint.sum() - joint.trace():.0f}, true: {len(wrong)}")


if __name__ == "__main__":
    main()
