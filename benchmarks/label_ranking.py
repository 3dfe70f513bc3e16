"""Compares rankings of labels on the trainings of ``watched_runs.py``.

    python benchmarks/watched_runs.py --data DIR --out RUNS --seeds 3
    python benchmarks/label_ranking.py RUNS --json docs/results/labels.json

What was recorded in each training is given to a ``LabelWatch`` batch by batch, as its loop would
have done. After some epochs, its ranking is compared with two others that need one training: the
loss (the mean cross-entropy with the same weights), and the area under the margin (AUM, Pleiss et
al., NeurIPS 2020: the mean over all epochs of the logit of the label minus the largest other one).

With ``--cleanlab`` (``pip install cleanlab``), cleanlab ranks the samples by the probabilities of
the five networks of ``watched_runs.py --folds``, where they exist, and by ``to_cleanlab()``.

For each ranking: the ROC area, the wrong labels among the first 100, 500 and 1,000, and the share
of right suggestions for the wrong labels among the first 1,000.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import fineprune as fp
from fineprune.training.hardware import describe
from fineprune.training.suspicion import Suspicion, detection

BATCH, CLASSES = 128, 10
AFTER = (3, 6, 10, 20, 30)
FIRST = (100, 500, 1000)
METHODS = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")

Labels = npt.NDArray[np.int64]
Scores = npt.NDArray[np.floating[Any]]
Result = dict[str, Any]


def judged(scores: Scores, suggestions: Labels, labels: Labels, true: Labels) -> Result:
    """Compare a ranking with the truth.

    Args:
        scores: One number per sample, of which the largest is the most suspicious; shape (N,).
        suggestions: The suggested class of each sample; int64, shape (N,).
        labels: The labels that were trained; int64, shape (N,).
        true: The right ones; int64, shape (N,).
    """
    wrong = labels != true
    order = np.argsort(-scores, kind="stable")
    found = order[: FIRST[-1]][wrong[order[: FIRST[-1]]]]
    area = detection(Suspicion(torch.from_numpy(scores), None), wrong)["roc_area"]
    return {
        "roc_area": round(area, 4),
        "first": [int(wrong[order[:number]].sum()) for number in FIRST],
        "right_suggestions": round(float((suggestions[found] == true[found]).mean()), 3),
    }


def others(scores: Scores, labels: Labels) -> Scores:
    """Return scores of classes, shape (N, CLASSES), without those of the labels."""
    copied = scores.copy()
    copied[np.arange(len(labels)), labels] = -np.inf
    return copied


def epochs_of(run: Path, watch: fp.LabelWatch) -> Iterator[tuple[int, Result]]:
    """Record a training, and yield what each ranking finds after some epochs."""
    with np.load(run) as arrays:
        order, bits = arrays["order"].astype(np.int64), arrays["logits"]
        labels, true = arrays["labels"], arrays["true"]
    given = torch.from_numpy(labels)
    margins, summed = np.zeros(len(labels)), np.zeros((len(labels), CLASSES))
    for epoch, (samples, row) in enumerate(zip(order, bits, strict=True), start=1):
        logits = torch.from_numpy(row).view(torch.bfloat16)
        for index, part in zip(
            torch.from_numpy(samples).split(BATCH), logits.split(BATCH), strict=True
        ):
            watch.record(index, part, given[index])
        floats = logits.float().numpy()
        own = floats[np.arange(len(samples)), labels[samples]]
        margins[samples] += own - others(floats, labels[samples]).max(1)
        summed[samples] += floats
        if epoch not in AFTER:
            continue
        indices, scores, suggestions = (part.numpy() for part in watch.suspects())
        back = np.argsort(indices)
        shares = watch.to_cleanlab()[1]
        joint = watch.joint()
        losses = watch.state_dict()["evidence"]["sums"]["loss"].numpy()
        rankings = {
            "watch": (scores[back], suggestions[back]),
            "loss": (losses, others(shares, labels).argmax(1)),
            "AUM": (-margins, others(summed, labels).argmax(1)),
        }
        result: Result = {
            name: judged(ranked, suggested, labels, true)
            for name, (ranked, suggested) in rankings.items()
        }
        result["estimated"] = round(float(joint.sum() - joint.trace()))
        yield epoch, result


def cleanlab_rankings(labels: Labels, true: Labels, probabilities: Scores) -> Result:
    """Return what each of cleanlab's scores finds, and how many issues it lists."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    suggested = others(probabilities, labels).argmax(1)
    result: Result = {
        method: judged(
            -get_label_quality_scores(labels, probabilities, method=method), suggested, labels, true
        )
        for method in METHODS
    }
    issues = find_label_issues(labels, probabilities, n_jobs=1)
    result["listed"] = int(issues.sum())
    result["precision"] = round(float((labels != true)[issues].mean()), 3)
    return result


