"""The page of an inspection: what finished runs skipped and suspected, in one HTML file."""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fineprune.errors import InputError
from fineprune.experiments.arm_table import BASELINE
from fineprune.inspection.inspected import Inspected, runs_by_arm
from fineprune.inspection.inspected_arm import (
    COUNTED,
    InspectedArm,
    Inspection,
    inspected_arm,
    most_skipped_tenth,
)
from fineprune.inspection.known_samples import KnownSamples, known_samples
from fineprune.inspection.overlap import skipped_overlaps, suspect_overlaps
from fineprune.inspection.per_class import confusion
from fineprune.inspection.shown_samples import Show, shown_samples
from fineprune.inspection.suspects import Suspects, suspects_of
from fineprune.labels.label_watch import MOST_REVIEWED
from fineprune.labels.review_page import review_section
from fineprune.report.facts import distinct, facts
from fineprune.report.inspection_tables import (
    class_table,
    confused_pairs,
    overlap_table,
    share_table,
    suspects_table,
    trait_table,
)
from fineprune.report.page_template import write_page
from fineprune.report.review import make_review
from fineprune.report.sample_gallery import VISIBLE, SampleViews, make_gallery
from fineprune.report.suspected_labels import suspects_note, top_loss
from fineprune.report.table import Table, percent
from fineprune.runs.run import split_by, told_apart

_LOGGER = logging.getLogger(__name__)

# A confusion matrix in the page: the caption, and the share of each cell in its row.
Heat = tuple[str, npt.NDArray[np.float64]]

# The largest size of a page with up to ten networks and arms, in bytes, and what the tables and the
# texts of the cards of an arm take of it. Pictures that do not fit are left out.
_MOST_BYTES = 5_000_000
_TEXT_BYTES = 300_000

# The number of samples in each gallery, unless another number of suspects is given.
_SHOWN = 100

# A confusion matrix of more classes is not readable.
_MOST_CLASSES = 20


