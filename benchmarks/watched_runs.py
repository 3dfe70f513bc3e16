"""Trains a recipe without skipping, and keeps what a ``LabelWatch`` would be given, step by step.

    python benchmarks/watched_runs.py RUNS/random-0.npz recipes/resnet9.toml data.label_noise=0.3

The training is that of ``fineprune train RECIPE ... pruning.policy=full``, bit for bit. The
file has the samples and the logits of each step, so that ``label_ranking.py`` compares rankings
without training again. A finished file is not made again.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fineprune.labels.evidence import Evidence
from fineprune.training.recipe import read_recipe
from fineprune.training.trainer import train


class Recorded:
    """Keeps each batch that an ``Evidence`` records."""

    def __init__(self) -> None:
        self.samples: list[Any] = []
        self.logits: list[Any] = []
        self.labels: list[Any] = []

    def record(self, evidence: Evidence, index: Any, logits: Any, labels: Any) -> None:
        self.samples.append(index.numpy().astype(np.int32))
        self.logits.append(logits.bfloat16().view(torch.int16).numpy().copy())
        self.labels.append(labels.numpy().copy())
        _record(evidence, index, logits, labels)


_record = Evidence.record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the file to write")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("changes", nargs="*", help="section.key=value")
    options = parser.parse_args()
    if options.file.exists():
        return
    recipe = read_recipe(options.recipe, [*options.changes, "pruning.policy=full"])
    kept = Recorded()
    Evidence.record = lambda *batch: kept.record(*batch)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder) / "run")
    samples, labels = np.concatenate(kept.samples), np.concatenate(kept.labels)
    given = np.empty(samples.max() + 1, np.int64)
    given[samples] = labels
    options.file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = options.file.with_suffix(".part")
    with unfinished.open("wb") as file:
        logits = np.concatenate(kept.logits)
        np.savez_compressed(file, order=samples, logits=logits, labels=given)
    os.replace(unfinished, options.file)


if __name__ == "__main__":
    main()
