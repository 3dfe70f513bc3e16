"""Answers the open questions of data fine-pruning from finished runs of several networks and seeds.

    for network in lenet vgg13 resnet18; do train it, see docs/open-questions.md; done
    python benchmarks/open_questions.py runs/lenet runs/vgg13 runs/resnet18 --policy fine-pruning

It prints Markdown tables: how far the samples that are skipped most often, and those with the
highest losses, are the same for other seeds, policies and networks; and what distinguishes the
samples that are skipped most often. ``--json`` prints the same numbers as JSON.
"""

import argparse
import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from table import markdown

from fineprune.inspection.inspected import Inspected, read_inspected
from fineprune.inspection.overlap import Overlap, largest, skipped_overlaps, suspect_overlaps
from fineprune.inspection.pictures import neighbours, outputs_of, pictures_of
from fineprune.inspection.traits import traits
from fineprune.runs.run import read_runs

NEIGHBOURS = 10
# So many of the other samples are compared with the most skipped ones.
OTHERS = 1000


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of pairs of runs, and its overlaps.

    Attributes:
        name: What the runs of a pair share, and what not.
        pairs: The number of pairs.
        jaccard, smallest, largest: The mean Jaccard index of all pairs, and its range.
        by_chance: What is expected for two random sets.
        rank_correlation: The mean rank correlation.
    """

    name: str
    pairs: int
    jaccard: float
    smallest: float
    largest: float
    by_chance: float
    rank_correlation: float


def kind_of(one: Inspected, other: Inspected) -> str | None:
    """Return the kind of a pair of runs; None if they differ in network and policy."""
    network, arm, seed = (
        getattr(one.run.summary, key) == getattr(other.run.summary, key)
        for key in ("network", "arm", "seed")
    )
    if network and arm:
        return f"{one.run.summary.network}, {one.run.summary.arm}: other seed"
    if network:
        return f"{one.run.summary.network}: other policy, {'same' if seed else 'other'} seed"
    return f"{one.run.summary.arm}: other network" if arm else None


def kinds(runs: list[Inspected], overlaps: Iterable[Overlap]) -> list[Kind]:
    """Return the mean overlaps of each kind of pairs."""
    named = {run.name: run for run in runs}
    parts: dict[str, list[Overlap]] = {}
    for overlap in overlaps:
        kind = kind_of(named[overlap.one], named[overlap.other])
        if kind is not None:
            parts.setdefault(kind, []).append(overlap)
    result = []
    for name, part in sorted(parts.items()):
        values = [overlap.jaccard for overlap in part]
        ranks = [o.rank_correlation for o in part if o.rank_correlation is not None]
        result.append(
            Kind(
                name,
                len(part),
                statistics.fmean(values),
                min(values),
                max(values),
                part[0].by_chance,
                statistics.fmean(ranks) if ranks else float("nan"),
            )
        )
    return result


def most_skipped(run: Inspected, share: float) -> npt.NDArray[np.int64]:
    """Return this share of the samples, those that were skipped most often."""
    number = round(len(run.labels) * share)
    return largest(run.times_skipped(), number, seed=run.run.summary.seed)


def differences(run: Inspected, share: float) -> dict[str, float]:
    """Return how the most skipped share of a run's samples differs from the others.

    The properties of the pictures are in standard deviations; the other values are shares.
    """
    chosen = most_skipped(run, share)
    loaded = pictures_of(run.run)
    outputs = outputs_of(run.run, loaded)
    found = {t.name: t.difference for t in traits(loaded.train.images.numpy(), chosen)}
    rest = np.setdiff1d(np.arange(len(run.labels)), chosen)
    rest = np.random.default_rng(0).permutation(rest)[:OTHERS]
    for name, part in (("most skipped", chosen), ("others", rest)):
        found[f"fitted at the end, {name}"] = float(
            (outputs.predictions[part] == run.labels[part]).mean()
        )
        if outputs.features is not None:
            nearest = neighbours(outputs.features, part, NEIGHBOURS)
            same = run.labels[nearest] == run.labels[part][:, None]
            found[f"same label among {NEIGHBOURS} neighbours, {name}"] = float(same.mean())
    return found


def by_network(
    runs: list[Inspected], measure: Callable[[Inspected], dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the mean values of each network over its seeds."""
    parts: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        parts.setdefault(run.run.summary.network, []).append(measure(run))
    return {
        network: {key: statistics.fmean(one[key] for one in measured) for key in measured[0]}
        for network, measured in parts.items()
    }


