"""The page of an inspection: what finished runs skipped and suspected, in one HTML file."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.experiments.arm_table import BASELINE
from fineprune.inspection.inspected import Inspected
from fineprune.inspection.overlap import Overlap, largest, skipped_overlaps, suspect_overlaps
from fineprune.inspection.per_class import ClassRow, class_rows, confusion
from fineprune.inspection.suspects import Suspects, suspects_of
from fineprune.inspection.traits import Trait, traits
from fineprune.report.facts import distinct, facts
from fineprune.report.inspection_tables import (
    Found,
    class_table,
    confused_pairs,
    overlap_table,
    share_table,
    suspects_table,
    trait_table,
)
from fineprune.report.known_samples import KnownSamples, known_samples
from fineprune.report.page_template import template
from fineprune.report.sample_gallery import VISIBLE, Gallery, make_gallery
from fineprune.report.suspected_labels import suspects_note, top_loss
from fineprune.report.table import Table, percent
from fineprune.runs.files import write_atomically

Index = npt.NDArray[np.int64]
Matrix = npt.NDArray[np.int64]
Overlapping = Callable[[list[Inspected], int], list[Overlap]]

# The largest size of a page with up to twenty networks and arms, in bytes. Of each of them, the
# gallery of the suspects is shown with fewer pictures, and then with fewer cards, if it is needed.
_MOST_BYTES = 5_000_000
_TABLE_BYTES = 150_000
_LEAST_BYTES = 50_000

# The number of samples in each gallery of skipped samples.
_SKIPPED = 100

# Overlaps and traits are those of this share of the samples.
_SHARE = 10

# A confusion matrix of more classes is not readable.
_MOST_CLASSES = 20

# The wrong labels are counted among so many suspects.
_FIRST = (100, 1000)


@dataclass(frozen=True)
class FirstSuspect:
    """A suspected wrong label.

    Attributes:
        index: The index of the sample in the whole training set of the dataset; in the run's
            training set if this is not known.
        label: The name of its label, or its number if the names are not known.
        suggestion: The suggested label; None without a suggestion.
        agreement: The share of the last epochs that predicted the suggestion.
        score: The moving average of its loss.
        wrong: Whether the label is wrong; None if this is not known.
    """

    index: int
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
        suspects: The number of suspects that were asked for, at most all samples with a loss.
        shown: The number of suspects in the page.
        pictures: The number of these that have a picture.
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
    pictures: int
    first: list[FirstSuspect]
    wrong_labels: int | None
    found: list[Found]
    classes: list[ClassRow]
    class_names: list[str]
    traits: list[Trait]
    missing: list[str]


@dataclass(frozen=True)
class Summary:
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


@dataclass(frozen=True)
class _Shown:
    """A gallery in the page, with its heading and its explanation."""

    title: str
    note: str
    gallery: Gallery


@dataclass(frozen=True)
class _Heat:
    """A confusion matrix in the page: each row has the cells (text, shade from 0 to 1, right)."""

    caption: str
    rows: list[tuple[str, list[tuple[str, str, bool]]]]


@dataclass(frozen=True)
class _Section:
    anchor: str
    heading: str
    lead: list[str]
    missing: list[str]
    found: Table | None
    galleries: list[_Shown]
    classes: Table
    heats: list[_Heat]
    class_names: list[str]
    confused: Table | None
    trait_title: str
    traits: list[Table]


def write_inspection(
    runs: Sequence[Inspected], path: Path, *, most: int = 1000, network: bool = True
) -> Summary:
    """Write a page on what finished runs skipped and suspected, as one self-contained HTML file.

    It shows the samples of the first run of each network and arm. The other runs are compared with
    it. The file has at most 5 MB with up to twenty networks and arms: if necessary, it shows fewer
    pictures, and says so.

    Args:
        runs: The runs, from ``read_inspected``.
        path: The HTML file. Its folder is created if necessary, and an existing file is replaced
            atomically.
        most: The largest number of suspects to show for each network and arm, at least 1.
        network: Whether to pass the pictures through the trained networks, which shows the final
            predictions and the nearest neighbours.

    Raises:
        InputError: There are no runs, or ``most`` is below 1.
        WriteError: The file cannot be written.
    """
    if not runs:
        raise InputError("expected at least one finished run to inspect, got none")
    if most < 1:
        raise InputError(f"expected at least 1 suspect to show, got {most}")
    arms = runs_by_arm(runs)
    headings = _headings(arms)
    most_bytes = max((_MOST_BYTES - _TABLE_BYTES) // len(arms) - _TABLE_BYTES, _LEAST_BYTES)
    figures, sections = [], []
    for number, (heading, members) in enumerate(zip(headings, arms, strict=True), start=1):
        samples = known_samples(members[0], network)
        full = _full_of(members[0], runs)
        arm, section = _inspect(samples, full, heading, f"arm-{number}", most, most_bytes)
        figures.append(arm)
        sections.append(section)
    skipped, suspected = _overlaps(runs, skipped_overlaps), _overlaps(runs, suspect_overlaps)
    tables = []
    if skipped:
        tables.append(overlap_table("The most skipped samples", skipped, runs))
    if suspected:
        tables.append(overlap_table("The most suspected samples", suspected, runs))
    page = template("inspection.html.j2").render(
        title=_title(runs),
        lead=", ".join(distinct(run.name for run in runs)),
        facts=_facts(runs),
        sections=sections,
        overlaps=tables,
        runs=len(runs),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    return Summary([run.name for run in runs], figures, skipped, suspected)


def runs_by_arm(runs: Sequence[Inspected]) -> list[list[Inspected]]:
    """Return the runs of each network and arm, for each dataset and comparison, in given order."""
    by_arm: dict[tuple[str, str, str, Path | None], list[Inspected]] = {}
    for run in runs:
        summary = run.run.summary
        key = (summary.network, summary.dataset, summary.arm, run.run.comparison)
        by_arm.setdefault(key, []).append(run)
    return list(by_arm.values())


def _inspect(
    samples: KnownSamples, full: Inspected | None, heading: str, anchor: str, most: int, size: int
) -> tuple[InspectedArm, _Section]:
    """Return the figures and the section of a run, whose galleries take a number of bytes."""
    run = samples.run
    ranked = suspects_of(run)
    chosen = _taken(ranked, np.arange(min(most, len(ranked))))
    top = top_loss(run, ranked)
    found = _found(samples, ranked)
    galleries = _skipped_galleries(samples, ranked, top, size // 8)
    left = size - sum(shown.gallery.size for shown in galleries)
    main = make_gallery(samples, chosen, top, left, detailed=True) if len(chosen) else None
    if main is not None:
        galleries.insert(0, _Shown("Suspected wrong labels", suspects_note(samples), main))
    classes = class_rows(run, full, len(samples.names))
    skips = bool(samples.times_skipped.any())
    common = "most skipped" if skips else "most suspected"
    tenth = _tenth(samples, skips)
    properties = [] if samples.pictures is None else traits(samples.pictures, tenth)
    tables = [share_table(run.labels, tenth, samples.names, common)]
    if properties:
        tables.insert(0, trait_table(properties, common))
    skipped = float(samples.times_skipped.mean() / len(run.history.epochs))
    wrong = None if samples.wrong is None else int(samples.wrong.sum())
    summary = run.run.summary
    heats, confused, missing = _confusions(run, full, samples.names)
    figures = InspectedArm(
        name=run.name,
        heading=heading,
        samples=len(samples),
        skipped=skipped,
        suspects=len(chosen),
        shown=0 if main is None else main.cards,
        pictures=0 if main is None else main.pictures,
        first=_first(samples, chosen),
        wrong_labels=wrong,
        found=found,
        classes=classes,
        class_names=list(samples.names),
        traits=properties,
        missing=[*samples.missing, *missing],
    )
    section = _Section(
        anchor=anchor,
        heading=heading,
        lead=_lead(figures, summary.seed, len(run.history.epochs)),
        missing=figures.missing,
        found=None if wrong is None else suspects_table(found, wrong, len(samples)),
        galleries=galleries,
        classes=class_table(classes, samples.names, summary.evaluated_on, full is not None),
        heats=heats,
        class_names=list(samples.names),
        confused=confused,
        trait_title=f"What the {common} tenth has in common",
        traits=tables,
    )
    return figures, section


def _skipped_galleries(
    samples: KnownSamples, ranked: Suspects, top: float, size: int
) -> list[_Shown]:
    """Return the galleries of the samples that were skipped most often, and never.

    Args:
        samples: What is known about the samples of the run.
        ranked: All samples with a loss, the most suspicious first.
        top: The loss at the upper edge of the sparklines.
        size: The number of bytes of each gallery.
    """
    times = samples.times_skipped[ranked.index]
    place = np.arange(len(ranked))
    large = ranked.score > np.median(ranked.score) if len(ranked) else np.empty(0, np.bool_)
    # Samples that were skipped equally often stay in order of their losses.
    hard = place[np.argsort(-times, kind="stable")]
    easy = place[::-1][np.argsort(-times[::-1], kind="stable")]
    least = times.min(initial=len(samples.run.history.epochs))
    rarely = "Never skipped" if least == 0 else f"Least often skipped ({least} epochs)"
    order = "Those that were skipped in the most epochs come first."
    wanted = [
        (
            "Most often skipped, with large losses",
            f"These samples have average losses above the median. {order}",
            _taken(ranked, hard[(large & (times > 0))[hard]][:_SKIPPED]),
        ),
        (
            "Most often skipped, with small losses",
            f"These samples have average losses up to the median. {order}",
            _undoubted(_taken(ranked, easy[(~large & (times > 0))[easy]][:_SKIPPED])),
        ),
        (
            rarely if times.any() else "The smallest losses",
            "Those with the smallest average losses come first."
            if times.any()
            else "This run skipped no samples. The network learned these ones best.",
            _undoubted(_taken(ranked, place[::-1][(times == least)[::-1]][:VISIBLE])),
        ),
    ]
    return [
        _Shown(title, note, make_gallery(samples, chosen, top, size))
        for title, note, chosen in wanted
        if len(chosen)
    ]


def _taken(suspects: Suspects, place: Index) -> Suspects:
    """Return the suspects at some places of the ranking."""
    return Suspects(
        suspects.index[place],
        suspects.score[place],
        suspects.label[place],
        suspects.suggestion[place],
        suspects.agreement[place],
    )


def _undoubted(suspects: Suspects) -> Suspects:
    """Return the samples without suggested labels."""
    return replace(suspects, suggestion=np.full(len(suspects), -1))


def _tenth(samples: KnownSamples, skips: bool) -> Index:
    """Return the most skipped tenth of the samples, or the most suspected one, at least one."""
    values = samples.times_skipped if skips else samples.score
    return largest(values, max(1, len(values) // _SHARE), seed=0)


def _found(samples: KnownSamples, ranked: Suspects) -> list[Found]:
    """Return how many of the first suspects are wrong; empty if the wrong labels are not known."""
    wrong, right_label = samples.wrong, samples.right_label
    if wrong is None or right_label is None:
        return []
    total = int(wrong.sum())
    found = []
    for first in sorted({*_FIRST, total}):
        if not 0 < first <= len(ranked):
            continue
        index = ranked.index[:first]
        agrees = ranked.suggestion[:first] == right_label[index]
        found.append(
            Found(
                first=first,
                wrong=int(wrong[index].sum()),
                by_chance=first * total / len(samples),
                suggestions_right=int((agrees & wrong[index]).sum()),
            )
        )
    return found


def _first(samples: KnownSamples, chosen: Suspects) -> list[FirstSuspect]:
    return [
        FirstSuspect(
            index=int(samples.number[index]),
            label=samples.name(int(label)) or "",
            suggestion=samples.name(int(suggestion)),
            agreement=float(agreement),
            score=float(score),
            wrong=None if samples.wrong is None else bool(samples.wrong[index]),
        )
        for index, label, suggestion, agreement, score in itertools.islice(
            zip(
                chosen.index,
                chosen.label,
                chosen.suggestion,
                chosen.agreement,
                chosen.score,
                strict=True,
            ),
            10,
        )
    ]


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
        if row.first in _FIRST and row.first <= (figures.wrong_labels or 0)
    ]
    return sentences


def _confusions(
    run: Inspected, full: Inspected | None, names: tuple[str, ...]
) -> tuple[list[_Heat], Table | None, list[str]]:
    """Return the confusion matrices, or else a table, or else a sentence why there are none."""
    matrix = confusion(run, len(names))
    if matrix is None:
        return [], None, ["No confusion matrix is shown: the run has not kept its predictions."]
    beside = None if full is None else confusion(full, len(names))
    if len(names) > _MOST_CLASSES:
        return [], confused_pairs(matrix, beside, names), []
    heats = [_heat(f"{run.name}", matrix, names)]
    if full is not None and beside is not None:
        heats.append(_heat(f"{full.name}", beside, names))
    return heats, None, []


def _heat(caption: str, matrix: Matrix, names: tuple[str, ...]) -> _Heat:
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    rows = []
    for label, row in enumerate(shares):
        cells = []
        for predicted, share in enumerate(row):
            # The square root makes small shares visible, which most errors are.
            shade = f"{0.75 * share**0.5:.2f}" if matrix[label, predicted] else "0"
            text = f"{100 * share:.0f}" if matrix[label, predicted] else ""
            cells.append((text, shade, label == predicted))
        rows.append((names[label], cells))
    return _Heat(caption, rows)


def _overlaps(runs: Sequence[Inspected], overlaps: Overlapping) -> list[Overlap]:
    """Return the overlaps of a tenth of the samples, between runs with as many samples."""
    counts = distinct(len(run.labels) for run in runs)
    return [
        overlap
        for count in counts
        for overlap in overlaps(
            [run for run in runs if len(run.labels) == count], max(1, count // _SHARE)
        )
    ]


def _full_of(run: Inspected, runs: Sequence[Inspected]) -> Inspected | None:
    """Return the run that skips nothing, with the same network, data and seed, if there is one."""

    def trained(one: Inspected) -> tuple[object, ...]:
        summary = one.run.summary
        places = summary.network, summary.dataset, summary.train_samples, summary.evaluated_on
        return (*places, summary.seed)

    return next(
        (
            other
            for other in runs
            if other is not run
            and other.run.summary.arm == BASELINE
            and trained(other) == trained(run)
        ),
        None,
    )


def _headings(arms: Sequence[list[Inspected]]) -> list[str]:
    plain = [
        "{0.network} on {0.dataset}, {0.arm}".format(members[0].run.summary) for members in arms
    ]
    return [
        heading if plain.count(heading) == 1 else f"{heading}, {members[0].run.title}"
        for heading, members in zip(plain, arms, strict=True)
    ]


def _facts(runs: Sequence[Inspected]) -> list[list[tuple[str, str]]]:
    """Return the facts of the runs of each network on each dataset."""
    groups: dict[tuple[str, str], list[Inspected]] = {}
    for run in runs:
        summary = run.run.summary
        groups.setdefault((summary.network, summary.dataset), []).append(run)
    return [facts([run.run for run in members]) for members in groups.values()]


def _title(runs: Sequence[Inspected]) -> str:
    titles = distinct(run.run.title for run in runs)
    return f"Samples of {titles[0]}" if len(titles) == 1 else f"Samples of {len(runs)} runs"
