r"""Compares rankings of labels on the trainings of ``watched_runs.py``.

    python benchmarks/watched_runs.py --data DIR --out RUNS --seeds 3
    python benchmarks/label_ranking.py RUNS --cleanlab --strongest 1 2 4 \
        --json docs/results/labels.json --page docs/results/labels.md

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
from fineprune.labels.evidence import Evidence
from fineprune.labels.ranking import rank
from fineprune.training.hardware import describe
from fineprune.training.suspicion import Suspicion, detection

BATCH, CLASSES = 128, 10
AFTER = (3, 6, 10, 20, 30)
FIRST = (100, 500, 1000)
BEGIN, END = "<!-- tables of label_ranking.py -->", "<!-- end of the tables -->"
OURS = ("watch", "loss", "AUM")
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


def recorded(run: Path) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the number, the samples and the logits of each epoch in the order of its steps."""
    with np.load(run) as arrays:
        order, bits = arrays["order"].astype(np.int64), arrays["logits"]
    for epoch, (samples, row) in enumerate(zip(order, bits, strict=True), start=1):
        yield epoch, torch.from_numpy(samples), torch.from_numpy(row).view(torch.bfloat16)


def in_batches(
    samples: torch.Tensor, logits: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the samples and the logits of each step of an epoch."""
    yield from zip(samples.split(BATCH), logits.split(BATCH), strict=True)


def record(
    watch: fp.LabelWatch, samples: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor
) -> None:
    """Give one epoch of a training to a watch."""
    for index, part in in_batches(samples, logits):
        watch.record(index, part, labels[index])


def strongest_only(run: Path, number: int, labels: Labels, true: Labels) -> Result:
    """Return what the ranking finds if only so many classes besides the label are stored."""
    evidence = Evidence(len(labels), CLASSES, number)
    given = torch.from_numpy(labels)
    for _, samples, logits in recorded(run):
        for index, part in in_batches(samples, logits):
            evidence.record(index, part, given[index])
    evidence.flush()
    ranking = rank(evidence)
    return judged(ranking.scores.numpy(), ranking.suggestions.numpy(), labels, true)


def epochs_of(
    run: Path, watch: fp.LabelWatch, labels: Labels, true: Labels
) -> Iterator[tuple[int, Result]]:
    """Record a training, and yield what each ranking finds after some epochs."""
    given = torch.from_numpy(labels)
    margins, summed = np.zeros(len(labels)), np.zeros((len(labels), CLASSES))
    for epoch, order, logits in recorded(run):
        record(watch, order, logits, given)
        samples = order.numpy()
        floats = logits.float().numpy()
        own = floats[np.arange(len(samples)), labels[samples]]
        margins[samples] += own - others(floats, labels[samples]).max(1)
        summed[samples] += floats
        if epoch not in AFTER:
            continue
        indices, scores, suggestions = (part.numpy() for part in watch.suspects())
        back = np.argsort(indices)
        shares = watch.to_cleanlab()[1]
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
        result["estimated"] = watch.num_suspects()
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


def compare(run: Path, *, cleanlab: bool, strongest: list[int]) -> Result:
    """Return all results of a run."""
    with np.load(run) as arrays:
        labels, true = arrays["labels"], arrays["true"]
    watch = fp.LabelWatch(len(labels), CLASSES)
    result: Result = {
        "kind": run.stem.rpartition("-")[0],
        "seed": int(run.stem.rpartition("-")[2]),
        "wrong": int((labels != true).sum()),
        "after": {str(epoch): found for epoch, found in epochs_of(run, watch, labels, true)},
    }
    for number in strongest:
        result[f"strongest {number}"] = strongest_only(run, number, labels, true)
    if cleanlab:
        result["cleanlab, in-sample"] = cleanlab_rankings(labels, true, watch.to_cleanlab()[1])
        probabilities = folds_of(run)
        if probabilities is not None:
            result["cleanlab, five more trainings"] = cleanlab_rankings(labels, true, probabilities)
    return result


def tables(results: list[Result]) -> str:
    """Return the results as Markdown: means over the seeds, with the least and the largest.

    Those of storing fewer classes are in the file of results only.
    """
    kinds = dict.fromkeys(result["kind"] for result in results)
    by_kind = {kind: [run for run in results if run["kind"] == kind] for kind in kinds}
    first = " | ".join(f"wrong of {number:,}" for number in FIRST)
    end = [f"| wrong labels | ranking | ROC area | {first} | right suggestions |"]
    end.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    course = [
        "| wrong labels | epochs | ROC area: watch | loss | AUM | wrong of 1,000: watch | loss "
    ]
    course[0] += "| AUM | estimated wrong labels | true |"
    course.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for kind, runs in by_kind.items():
        for name, rows in rankings_of(runs).items():
            end.append(f"| {kind} | {name} | {cells(rows)} |")
        for epoch in map(str, AFTER):
            found = [run["after"][epoch] for run in runs]
            areas = [np.mean([one[name]["roc_area"] for one in found]) for name in OURS]
            hits = [np.mean([one[name]["first"][-1] for one in found]) for name in OURS]
            numbers = [f"{area:.3f}" for area in areas] + [f"{hit:.0f}" for hit in hits]
            estimated = span("{:.0f}", [one["estimated"] for one in found])
            course.append(
                f"| {kind} | {epoch} | {' | '.join(numbers)} | {estimated} | {runs[0]['wrong']} |"
            )
    return "\n".join([*end, "", *course])


def rankings_of(runs: list[Result]) -> dict[str, list[Result]]:
    """Return the results at the end of the runs of one kind, by the names of the rankings."""
    found = {name: [run["after"][str(AFTER[-1])][name] for run in runs] for name in OURS}
    for name in ("cleanlab, in-sample", "cleanlab, five more trainings"):
        for method in METHODS:
            rows = [run[name][method] for run in runs if name in run]
            found |= {f"{name}, {method}": rows} if rows else {}
    return found


def cells(rows: list[Result]) -> str:
    """Return the figures of several seeds as cells of a table."""
    columns = [[row["roc_area"] for row in rows]]
    columns += [[row["first"][place] for row in rows] for place in range(len(FIRST))]
    columns += [[row["right_suggestions"] for row in rows]]
    forms = ("{:.3f}", "{:.0f}", "{:.0f}", "{:.0f}", "{:.2f}")
    return " | ".join(map(span, forms, columns))


def span(form: str, numbers: list[float]) -> str:
    """Return the mean of numbers, with the least and the largest if there are several."""
    mean = form.format(np.mean(numbers))
    if len(numbers) == 1:
        return mean
    return f"{mean} ({form.format(min(numbers))} to {form.format(max(numbers))})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="folder of the runs of watched_runs.py")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--page", type=Path, help="Markdown file in which to replace the tables")
    parser.add_argument(
        "--strongest", type=int, nargs="*", default=[], help="also store only so many classes"
    )
    parser.add_argument("--cleanlab", action="store_true", help="also rank with cleanlab")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [run for run in sorted(options.runs.glob("*-?.npz")) if "fold" not in run.stem]
    results = [compare(run, cleanlab=options.cleanlab, strongest=options.strongest) for run in runs]
    print(tables(results))
    if options.page:
        before, rest = options.page.read_text(encoding="utf-8").split(BEGIN + "\n")
        after = rest.split(END)[1]
        parts = [before, BEGIN, "\n\n", tables(results), "\n\n", END, after]
        options.page.write_text("".join(parts), encoding="utf-8")
    if options.json:
        about = vars(describe("cpu", 1))
        text = json.dumps({"about": about, "runs": results}, indent=1) + "\n"
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
