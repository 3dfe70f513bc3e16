"""InspectedArm: the figures of the run that stands for a network and an arm."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fineprune.inspection.inspected import Inspected
from fineprune.inspection.known_samples import KnownSamples
from fineprune.inspection.overlap import Overlap, largest
from fineprune.inspection.per_class import ClassRow, class_rows
from fineprune.inspection.suspects import Suspects, suspicion_in
from fineprune.inspection.traits import Trait, traits

# Wrong labels are counted among this many first suspects, and among as many as there are of them.
COUNTED = (100, 1000)

_FIRST = 10


@dataclass(frozen=True)
class Found:
    """How many of the first suspects have wrong labels.

    Attributes:
        first: The number of suspects that are looked at.
        wrong: How many of them have wrong labels.
        by_chance: How many would have wrong labels if samples were suspected at random.
        suggestions_right: How many of the wrong labels have the right suggestion.
    """

    first: int
    wrong: int
    by_chance: float
    suggestions_right: int


@dataclass(frozen=True)
class FirstSuspect:
    """A suspected wrong label.

    Attributes:
        index: The index of the sample in the whole training set of the dataset; in the run's
            training set if this is not known.
        key: Its key, such as the path of its file; None without keys.
        label: The name of its label, or its number if the names are not known.
        suggestion: The suggested label; None without a suggestion.
        agreement: The share of the last epochs that predicted the suggestion.
        score: How suspicious it is; see ``Suspects``.
        wrong: Whether the label is wrong; None if this is not known.
    """

    index: int
    key: str | None
    label: str
    suggestion: str | None
    agreement: float
    score: float
    wrong: bool | None


@dataclass(frozen=True)
class InspectedArm:
    """The figures of the run that stands for a network and an arm.

    Attributes:
        name: The name of the run.
        heading: The heading of its section.
        samples: The number of training samples.
        skipped: The share of the sample-steps that was skipped.
        suspects: The number of samples that are called suspicious; see ``Suspects``.
        shown: The number of suspects in the page.
        first: The first suspects, at most ten.
        wrong_labels: The number of wrong labels; None if this is not known.
        found: How many of the first suspects have wrong labels; empty if this is not known.
        classes: One row per class.
        class_names: The name of each class.
        traits: What the most skipped tenth of the pictures looks like, or the most suspected one
            if nothing was skipped; empty without pictures.
        missing: One sentence for everything that cannot be shown.
    """

    name: str
    heading: str
    samples: int
    skipped: float
    suspects: int
    shown: int
    first: list[FirstSuspect]
    wrong_labels: int | None
    found: list[Found]
    classes: list[ClassRow]
    class_names: list[str]
    traits: list[Trait]
    missing: list[str]


@dataclass(frozen=True)
class Inspection:
    """The figures of an inspection, which ``dataclasses.asdict`` makes ready for JSON.

    Attributes:
        runs: The names of all inspected runs.
        arms: The figures of the first run of each network and arm.
        skipped_overlaps: The overlap of the most skipped tenth, for each pair of runs.
        suspect_overlaps: The overlap of the most suspicious tenth, for each pair of runs.
    """

    runs: list[str]
    arms: list[InspectedArm]
    skipped_overlaps: list[Overlap]
    suspect_overlaps: list[Overlap]


def inspected_arm(
    samples: KnownSamples, ranked: Suspects, full: Inspected | None, heading: str, most: int
) -> InspectedArm:
    """Return the figures of a run, of which a page shows at most so many suspects.

    All samples with a loss are ranked, the most suspicious first. ``full`` is the run to compare
    with, which trains all samples; None without one.
    """
    run = samples.run
    missing = list(samples.missing)
    if run.evaluated is None:
        missing.append("No confusion matrix is shown: the run has not kept its predictions.")
    pictures, right = samples.pictures, samples.right_label
    return InspectedArm(
        name=run.name,
        heading=heading,
        samples=len(samples),
        skipped=float(samples.times_skipped.mean() / len(run.history.epochs)),
        suspects=ranked.number,
        shown=min(most, len(ranked)),
        first=_first(samples, ranked, min(most, _FIRST)),
        wrong_labels=None if right is None else int((right != run.labels).sum()),
        found=[] if right is None else _found(run.labels, right, ranked),
        classes=class_rows(run, full, len(samples.names)),
        class_names=list(samples.names),
        traits=[] if pictures is None else traits(pictures, most_skipped_tenth(samples)),
        missing=missing,
    )


def most_skipped_tenth(samples: KnownSamples) -> npt.NDArray[np.int64]:
    """Return the most skipped tenth of the samples, at least one.

    If nothing was skipped, it is the most suspected tenth.
    """
    values = samples.times_skipped if samples.times_skipped.any() else suspicion_in(samples.run)
    return largest(values)


def _found(
    labels: npt.NDArray[np.int64], right: npt.NDArray[np.int64], ranked: Suspects
) -> list[Found]:
    """Return how many of the first suspects have wrong labels, which differ from the right ones."""
    total = int((labels != right).sum())
    wrong = (labels != right)[ranked.index]
    agrees = wrong & (ranked.suggestion == right[ranked.index])
    return [
        Found(
            first=first,
            wrong=int(wrong[:first].sum()),
            by_chance=first * total / len(labels),
            suggestions_right=int(agrees[:first].sum()),
        )
        for first in sorted({*COUNTED, total})
        if 0 < first <= len(ranked)
    ]


def _first(samples: KnownSamples, ranked: Suspects, number: int) -> list[FirstSuspect]:
    first = ranked.at(slice(number))
    return [
        FirstSuspect(
            index=int(samples.training_set.index[index]),
            key=samples.training_set.key(index),
            label=samples.label(index),
            suggestion=samples.name(int(suggestion)),
            agreement=float(agreement),
            score=float(score),
            wrong=samples.is_wrong(index),
        )
        for index, score, suggestion, agreement in zip(
            first.index, first.score, first.suggestion, first.agreement, strict=True
        )
    ]