def write_inspection(
    runs: Sequence[Inspected],
    path: Path,
    *,
    most: int | None = None,
    network: bool = True,
    own_data: bool = False,
) -> Inspection:
    """Write a page on what finished runs skipped and suspected, as one self-contained HTML file.

    It shows the samples of the first run of each network and arm. The other runs are compared with
    it. The file has at most 5 MB with up to ten networks and arms: if necessary, it shows fewer
    pictures, and says so.

    Args:
        runs: The runs, from ``read_inspected``.
        path: The HTML file. A missing folder is made, and an old file is replaced atomically.
        most: The number of suspects to review and to show for each network and arm, at least 1; at
            most 500 are. None for the estimated number of wrong labels, at least 20, to review, and
            for 100 to show.
        network: Whether to pass the pictures through the trained networks, which shows the final
            predictions and the nearest neighbours.
        own_data: Whether the code of user-defined data may be run to show its samples, and that of
            a user-defined network to pass them through it.
    """
    arms = runs_by_arm(runs)
    headings = _headings(arms)
    known = [  # The first is runs[0].
        known_samples(members[0], network, own_code=own_data) for members in arms
    ]
    shows = _shows(known, own_data)
    review = make_review(known[0], runs, most, shows[0])
    section_of_review = "" if review is None else review_section(review)
    left = _MOST_BYTES - len(section_of_review.encode())
    figures, sections = [], []
    for number, (heading, samples, show) in enumerate(zip(headings, known, shows, strict=True), 1):
        full = _full_of(samples.run, runs)
        ranked = suspects_of(samples.run)
        shown = min(most or _SHOWN, MOST_REVIEWED)
        arm = inspected_arm(samples, ranked, full, heading, shown)
        views = SampleViews(show, left // len(arms) - _TEXT_BYTES)
        figures.append(arm)
        sections.append(_section(samples, ranked, arm, full, f"arm-{number}", views))
    skipped, suspected = skipped_overlaps(runs), suspect_overlaps(runs)
    networks = split_by(
        lambda run: (run.summary.network, run.summary.dataset), [r.run for r in runs]
    )
    overlaps = {"The most skipped samples": skipped, "The most suspected samples": suspected}
    write_page(
        path,
        "inspection.html.j2",
        title=_title(runs),
        lead=", ".join(distinct(run.name for run in runs)),
        facts=[facts(of_network) for of_network in networks.values()],
        review=Markup(section_of_review),  # It has escaped all names.
        sections=sections,
        overlaps=[overlap_table(title, found, runs) for title, found in overlaps.items() if found],
    )
    return Inspection([run.name for run in runs], figures, skipped, suspected)


def _section(
    samples: KnownSamples,
    ranked: Suspects,
    figures: InspectedArm,
    full: Inspected | None,
    anchor: str,
    views: SampleViews,
) -> dict[str, Any]:
    """Return what the section of a run shows."""
    run, summary = samples.run, samples.run.run.summary
    top = top_loss(run, ranked)
    galleries = []
    if figures.shown:
        chosen = ranked.at(slice(figures.shown))
        cards = make_gallery(samples, chosen, top, views, detailed=True)
        galleries.append(("Suspected wrong labels", suspects_note(samples), cards))
    galleries += _skipped_galleries(samples, ranked, top, views)
    common = "most skipped" if samples.times_skipped.any() else "most suspected"
    tables = [share_table(run.labels, most_skipped_tenth(samples), samples.names, common)]
    if figures.traits:
        tables.insert(0, trait_table(figures.traits, common))
    heats, confused = _confusions(run, full, samples.names)
    wrong = figures.wrong_labels
    missing = figures.missing if views.missing is None else [*figures.missing, views.missing]
    return {
        "anchor": anchor,
        "heading": figures.heading,
        "lead": _lead(figures, summary.seed, len(run.history.epochs)),
        "missing": missing,
        "found": None if wrong is None else suspects_table(figures.found, wrong, len(samples)),
        "galleries": galleries,
        "classes": class_table(
            figures.classes, samples.names, summary.evaluated_on, full is not None
        ),
        "heats": heats,
        "class_names": list(samples.names),
        "confused": confused,
        "trait_title": f"What the {common} tenth has in common",
        "traits": tables,
    }


def _shows(known: Sequence[KnownSamples], own_data: bool) -> list[Show | InputError]:
    """Return for each run what shows its samples, or why nothing can.

    Runs with the same samples share it, because it may run the user's code.
    """
    shows: dict[Hashable, Show | InputError] = {}
    places = [_place_of(samples) for samples in known]
    for place, samples in zip(places, known, strict=True):
        if place in shows:
            continue
        try:
            shows[place] = shown_samples(samples, own_data=own_data)
        except InputError as error:
            _LOGGER.warning("%s: no samples are shown: %s", samples.run.run.path, error)
            shows[place] = error
    return [shows[place] for place in places]


def _place_of(samples: KnownSamples) -> Hashable:
    """Return what is the same for runs whose samples are read from the same place."""
    if samples.pictures is not None:
        return id(samples)
    training_set = samples.training_set
    data = repr(samples.run.run.recipe["data"])
    return data, training_set.keys, training_set.index.tobytes()


def _skipped_galleries(
    samples: KnownSamples, ranked: Suspects, top: float, views: SampleViews
) -> list[tuple[str, str, Markup]]:
    """Return the galleries of the samples that were skipped most often, and never.

    Each is a title, an explanation and the cards. The arguments are those of ``make_gallery``, but
    with all samples that have a loss.
    """
    times = samples.times_skipped[ranked.index]
    losses = samples.loss[ranked.index]
    large = losses > np.median(losses) if len(ranked) else np.empty(0, np.bool_)
    # Samples that were skipped equally often stay in order of their losses.
    by_loss = np.argsort(-losses, kind="stable")
    hard = by_loss[np.argsort(-times[by_loss], kind="stable")]
    easy = by_loss[::-1][np.argsort(-times[by_loss[::-1]], kind="stable")]
    least = times.min(initial=len(samples.run.history.epochs))
    rarely = "Never skipped" if least == 0 else f"Least often skipped ({least} epochs)"
    order = "Those that were skipped in the most epochs come first."
    wanted = [
        (
            "Most often skipped, with large losses",
            f"These samples have average losses above the median. {order}",
            ranked.at(hard[(large & (times > 0))[hard]][:_SHOWN]),
        ),
        (
            "Most often skipped, with small losses",
            f"These samples have average losses up to the median. {order}",
            _undoubted(ranked.at(easy[(~large & (times > 0))[easy]][:_SHOWN])),
        ),
        (
            rarely if times.any() else "The smallest losses",
            "Those with the smallest average losses come first."
            if times.any()
            else "This run skipped no samples. The network learned these ones best.",
            _undoubted(ranked.at(by_loss[::-1][(times == least)[by_loss[::-1]]][:VISIBLE])),
        ),
    ]
    return [
        (title, note, make_gallery(samples, chosen, top, views))
        for title, note, chosen in wanted
        if len(chosen)
    ]


def _undoubted(suspects: Suspects) -> Suspects:
    """Return the samples without suggested labels."""
    return replace(suspects, suggestion=np.full(len(suspects), -1))


def _lead(figures: InspectedArm, seed: int, epochs: int) -> list[str]:
    skipped = (
        f"{percent(figures.skipped, 1)} % of the sample-steps" if figures.skipped else "no samples"
    )
    sentences = [
        f"This section shows the run with seed {seed}. It had {figures.samples:,} training samples "
        f"and {epochs} epochs, and skipped {skipped}."
    ]
    sentences += [
        f"Of the first {row.first:,} suspects, {row.wrong:,} have wrong labels (by chance, it "
        f"would be {row.by_chance:,.0f}). The suggested label is right for "
        f"{row.suggestions_right:,} of these {row.wrong:,}."
        for row in figures.found
        if row.first in COUNTED and row.first <= (figures.wrong_labels or 0)
    ]
    return sentences


def _confusions(
    run: Inspected, full: Inspected | None, names: tuple[str, ...]
) -> tuple[list[Heat], Table | None]:
    """Return the confusion matrices, or a table if there are many classes; neither if not known."""
    matrix = confusion(run, len(names))
    if matrix is None:
        return [], None
    beside = None if full is None else confusion(full, len(names))
    if len(names) > _MOST_CLASSES:
        return [], confused_pairs(matrix, beside, names)
    pairs = [(run, matrix)]
    if full is not None and beside is not None:
        pairs.append((full, beside))
    return [
        (one.name, of / np.maximum(of.sum(axis=1, keepdims=True), 1)) for one, of in pairs
    ], None


def _full_of(run: Inspected, runs: Sequence[Inspected]) -> Inspected | None:
    """Return the run that skips nothing beside which a run was trained, if there is one."""
    if run.run.summary.arm == BASELINE:
        return None

    def trained(one: Inspected) -> tuple[object, ...]:
        summary = one.run.summary
        places = summary.network, summary.dataset, summary.train_samples, summary.evaluated_on
        return (*places, summary.seed, one.run.comparison, one.settings(besides=("pruning",)))

    return next(
        (
            other
            for other in runs
            if other.run.summary.arm == BASELINE and trained(other) == trained(run)
        ),
        None,
    )


def _headings(arms: Sequence[list[Inspected]]) -> list[str]:
    runs = [members[0].run for members in arms]
    headings = [f"{s.network} on {s.dataset}, {s.arm}" for s in (run.summary for run in runs)]
    headings = told_apart(headings, [f", {run.title}" for run in runs])
    return told_apart(headings, [f", {run.path}" for run in runs])


def _title(runs: Sequence[Inspected]) -> str:
    titles = distinct(run.run.title for run in runs)
    return f"Samples of {titles[0]}" if len(titles) == 1 else f"Samples of {len(runs)} runs"