def folds_of(run: Path) -> Scores | None:
    """Return the out-of-sample probabilities of a run; None if they are not complete."""
    parts = sorted(run.parent.glob(f"{run.stem}-fold-?.npz"))
    probabilities = np.zeros((0, CLASSES), np.float32)
    index = np.zeros(0, np.int64)
    for part in parts:
        with np.load(part) as arrays:
            index = np.concatenate([index, arrays["index"]])
            probabilities = np.concatenate([probabilities, arrays["probabilities"]])
    with np.load(run) as arrays:
        complete = len(index) == len(arrays["labels"])
    return probabilities[np.argsort(index)] if complete else None


def compare(run: Path, *, cleanlab: bool) -> Result:
    """Return all results of a run."""
    with np.load(run) as arrays:
        labels, true = arrays["labels"], arrays["true"]
    watch = fp.LabelWatch(len(labels), CLASSES)
    result: Result = {
        "kind": run.stem.rpartition("-")[0],
        "seed": int(run.stem.rpartition("-")[2]),
        "wrong": int((labels != true).sum()),
        "after": {str(epoch): found for epoch, found in epochs_of(run, watch)},
    }
    if cleanlab:
        result["cleanlab, in-sample"] = cleanlab_rankings(labels, true, watch.to_cleanlab()[1])
        probabilities = folds_of(run)
        if probabilities is not None:
            result["cleanlab, five more trainings"] = cleanlab_rankings(labels, true, probabilities)
    return result


def table(results: list[Result]) -> str:
    """Return the results as Markdown: means over the seeds, with the least and the largest."""
    lines = ["| kind | epochs | ranking | ROC area | first 100 | 500 | 1,000 | right suggestions |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for kind in dict.fromkeys(result["kind"] for result in results):
        runs = [result for result in results if result["kind"] == kind]
        for after in AFTER:
            for name in ("watch", "loss", "AUM"):
                rows = [run["after"][str(after)][name] for run in runs]
                lines.append(f"| {kind} | {after} | {name} | {cells(rows)} |")
        for name in ("cleanlab, in-sample", "cleanlab, five more trainings"):
            for method in METHODS:
                rows = [run[name][method] for run in runs if name in run]
                if rows:
                    lines.append(f"| {kind} | | {name}, {method} | {cells(rows)} |")
    return "\n".join(lines)


def cells(rows: list[Result]) -> str:
    """Return the figures of several seeds as cells of a table."""
    columns = [[row["roc_area"] for row in rows]]
    columns += [[row["first"][place] for row in rows] for place in range(len(FIRST))]
    columns += [[row["right_suggestions"] for row in rows]]
    forms = ("{:.3f}", "{:.0f}", "{:.0f}", "{:.0f}", "{:.2f}")
    return " | ".join(
        form.format(np.mean(column))
        + (f" ({form.format(min(column))} to {form.format(max(column))})" if len(rows) > 1 else "")
        for form, column in zip(forms, columns, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="folder of the runs of watched_runs.py")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--cleanlab", action="store_true", help="also rank with cleanlab")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [run for run in sorted(options.runs.glob("*-?.npz")) if "fold" not in run.stem]
    results = [compare(run, cleanlab=options.cleanlab) for run in runs]
    print(table(results))
    for result in results:
        numbers = ", ".join(f"{e}: {found['estimated']}" for e, found in result["after"].items())
        print(
            f"{result['kind']}, seed {result['seed']}: {result['wrong']} wrong labels; estimated "
            f"after epoch {numbers}"
        )
    if options.json:
        about = describe("cpu", 1)
        text = json.dumps({"about": about, "runs": results}, indent=1) + "\n"
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
