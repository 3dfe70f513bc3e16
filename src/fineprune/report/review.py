"""The review of suspected labels on the page of an inspection, from one or several runs."""

from collections.abc import Sequence

import numpy as np

from fineprune.errors import InputError
from fineprune.inspection.inspected import Inspected
from fineprune.inspection.known_samples import KnownSamples
from fineprune.inspection.pictures import neighbours
from fineprune.inspection.shown_samples import Show
from fineprune.inspection.suspects import Suspects, suspects_of
from fineprune.labels.label_watch import FEWEST_REVIEWED, MOST_REVIEWED
from fineprune.labels.review_page import Card, Review
from fineprune.report.sample_gallery import SampleViews
from fineprune.report.sparkline import sparkline
from fineprune.report.suspected_labels import top_loss
from fineprune.runs.training_set import UNKNOWN, TrainingSet

# The size of all pictures and texts, in bytes.
_BYTES = 2_000_000


def make_review(
    samples: KnownSamples, runs: Sequence[Inspected], most: int | None, show: Show | InputError
) -> Review | None:
    """Return the review of the suspects of the first run, by the evidence of all runs like it.

    Args:
        samples: What is known about the samples of the first run.
        runs: The runs.
        most: The number of suspects; None for the estimated number of wrong labels, but at least
            20. At most 500 are reviewed.
        show: Shows the samples, or says why nothing can.

    Returns:
        The review; None if the label of a sample is not known, so that no table can be written.
    """
    training_set = samples.training_set
    if (training_set.labels == UNKNOWN).any():
        return None
    runs = _reviewed_runs(runs, training_set)
    first = runs[0]
    ranked = suspects_of(*runs)
    wanted = max(ranked.number, FEWEST_REVIEWED) if most is None else most
    number = min(wanted, MOST_REVIEWED, len(ranked))
    suspects = ranked.at(slice(number))
    notes = _notes(runs, ranked, number, training_set)
    views = SampleViews(show, _BYTES)
    features = None if samples.outputs is None else samples.outputs.features
    near = None if features is None else neighbours(features, suspects.index)
    top = top_loss(first, ranked)
    of_runs = [suspects_of(run) for run in runs] if len(runs) > 1 else []
    suspected = [set(part.index[: part.number].tolist()) for part in of_runs]
    cards = []
    for place, sample in enumerate(suspects.index.tolist()):
        picture, text = views.view(sample)
        lines = [f"mean loss {samples.loss[sample]:.2f}"]
        if suspected:
            times = sum(sample in part for part in suspected)
            lines.append(f"suspected by {times} of {len(runs)} runs")
        if near is not None:
            lines.append(f"neighbours: {', '.join(map(samples.label, near[place]))}")
        if samples.right_label is not None:
            truth = samples.name(int(samples.right_label[sample]))
            said = "wrong" if samples.is_wrong(sample) else "right"
            lines.append(f"the label is {said}, the truth is {truth}")
        cards.append(
            Card(
                index=int(training_set.index[sample]),
                key=training_set.key(sample),
                label=int(first.labels[sample]),
                suggestion=int(suspects.suggestion[place]),
                agreement=float(suspects.agreement[place]),
                score=float(suspects.score[place]),
                picture=picture,
                text=text,
                line=sparkline(first.history.losses[:, sample], top),
                notes=tuple(lines),
            )
        )
    if views.missing is not None:
        notes.append(views.missing)
    return Review(cards, samples.names, training_set.labels, training_set.keys, notes)


def _reviewed_runs(runs: Sequence[Inspected], training_set: TrainingSet) -> list[Inspected]:
    """Return the runs whose evidence is added: those with the labels of the first one.

    This is the first run alone if it has kept no evidence.
    """
    first = runs[0]
    if first.watch is None:
        return [first]
    return [
        run
        for run in runs
        if run.watch is not None
        and run.watch.num_classes == first.watch.num_classes
        and np.array_equal(run.labels, first.labels)
        and np.array_equal(run.training_set().index, training_set.index)
    ]


def _notes(
    runs: Sequence[Inspected], ranked: Suspects, shown: int, training_set: TrainingSet
) -> list[str]:
    first = runs[0]
    evidence = "" if len(runs) == 1 else f", by the evidence of {len(runs)} runs together"
    notes = [
        f"{ranked.number:,} of {len(first.labels):,} labels are suspected{evidence}. The first "
        f"{shown:,} are listed. A suspect is not always wrong: look at it before you change it. "
        f"The percentage is the share of the last epochs in which the network predicted the "
        f"suggestion, and the line is the loss over the epochs."
    ]
    if first.watch is not None and len(runs) == 1:
        notes += first.watch.facts(training_set.classes or None)[1:]
    return notes
