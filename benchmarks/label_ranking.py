r"""Compares rankings of labels on the trainings of ``watched_runs.py``.

    python benchmarks/label_ranking.py RUNS TRUE.npy

Each ``RUNS/KIND-SEED.npz`` is given to a ``LabelWatch`` as its loop would have done. After some
epochs, its ranking is compared with three others that need one training: the mean loss, the area
under the margin (AUM, Pleiss et al., NeurIPS 2020: the mean of the logit of the label
minus the largest other one), and the criterion of AlignPrune (the correlation of a sample's losses
with those of the 100 samples with the smallest mean loss). If cleanlab is installed, it ranks, too,
by the normalised margin of the same mean probabilities.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from table import write

import fineprune as fp

AFTER, FIRST, REFERENCE = (5, 10, 20, 30, 60), 1000, 100

_SETTING = "ResNet-9 on 10,000 images, 60 epochs, means of the seeds"
TITLES = {
    "roc_area": f"ROC area of each ranking; {_SETTING}",
    "first": f"wrong labels among the first {FIRST:,} of each ranking; {_SETTING}",
    "suspects": f"samples with a score above 0; {_SETTING}",
}

Floats = npt.NDArray[np.floating[Any]]
Result = dict[str, Any]


def judged(scores: Floats, wrong: npt.NDArray[np.bool_]) -> Result:
    """Return the ROC area of a ranking, and the wrong labels among the first of it."""
    order = np.argsort(-scores, kind="stable")
    _, place, times = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (times.cumsum() - (times - 1) / 2)[place]  # Equal scores have their mean rank.
    hits, misses = int(wrong.sum()), int((~wrong).sum())
    area = (ranks[wrong].sum() - hits * (hits + 1) / 2) / max(hits * misses, 1)
    return {"roc_area": round(float(area), 4), "first": int(wrong[order[:FIRST]].sum())}


def compare(file: Path, true: npt.NDArray[np.int64]) -> Result:
    """Return what each ranking finds in a training."""
    with np.load(file) as arrays:
        labels, order = arrays["labels"], torch.from_numpy(arrays["order"].astype(np.int64))
        logits = torch.from_numpy(arrays["logits"]).view(torch.bfloat16)
    samples, classes = len(labels), logits.shape[1]
    given, wrong = torch.from_numpy(labels), labels != true[: len(labels)]
    watch = fp.LabelWatch(samples, classes)
    margins, losses, after = np.zeros(samples), [], {}
    parts = zip(order.split(samples), logits.split(samples), strict=True)
    for epoch, (index, rows) in enumerate(parts, start=1):
        for part, row in zip(index.split(128), rows.split(128), strict=True):
            watch.record(part, row, given[part])
        sorted_rows = rows.float()[index.argsort()]
        own = sorted_rows.gather(1, given[:, None])[:, 0]
        others = sorted_rows.scatter(1, given[:, None], -torch.inf).amax(1)
        margins += (others - own).numpy()
        losses.append((sorted_rows.logsumexp(1) - own).numpy())
        if epoch in AFTER:
            rankings = {
                "watch": watch.ranking().scores.numpy(),
                "loss": np.mean(losses, 0),
                "AUM": margins,
                "AlignPrune": misaligned(np.stack(losses, 1)),
                **by_cleanlab(watch),
            }
            found = {name: judged(scores, wrong) for name, scores in rankings.items()}
            suspects = rankings["watch"] > 0
            after[str(epoch)] = found | {
                "estimated": int(suspects.sum()),
                "precision": round(float(wrong[suspects].mean()), 3) if suspects.any() else None,
                "recall": round(float(suspects[wrong].mean()), 3) if wrong.any() else None,
            }
    kind, _, seed = file.stem.rpartition("-")
    return {"kind": kind, "seed": int(seed), "wrong": int(wrong.sum()), "after": after}


def misaligned(losses: Floats) -> Floats:
    """Return minus the correlation of each sample's losses with those of the surest ones."""
    surest = losses[np.argsort(losses.mean(1), kind="stable")[:REFERENCE]].mean(0)
    own, usual = losses - losses.mean(1, keepdims=True), surest - surest.mean()
    norms = np.linalg.norm(own, axis=1) * np.linalg.norm(usual)
    scores: Floats = -(own @ usual) / np.maximum(norms, 1e-12)
    return scores


def by_cleanlab(watch: fp.LabelWatch) -> dict[str, Floats]:
    try:
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        return {}
    return {"cleanlab": -get_label_quality_scores(*watch.to_cleanlab(), method="normalized_margin")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="folder of the files of watched_runs.py")
    parser.add_argument("true", type=Path, help="the true label of each sample, as .npy")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(options.runs.glob("*-*.npz"))
    results = [compare(file, np.load(options.true)) for file in files]
    results = [result for result in results if result["wrong"]]
    names = [name for name, value in results[0]["after"]["5"].items() if isinstance(value, dict)]
    groups = [
        (kind, epoch, [run for run in results if run["kind"] == kind])
        for kind in dict.fromkeys(result["kind"] for result in results)
        for epoch in results[0]["after"]
    ]
    command = "python benchmarks/label_ranking.py runs true.npy"
    for file, key, form in (("labels-area", "roc_area", ".3f"), ("labels-first", "first", ".0f")):
        columns = {"wrong labels": "", "epochs": ""} | dict.fromkeys(names, form)
        rows = [
            [kind, epoch, *([run["after"][epoch][name][key] for run in runs] for name in names)]
            for kind, epoch, runs in groups
        ]
        write(options.out / f"{file}.json", TITLES[key], command, columns, rows)
    found = {"estimated": ",.0f", "precision": ".2f", "recall": ".2f"}
    columns = {"wrong labels": "", "epochs": "", "wrong": ",.0f"} | found
    rows = [
        [kind, epoch, [run["wrong"] for run in runs]]
        + [[run["after"][epoch][name] for run in runs] for name in found]
        for kind, epoch, runs in groups
    ]
    write(options.out / "labels-suspects.json", TITLES["suspects"], command, columns, rows)


if __name__ == "__main__":
    main()