def class_shares(run: Inspected, share: float) -> dict[str, float]:
    """Return the share of each class among the most skipped samples."""
    names = pictures_of(run.run).train.classes
    counts = np.bincount(run.labels[most_skipped(run, share)], minlength=len(names))
    return {name: float(n / counts.sum()) for name, n in zip(names, counts, strict=True)}


def shared(runs: list[Inspected], share: float) -> tuple[int, float]:
    """Return how many samples are among the most skipped ones of all runs, and by chance."""
    sets = [set(run.training_set().index[most_skipped(run, share)].tolist()) for run in runs]
    return len(set.intersection(*sets)), len(runs[0].labels) * share ** len(runs)


def draw(runs: list[Inspected], file: Path) -> None:
    """Draw the pictures that all runs together skipped most often, and those least often."""
    counts = np.mean([run.times_skipped() for run in runs], axis=0)
    loaded = pictures_of(runs[0].run)
    names = loaded.train.classes
    figure, axes = plt.subplots(8, 15, figsize=(12, 7.6), layout="constrained")
    for half, values, title in ((axes[:4], counts, "Most"), (axes[4:], -counts, "Least")):
        chosen = largest(values, half.size, seed=0)
        for place, (axis, sample) in enumerate(zip(half.flat, chosen, strict=True)):
            axis.imshow(loaded.train.images[sample].permute(1, 2, 0).numpy())
            axis.set_xlabel(names[runs[0].labels[sample]], fontsize=7, labelpad=1)
            axis.set(xticks=[], yticks=[])
            if not place:
                axis.set_title(f"{title} often skipped", fontsize=9, loc="left")
    figure.savefig(file, dpi=100)


def kinds_table(found: list[Kind]) -> str:
    return markdown(
        ["pairs of runs", "n", "Jaccard", "range", "by chance", "rank correlation"],
        (
            [
                kind.name,
                str(kind.pairs),
                f"{kind.jaccard:.2f}",
                f"{kind.smallest:.2f}-{kind.largest:.2f}",
                f"{kind.by_chance:.2f}",
                f"{kind.rank_correlation:.2f}",
            ]
            for kind in found
        ),
    )


def values_table(title: str, values: dict[str, dict[str, float]]) -> str:
    keys = next(iter(values.values()))
    return markdown(
        [title, *values],
        ([key, *(f"{of[key]:.2f}" for of in values.values())] for key in keys),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="runs, or folders of runs")
    parser.add_argument("--policy", default="fine-pruning", help="the policy to describe")
    parser.add_argument("--share", type=float, default=0.1, help="of the samples to compare")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", type=Path, help="write pictures of the samples to this file")
    options = parser.parse_args()
    runs = read_inspected(read_runs(options.runs))
    size = round(min(len(run.labels) for run in runs) * options.share)
    described = [run for run in runs if run.run.summary.arm == options.policy]
    skipped = kinds(runs, skipped_overlaps(runs, size))
    suspects = kinds(runs, suspect_overlaps(runs, size))
    looks = by_network(described, functools.partial(differences, share=options.share))
    classes = by_network(described, functools.partial(class_shares, share=options.share))
    common = {
        "all networks": shared(described, options.share),
        **{
            f"{one} and {other}": shared(
                [run for run in described if run.run.summary.network in (one, other)],
                options.share,
            )
            for one, other in combinations(looks, 2)
        },
    }
    if options.picture:
        draw(described, options.picture)
    if options.json:
        result = {
            "size": size,
            "skipped": [dataclasses.asdict(kind) for kind in skipped],
            "suspects": [dataclasses.asdict(kind) for kind in suspects],
            "looks": looks,
            "classes": classes,
            "shared": common,
        }
        print(json.dumps(result, indent=1))
        return
    print(f"The {size} most skipped samples:\n\n{kinds_table(skipped)}\n")
    print(f"The {size} samples with the highest losses:\n\n{kinds_table(suspects)}\n")
    print(f"{values_table('the most skipped, ' + options.policy, looks)}\n")
    print(f"{values_table('share of the class', classes)}\n")
    for name, (number, chance) in common.items():
        print(f"Most skipped in every run of {name}: {number}, by chance {chance:.2g}")


if __name__ == "__main__":
    main()
