"""The gallery of suspected wrong labels in the report on a comparison."""

import numpy as np
from markupsafe import Markup

from fineprune.errors import InputError
from fineprune.experiments.arm_table import Group
from fineprune.inspection.inspected import Inspected, read_inspected
from fineprune.inspection.known_samples import KnownSamples, known_samples
from fineprune.inspection.shown_samples import shown_samples
from fineprune.inspection.suspects import Suspects, suspects_of
from fineprune.report.sample_gallery import VISIBLE, SampleViews, make_gallery
from fineprune.report.verdict import method_of
from fineprune.runs.files import HISTORY

_BYTES = 200_000


def first_suspects(group: Group) -> tuple[str, Markup] | None:
    """Return the first suspects of the method's first run, or of the first run without a method.

    Returns:
        What the gallery shows, and its cards; None if the run has kept no history, or if its
        pictures cannot be loaded.
    """
    arm = method_of(group) or group.arms[0]
    run = group.of(arm)[0]
    if not (run.path / HISTORY).exists():
        return None
    try:
        inspected = read_inspected([run])[0]
        samples = known_samples(inspected, network=False)
        show = shown_samples(samples, own_data=False)
    except InputError:  # The history is damaged, but a report needs the results only.
        return None
    suspects = suspects_of(inspected, most=VISIBLE)
    views = SampleViews(show, _BYTES)
    cards = make_gallery(samples, suspects, top_loss(inspected, suspects), views)
    note = (
        f"The first {len(suspects)} suspects of {arm} with seed {run.summary.seed}. "
        f"{suspects_note(samples)} fineprune inspect shows more."
    )
    return note, cards


def suspects_note(samples: KnownSamples) -> str:
    """Return what a gallery of suspects shows."""
    if samples.run.watch is None:
        first = "The samples with the largest moving averages of the loss, the largest first."
    else:
        first = (
            "The samples whose predictions contradict their labels most, over all epochs that "
            "trained them. The suggested label is the class that contradicts it most; the "
            "percentage is the share of the last epochs in which the network predicted it."
        )
    parts = [f"{first} A suspect is not always wrong: a sample can also be rare or difficult."]
    if samples.outputs is not None:
        parts.append(
            "After it comes what the trained network predicts for the picture, with its confidence."
        )
        if samples.outputs.features is not None:
            parts.append(
                "Each of the first cards ends with the nearest neighbours of the sample in the "
                "network's last features, with their labels."
            )
    parts.append("The line is the loss over the epochs, with gaps where the sample was skipped.")
    if not np.array_equal(samples.training_set.index, np.arange(len(samples))):
        parts.append("The numbers of the samples count the whole training set of the dataset.")
    if samples.right_label is not None:
        parts.append("It is known which labels are wrong, and the cards say so.")
    return " ".join(parts)


def top_loss(run: Inspected, ranked: Suspects) -> float:
    """Return the upper edge of the sparklines, above nearly all losses of the first suspects."""
    losses = run.history.losses[:, ranked.index[:1000]].astype(np.float64)
    finite = losses[np.isfinite(losses)]
    return max(float(np.percentile(finite, 99.9)), 1e-3) if len(finite) else 1.0
