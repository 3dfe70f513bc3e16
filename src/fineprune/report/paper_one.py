"""[P], "Data fine-pruning" (Li, He, Ren, Mao, NPC 2018): its results, and a page with ours.

Tables 1 and 2 are of CIFAR-10, 200 epochs, one GTX 1080 Ti. The accuracies are means of the three
best test accuracies of a run. The paper prints neither the number of runs nor all hyper-parameters.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fineprune.experiments.arm_table import (
    BASELINE,
    MARGIN,
    Difference,
    Formulas,
    Group,
    Row,
    formulas,
    group_rows,
    grouped,
    paired_difference,
    paired_runs,
)
from fineprune.pruning.savings import closed_form_pruned_epochs
from fineprune.report.comparison_table import cost_table, results_table
from fineprune.report.facts import cautions, what_was_run
from fineprune.report.figures.curves import draw_curves
from fineprune.report.figures.sample_losses import draw_sample_losses
from fineprune.report.figures.schedule import draw_schedule
from fineprune.report.figures.style import Drawing
from fineprune.report.page import Line, Sentences, write_page
from fineprune.report.table import NOTHING, Table, decimal, percent, points, table_of, whole
from fineprune.runs.files import RECIPE
from fineprune.runs.run import Run
from fineprune.training.recipe import read_written_recipe


class PaperResult(NamedTuple):
    """The results that the paper prints for one network: fractions, and seconds for 200 epochs."""

    name: str
    regular_seconds: float
    time_saved: float
    overhead_seconds: float
    accuracy_regular: float
    accuracy_pruned: float


RESULTS = {
    "lenet": PaperResult("LeNet", 1220, 0.1180, 4.27, 0.7515, 0.7472),
    "vgg13": PaperResult("VggNet-13", 2028, 0.0740, 4.33, 0.9392, 0.9356),
    "vgg16": PaperResult("VggNet-16", 2554, 0.0756, 4.26, 0.9379, 0.9344),
    "vgg19": PaperResult("VggNet-19", 3110, 0.0765, 4.30, 0.9335, 0.9330),
    "resnet18": PaperResult("ResNet-18", 1277, 0.1276, 4.08, 0.9125, 0.9116),
    "resnet34": PaperResult("ResNet-34", 2047, 0.1343, 4.21, 0.9286, 0.9285),
    "resnet50": PaperResult("ResNet-50", 3931, 0.1392, 4.18, 0.9375, 0.9346),
    "wrn10": PaperResult("WRN-10", 3 * 3600 + 24 * 60, 0.1373, 4.12, 0.9213, 0.9178),
    "wrn16": PaperResult("WRN-16", 5 * 3600 + 8 * 60, 0.1381, 4.25, 0.9422, 0.9420),
    "wrn22": PaperResult("WRN-22", 6 * 3600 + 53 * 60, 0.1429, 4.32, 0.9508, 0.9471),
}

_METHOD = "fine-pruning"

# Whether a verdict agrees with a claim that nothing is lost.
_AGREES = {"better": "yes", "equal": "yes", "worse": "no"}


@dataclass(frozen=True)
class _Network:
    """A network of the paper, and our runs of it, if there are some."""

    paper: PaperResult
    group: Group | None

    @functools.cached_property
    def row(self) -> Row | None:
        """The row of fine-pruning in the table of our runs."""
        return None if self.group is None else _rows(self.group).get(_METHOD)

    def ours(self, cell: Callable[[Group, Row], str]) -> str:
        if self.group is None or self.row is None:
            return NOTHING
        return cell(self.group, self.row)


def _rows(group: Group) -> dict[str, Row]:
    return {row.arm: row for row in group_rows(group)}


def paper_tables(groups: Sequence[Group]) -> list[Table]:
    """Return the paper's Tables 1 and 2 with ours: one line for each group that they contain.

    These are runs of its networks with full training and fine-pruning, on images of CIFAR-10 with
    their own labels, evaluated on the test set. Without lines, there are no tables.
    """
    rows = [
        _Network(RESULTS[group.first.network], group)
        for group in groups
        if (group.first.dataset, group.first.evaluated_on) == ("cifar10", "test")
        and group.own_labels
        and group.first.network in RESULTS
        and {BASELINE, _METHOD} <= set(group.arms)
    ]
    return _tables_1_and_2(rows) if rows else []


def _tables_1_and_2(rows: Sequence[_Network]) -> list[Table]:
    time = table_of(
        "The paper's Table 1, time, and ours",
        rows,
        (
            ("network", lambda of: of.paper.name),
            ("our data", lambda of: of.ours(lambda group, _: group.first.dataset)),
            ("samples", lambda of: of.ours(lambda group, _: whole(group.first.train_samples))),
            ("epochs", lambda of: of.ours(lambda g, _: str(g.of(_METHOD)[0].summary.epochs))),
            ("skipped, %", lambda of: of.ours(lambda _, row: percent(row.skipped))),
            ("time saved, %: paper", lambda of: percent(of.paper.time_saved)),
            ("predicted", lambda of: of.ours(lambda _, row: percent(row.predicted_saving))),
            ("ours", lambda of: of.ours(lambda _, row: points(row.time_saved))),
            ("overhead, s: paper", lambda of: decimal(of.paper.overhead_seconds, 2)),
            ("ours", lambda of: of.ours(lambda _, row: decimal(row.overhead, 2))),
        ),
        "Saved: relative to full training, which records nothing; predicted by formulas 2 to 7. "
        "What is skipped is a setting, which our recipes choose by the paper's savings. The paper "
        "trains 50,000 samples of CIFAR-10 for 200 epochs on a GTX 1080 Ti.",
    )
    accuracy = table_of(
        "The paper's Table 2, accuracy, and ours",
        rows,
        (
            ("network", lambda of: of.paper.name),
            ("our seeds", lambda of: of.ours(lambda _, row: str(row.seeds))),
            ("regular, %: paper", lambda of: percent(of.paper.accuracy_regular)),
            ("ours", lambda of: of.ours(lambda group, _: _best(group, BASELINE))),
            ("pruned, %: paper", lambda of: percent(of.paper.accuracy_pruned)),
            ("ours", lambda of: of.ours(lambda group, _: _best(group, _METHOD))),
            ("pruned minus regular, points: paper", lambda of: _theirs(of.paper)),
            ("ours", lambda of: of.ours(lambda group, _: points(_best_difference(group)))),
        ),
        "Means of the best three evaluations of a run on the test set, as in the paper; they are "
        "too high, because epochs are selected on the evaluated set. Lines with other data, fewer "
        "samples or fewer epochs cannot be compared with the paper's, which does not print all "
        "hyper-parameters.",
    )
    return [time, accuracy]


def _best(group: Group, arm: str) -> str:
    return percent(statistics.fmean(run.summary.accuracy_best3 for run in group.of(arm)))


def _best_difference(group: Group) -> Difference | None:
    pairs = paired_runs(group, _METHOD, BASELINE)
    return paired_difference(pairs, lambda summary: summary.accuracy_best3)


def _theirs(paper: PaperResult) -> str:
    return f"{100 * (paper.accuracy_pruned - paper.accuracy_regular):+.2f}"


def formulas_table(groups: Sequence[Group]) -> Table:
    """Return formulas 2 to 7 for each group, predicted and measured, as means over the seeds."""
    lines = [list(_formula_lines(group)) for group in groups]
    columns = [[cell for _, cell in of_group] for of_group in lines]
    names = [name for name, _ in lines[0]]
    return Table(
        "Formulas 2 to 7, predicted and measured",
        ("", *(group.first.network for group in groups)),
        list(zip(names, *columns, strict=True)),
        "T is the median time of a step in full training, t0 the method's own bookkeeping per "
        "pruned epoch. Formula 5 as printed leaves out the smaller number of batches, and formulas "
        "3 and 4 hold the starting point constant; Algorithm 2 gives the number that is pruned.",
    )


def _formula_lines(group: Group) -> Iterator[tuple[str, str]]:
    pairs = paired_runs(group, _METHOD, BASELINE)
    found = [formulas(run, full) for run, full in pairs]
    run, full = (
        statistics.fmean(pair[place].summary.seconds_train for pair in pairs) for place in (0, 1)
    )
    summary = pairs[0][0].summary
    schedule = read_written_recipe(pairs[0][0].path / RECIPE).schedule()
    one_length = schedule is not None and not isinstance(schedule.window, tuple)

    def mean(of: Callable[[Formulas], float]) -> float:
        return statistics.fmean(map(of, found))

    yield "n, epochs", whole(summary.epochs)
    yield "n_prune, Algorithm 2", whole(summary.pruned_epochs)
    printed = closed_form_pruned_epochs(schedule) if schedule and one_length else None
    yield "n_prune, formula 3 or 4 as printed", whole(printed)
    yield "T, ms", decimal(1e3 * mean(lambda f: f.step), 2)
    yield "b, steps per full epoch", decimal(found[0].steps_full / summary.epochs, 1)
    yield "b_prune, steps per epoch (5)", decimal(found[0].steps / summary.epochs, 1)
    per_epoch = max(1, summary.pruned_epochs)
    yield "t0, ms per pruned epoch", decimal(1e3 * mean(lambda f: f.overhead) / per_epoch, 2)
    for name, predicted, measured in (
        ("t_regular (2)", mean(lambda f: f.regular), full),
        ("t_prune (6)", mean(lambda f: f.pruned), run),
        ("t_save (7)", mean(lambda f: f.regular - f.pruned), full - run),
    ):
        yield f"{name}, s: predicted", decimal(predicted, 1)
        yield "measured", decimal(measured, 1)
    yield "saved, %: predicted", percent(mean(lambda f: f.saving))
    yield "measured", percent(1 - run / full)


class Claim(NamedTuple):
    """A statement, and what there is for it: in the paper, in our runs, and whether they agree."""

    statement: str
    paper: str
    ours: str
    agrees: str


def claims_table(claims: Iterable[Claim], note: str) -> Table:
    """Return claims as a table."""
    return Table("What agrees with the paper, and what does not", Claim._fields, list(claims), note)


def claims_one(runs: Sequence[Run]) -> Table:
    """Return the claims of the paper, with what our runs show of them."""
    note = (
        f"Yes or no where the 95 % interval over the seeds, or for accuracies two one-sided "
        f"t-tests with a margin of {100 * MARGIN:g} points, decide; open where they do not, or "
        f"with one seed. The paper has no controls of equal cost: matched skips as many samples "
        f"at random, shorter trains all samples for fewer epochs."
    )
    return claims_table((claim for group in grouped(runs) for claim in _claims(group)), note)


def _claims(group: Group) -> Iterator[Claim]:
    network, rows = group.first.network, _rows(group)
    paper, row, full = RESULTS[network], rows[_METHOD], rows[BASELINE]
    saved, predicted = row.time_saved, row.predicted_saving
    assert saved is not None and predicted is not None and row.overhead is not None  # noqa: PT018
    yield Claim(
        f"{network}: fine-pruning saves time, %",
        percent(paper.time_saved),
        points(saved),
        _decided(saved.low is not None and saved.low > 0, saved),
    )
    within = saved.half_width is not None and abs(saved.mean - predicted) <= saved.half_width
    yield Claim(
        f"{network}: as much as formulas 2 to 7 predict, %",
        NOTHING,
        f"{percent(predicted)} predicted",
        _decided(within, saved),
    )
    yield Claim(
        f"{network}: the overhead is below 1 % of the time",
        percent(paper.overhead_seconds / paper.regular_seconds),
        percent(row.overhead / full.seconds_train),
        _decided(row.overhead < 0.01 * full.seconds_train, saved),
    )
    yield Claim(
        f"{network}: as accurate as full training, points",
        _theirs(paper),
        points(full.difference),
        _AGREES.get(str(full.verdict), "open"),
    )
    for arm in ("matched", "shorter"):
        if (control := rows.get(arm)) is not None:
            yield Claim(
                f"{network}: better than {arm}, points",
                NOTHING,
                points(control.difference),
                {**_AGREES, "equal": "no"}.get(str(control.verdict), "open"),
            )


def _decided(holds: bool, difference: Difference) -> str:
    return "open" if difference.half_width is None else "yes" if holds else "no"


def write_paper_one(runs: Sequence[Run], path: Path) -> Table:
    """Write an HTML page on the runs of ``experiments.papers.paper_one`` beside the paper.

    Returns:
        The claims of the paper, which the page begins with.
    """
    groups, claims = grouped(runs), claims_one(runs)
    by_network = {group.first.network: group for group in groups}
    first, of_figure_1 = groups[0], by_network.get("resnet18", groups[0])
    recipes = [group.of(_METHOD)[0].path / RECIPE for group in groups]
    schedule = read_written_recipe(recipes[0]).schedule()
    assert schedule is not None
    figure_3 = draw_schedule(
        list(map(schedule.prunes, range(schedule.epochs))),
        schedule.boundaries,
        f"The epochs of {_METHOD} that skip samples, in the runs of {first.first.network}.",
    )
    lead = (
        "Li, He, Ren and Mao: Data Fine-pruning: A Simple Way to Accelerate Neural Network "
        "Training (NPC 2018). Its results beside ours."
    )
    rows = [_Network(paper, by_network.get(network)) for network, paper in RESULTS.items()]
    write_page(
        path,
        "Paper 1: data fine-pruning",
        [
            Line("lead", lead),
            claims,
            *_tables_1_and_2(rows),
            formulas_table(groups),
            _named(draw_curves(of_figure_1), of_figure_1),
            _named(draw_sample_losses(first), first),
            figure_3,
            *(
                _named(table, group)
                for group in groups
                for of_group in [group_rows(group)]
                for table in (results_table(of_group, MARGIN), cost_table(of_group))
            ),
            Sentences([line for g in groups for line in cautions(g.runs)], "What to keep in mind"),
            *what_was_run((group.runs for group in groups), recipes),
        ],
    )
    return claims


def _named(part: Drawing | Table | None, group: Group) -> Drawing | Table | None:
    """Return a figure, if it could be drawn, or a table with its network and data in the title."""
    return part and dataclasses.replace(part, title=f"{part.title}, {group.label}")
