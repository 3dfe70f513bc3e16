"""Finds texts with a wrong label while a text classifier trains.

    python examples/text_suspects.py

The texts are the docstrings of NumPy and PyTorch, and the label says which of the two a text comes
from. A tenth of the labels are wrong. The training loop has the usual three additional lines, and
skips nothing here (``save=0``), because only the suspects are wanted.
"""

import inspect
import re
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fineprune as fp

WORDS = 4096  # Words are hashed into so many rows of the embedding.
LENGTH = 40  # The first words of a text.
LIBRARIES = (np, torch)


def docstrings(library: object) -> list[str]:
    """Return the docstrings of the functions and classes of a library, without repeats."""
    found = (inspect.getdoc(getattr(library, name, None)) for name in sorted(dir(library)))
    # The names of the libraries would give the label away.
    texts = (re.sub(r"numpy|torch|np\.", "", text) for text in found if text)
    return list(dict.fromkeys(text for text in texts if len(text.split()) >= LENGTH // 2))


def hashed(text: str) -> torch.Tensor:
    """Return the rows of the first words of a text; int64, shape (LENGTH,), 0 for no word."""
    words = re.findall(r"[a-z]+", text.lower())[:LENGTH]
    rows = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
    return torch.tensor(rows + [0] * (LENGTH - len(rows)))


def main() -> None:
    texts = [docstrings(library) for library in LIBRARIES]
    number = min(map(len, texts))
    everything = [text for part in texts for text in part[:number]]
    true = torch.arange(len(LIBRARIES)).repeat_interleave(number)
    random = torch.Generator().manual_seed(0)
    wrong = torch.randperm(len(true), generator=random)[: len(true) // 10]
    labels = true.clone()
    labels[wrong] = 1 - labels[wrong]
    data = [(hashed(text), label) for text, label in zip(everything, labels, strict=True)]

    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 32, padding_idx=0), nn.Linear(32, len(LIBRARIES)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    pruner = fp.Pruner(data, fp.Adaptive(12, save=0), batch_size=32)
    loader = DataLoader(pruner.dataset, batch_size=32, sampler=pruner.sampler)
    for _ in pruner.epochs():
        for index, (rows, label) in loader:
            loss = pruner.record(index, F.cross_entropy(model(rows), label, reduction="none"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    suspects, scores = pruner.policy.suspects()
    names = [library.__name__ for library in LIBRARIES]
    for sample, score in zip(suspects[:5].tolist(), scores.tolist(), strict=False):
        start = " ".join(everything[sample].split()[:9])
        print(
            f"{score:.2f}  labelled {names[labels[sample]]}, is {names[true[sample]]}: {start} ..."
        )
    first = suspects[: len(wrong)]
    hits = int(torch.isin(first, wrong).sum())
    with torch.no_grad():
        predicted = model(torch.stack([rows for rows, _ in data])).argmax(1)
    accuracy = (predicted == true).float().mean().item()
    print(f"accuracy {accuracy:.1%} on these texts, by their true labels")
    print(f"{hits} of the first {len(first)} suspects of {len(true)} texts have a wrong label")


if __name__ == "__main__":
    main()
