"""The figures that pages and messages quote are those of the committed results.

A quote is a sentence, or a part of one, with a format in place of each figure, and the figures that
``docs/results`` gives. It must be on the page word for word. In pages that only quote, each figure
belongs to a quote, or is a setting that is named here.
"""

import functools
import itertools
import json
import re
import runpy
import statistics
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from made_runs import table_rows

from fineprune.experiments.arm_table import (
    group_rows,
    grouped,
    mean_difference,
    paired_difference,
    paired_runs,
)
from fineprune.experiments.scale_table import read_scaling, scale_rows
from fineprune.experiments.tuning import read_rates
from fineprune.report.comparison_table import columns_for, comparison_table
from fineprune.report.scaling.tables import scale_tables
from fineprune.runs.run import read_run, read_runs

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
README, ADVICE = "README.md", "src/fineprune/labels/advice.py"
CHOOSE, ADAPTIVE, LABELS = "docs/choose.md", "docs/adaptive.md", "docs/labels.md"
FOUND, VARIANTS = "docs/results/labels.md", "docs/results/adaptive.md"
FITS, TUNED = "docs/results/resnet9.md", "docs/results/fine-tuning.md"
SPEED, PAPER, GPU = "docs/speed.md", "docs/results/paper.md", "docs/results/gpu.md"


def page_text(page):
    """A page without code, and with single spaces. Messages of Python are joined to one line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page.endswith(".py"):
        text = re.sub(r'"\s+f?"', "", text)
    else:
        text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return " ".join(text.split())


# -- what was measured -----------------------------------------------------------------------------


@functools.cache
def arm_rows(folder):
    return {row.arm: row for row in table_rows(read_runs([RESULTS / folder]))}


def accuracy(folder, arm):
    return 100 * arm_rows(folder)[arm].accuracy_last


@functools.cache
def difference(folder, arm, other="full"):
    """The difference of two arms in points, and half the width of its interval."""
    (group,) = grouped(read_runs([RESULTS / folder]))
    made = paired_difference(paired_runs(group, arm, other), lambda summary: summary.accuracy_last)
    assert made.half_width is not None
    return 100 * made.mean, 100 * made.half_width


def tuned_difference(folder, arm, other_folder, other):
    """As ``difference``, for runs in two folders, by the seeds that both have."""
    found = [
        {run.summary.seed: run.summary.accuracy_last for run in read_runs([RESULTS / one])
         if run.summary.arm == name}
        for one, name in ((folder, arm), (other_folder, other))
    ]  # fmt: skip
    both = found[0].keys() & found[1].keys()
    assert len(both) >= 3
    made = mean_difference([found[0][seed] - found[1][seed] for seed in both])
    assert made.half_width is not None
    return 100 * made.mean, 100 * made.half_width


CLEAN, WRONG = "adaptive/clean", "adaptive/wrong"
FITS_CLEAN, FITS_WRONG, FITS_LONG = "resnet9/clean", "resnet9/wrong", "resnet9/long"
FITS_TUNED, FITS_CONFUSED = "resnet9/long-tuned", "resnet9/confused"
FITS_HALF_SAVED = "resnet9/half-saved"
FITS_CONFUSED_TUNED, FITS_INSTANCE_TUNED = "resnet9/confused-tuned", "resnet9/instance-tuned"
LINEAR_CLEAN, LINEAR_WRONG = "adaptive/linear-correct", "adaptive/linear"
COSINE_CLEAN, COSINE_WRONG = "adaptive/cosine-correct", "adaptive/cosine"
LATE = "fewer-epochs-late"


@functools.cache
def variants():
    lines = (RESULTS / "adaptive/variants.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["variant"]: line for line in map(json.loads, lines)}


def held_out(name):
    """The accuracy of a variant in percent, to one place."""
    return (100 * Decimal(str(variants()[name]["accuracy"]))).quantize(Decimal("0.1"))


def gain(name, other):
    """How many points a variant is above another one, from the accuracies that are shown."""
    return held_out(name) - held_out(other)


def exact_gain(name, other):
    return 100 * (variants()[name]["accuracy"] - variants()[other]["accuracy"])


@functools.cache
def found_labels():
    return json.loads((RESULTS / "labels.json").read_text(encoding="utf-8"))["runs"]


def found(kind, ranking, seeds=(0, 1, 2)):
    """The mean number of wrong labels among the first 1,000, over the seeds."""
    runs = [run for run in found_labels() if run["kind"] == kind and run["seed"] in seeds]
    return np.mean([run["after"]["30"][ranking]["first"][-1] for run in runs])


def roc_area(kind, ranking="watch", seeds=(0, 1, 2)):
    runs = [run for run in found_labels() if run["kind"] == kind and run["seed"] in seeds]
    last = [run["after"]["30"] if ranking == "watch" else run for run in runs]
    return np.mean([one[ranking]["roc_area"] for one in last])


def beside_cleanlab(kind):
    """The best figures of cleanlab's three scores with five more trainings, and those of ours."""
    run = next(run for run in found_labels() if run["kind"] == kind and run["seed"] == 0)
    scores = [s for s in run["cleanlab, five more trainings"].values() if isinstance(s, dict)]
    return [
        {
            "roc_area": max(one["roc_area"] for one in of),
            "first": max(one["first"][-1] for one in of),
        }
        for of in (scores, [run["after"]["30"]["watch"]])
    ]


KINDS = ("symmetric", "cat-dog", "asymmetric", "confused")


def wrong(kind):
    return next(run["wrong"] for run in found_labels() if run["kind"] == kind)


def estimated(epochs):
    """The least and the largest of the estimates for the kinds, as multiples of the true number."""
    ratios = [
        np.mean(
            [run["after"][epochs]["estimated"] for run in found_labels() if run["kind"] == kind]
        )
        / wrong(kind)
        for kind in KINDS
    ]
    return min(ratios), max(ratios)


def suspects(folder):
    return read_run(RESULTS / folder).summary.suspicion.suspects


def at_epoch(name, epoch, entry):
    return variants()[name]["epochs"][epoch][entry]


def cells(page, *columns):
    """The figures of a table of a page of results, whose row begins with the first column."""
    rows = (RESULTS / page).read_text(encoding="utf-8").splitlines()
    return next(row for row in rows if row.startswith("| " + " | ".join(columns))).split(" | ")


# -- quotes ----------------------------------------------------------------------------------------


def wide_on_a_gpu():
    """The quotes of the full-size ResNet-9."""
    runs = {
        kind: {
            (run.summary.arm, run.summary.seed): run.summary
            for run in read_runs(sorted((RESULTS / "resnet9-wide" / kind).iterdir()))
        }
        for kind in ("wrong", "correct", "asym")
    }

    def mean(kind, *arms):
        return [
            100
            * statistics.mean(one.accuracy_last for key, one in runs[kind].items() if key[0] == arm)
            for arm in arms
        ]

    def interval(kind, arm, other):
        made = mean_difference(
            [
                100 * (runs[kind][arm, seed].accuracy_last - runs[kind][other, seed].accuracy_last)
                for seed in range(3)
            ]
        )
        return made.mean, made.half_width

    arms = ("full", "shorter", "adaptive")
    row = " {:.2f} | {:.2f} | {:.2f}"
    yield GPU, "| correct |" + row, mean("correct", *arms)
    yield GPU, "| 30 % wrong at random |" + row + " |", mean("wrong", *arms)
    yield GPU, "| 30 % of five classes confused |" + row + " |", mean("asym", *arms)
    gained = [*interval("wrong", "adaptive", "shorter"), *interval("wrong", "adaptive", "full")]
    yield GPU, "{:.2f} ±{:.2f} points above `shorter` and {:.2f} ±{:.2f} above full", gained
    words = "{:.2f} ±{:.2f} points above `fp.shorter` and {:.2f} ±{:.2f} above full training"
    yield README, words, gained
    words = "`Adaptive` and `fp.shorter` both reached {:.2f} %, and full training {:.2f} %"
    yield README, words, mean("correct", "shorter", "full")
    yield README, words, mean("correct", "adaptive", "full")
    above, width = interval("correct", "adaptive", "shorter")
    words = "`adaptive` is {:.2f} ±{:.2f} points above `shorter`, and `shorter` is {:.2f} ±{:.2f}"
    yield GPU, words, (abs(above), width, *interval("correct", "full", "shorter"))
    words = "`shorter` is {:.2f} ±{:.2f} points above full training, and `adaptive` {:.2f} ±{:.2f}"
    above = [*interval("asym", "shorter", "full"), *interval("asym", "adaptive", "shorter")]
    yield GPU, words, above

    def found(kind, arm):
        found = [one.suspicion for key, one in runs[kind].items() if key[0] == arm]
        number = statistics.mean(one.suspects or 0 for one in found)
        shares = [
            100 * statistics.mean(getattr(one, share) for one in found)
            for share in ("precision", "recall")
        ]
        return number, *shares

    words = "{:,.0f} suspects of `full`, {:.0f} % have a wrong label, and these are {:.0f} %"
    yield GPU, words, found("wrong", "full")
    words = "{:,.0f} suspects of `adaptive`, it is {:.0f} and {:.0f} %"
    yield GPU, words, found("wrong", "adaptive")
    for words, arm in (
        ("it is {:.0f} and {:.0f} % for the {:,.0f} suspects of `full`", "full"),
        ("and {:.0f} and {:.0f} % for the {:,.0f} of `adaptive`", "adaptive"),
    ):
        number, *shares = found("asym", arm)
        yield GPU, words, (*shares, number)
    _, *shares = found("wrong", "full")
    words = "the suspects had a precision of {:.0f} % and a recall of {:.0f} %"
    yield README, words, shares
    _, *shares = found("asym", "full")
    words = "the precision was {:.0f} %, but the recall only {:.0f} %, because"
    yield README, words, shares


def of_the_paper_beside_shorter(residual):
    """Fine-pruning beside fewer epochs, at the savings of the paper and at a larger one."""
    lowered, saved = [], [100 * arm_rows("ten-networks/lenet")["fine-pruning"].skipped]
    for name in ("VGG-13", "VGG-16", "VGG-19", *residual):
        ten = f"ten-networks/{name.lower().replace('-', '')}"
        lowered.append(accuracy(ten, "fine-pruning") < accuracy(ten, "shorter"))
        saved.append(100 * arm_rows(ten)["fine-pruning"].skipped)
    for network in ("resnet18", "vgg13"):
        pruned, shorter = (
            read_run(RESULTS / "paper-columns" / f"{network}-{arm}").summary
            for arm in ("fine-pruning", "shorter")
        )
        lowered.append(pruned.accuracy_last < shorter.accuracy_last)
        saved.append(100 * pruned.skipped_share)
    counts = sum(lowered), len(lowered)
    yield CHOOSE, "as much as in the paper, {:.0f} to {:.0f} %, it was", (min(saved), max(saved))
    yield CHOOSE, "it was below `shorter` in {} of {} comparisons with one seed", counts
    yield README, "In {} of {} other comparisons with one seed, it was below `fp.shorter`", counts
    lenet = difference("ten-networks/lenet", "fine-pruning", "shorter")
    yield CHOOSE, "and {:.2f} ±{:.2f} points above it in the only one with three", lenet
    more = difference(LINEAR_CLEAN, "shorter", "fine-pruning")
    yield CHOOSE, "correct labels, it was {:.2f} ±{:.2f} points below `shorter`", more
    yield README, "of the steps saved, it was {:.2f} ±{:.2f} points below it (three seeds", more


def on_a_gpu():
    """The quotes of what ran on a GPU."""
    best = {}
    for network in ("resnet18", "vgg13"):
        for arm in ("full", "fine-pruning", "shorter"):
            one = read_run(RESULTS / "paper-columns" / f"{network}-{arm}").summary
            name = f"shorter, {one.epochs} epochs" if arm == "shorter" else arm
            saved = 1 - one.samples_trained / (200 * one.train_samples)
            figures = [100 * x for x in (saved, one.accuracy_last, one.accuracy_best3)]
            yield GPU, f"| {name} | {{:.1f}} | {{:.2f}} | {{:.2f}} |", figures
            best[network, arm] = figures[2]
    yield (
        "docs/results/resnet18-cifar10-20.md",
        "[{:.2f} %](gpu.md)",
        (best["resnet18", "full"],),
    )
    for network, words in (
        ("vgg13", "With VGG-13, fine-pruning is {:.2f} points below full training"),
        ("resnet18", "With ResNet-18, it is {:.2f} points above it"),
    ):
        yield GPU, words, (abs(best[network, "fine-pruning"] - best[network, "full"]),)
    beside = [best[network, "shorter"] - best[network, "full"] for network in ("vgg13", "resnet18")]
    words = "is {:.2f} points below full training with VGG-13, and {:.2f} above it with ResNet-18"
    yield GPU, words, (-beside[0], beside[1])
    yield from wide_on_a_gpu()
    lines = (RESULTS / "resnet9-wide/proxy.jsonl").read_text().splitlines()
    trained = {(line["arm"], line["factor"], line["seed"]): line for line in map(json.loads, lines)}
    first = {case[:2]: line for case, line in trained.items() if case[2] == 0}
    for (arm, factor), line in first.items():
        row = f"| {arm} | {factor * line['rate']:g} | {{:,}} | {{:.0f}} | {{:.2f}} | {{:.2f}} |"
        shares = [100 * line[key] for key in ("cost", "held_out", "test")]
        yield GPU, row, (line["steps"], *shares)
    gained = mean_difference(
        [
            100 * (trained["proxy", 1, n]["test"] - trained["shorter", 2, n]["test"])
            for n in range(3)
        ]
    )
    above = gained.mean, gained.half_width
    yield GPU, "`proxy` is {:.2f} ±{:.2f} points above `shorter`", above
    yield FITS, "With four times the channels, it was {:.2f} ±{:.2f} points above", above
    # The runs of the second measurement, with batches counted 64 at a time, were not kept.
    again = re.search(r"the shares were ([\d.]+) % \(LeNet\) and ([\d.]+) %", page_text(GPU))
    assert again
    words = "took {} % of the time of a LeNet and {} % of that of a small ResNet"
    yield README, words, again.groups()


def small_classes(name, arm, metric):
    """The difference from ``shorter``, half the width of its interval, and ``shorter`` itself."""
    runs = json.loads((RESULTS / "small-classes.json").read_text(encoding="utf-8"))["runs"][name]
    values, shorter = ([run[metric] for run in runs[one]] for one in (arm, "shorter"))
    made = mean_difference([one - other for one, other in zip(values, shorter, strict=True)])
    return made.mean, made.half_width, statistics.mean(shorter)


def quotes():
    """All quotes as (page, words, figures)."""
    clean, with_wrong = difference(CLEAN, "adaptive"), difference(WRONG, "adaptive")
    to_late = {folder: difference(folder, "adaptive", LATE) for folder in (CLEAN, WRONG)}
    to_matched = {folder: difference(folder, "adaptive", "matched") for folder in (CLEAN, WRONG)}
    patience, alone = "30% budget, patience 5", "30% patience 5 only"

    def below(pair):
        return -pair[0], pair[1]

    for arm in ("shorter", "adaptive", "infobatch"):
        measured = 100 * arm_rows("fine-tuning")[arm].skipped, accuracy("fine-tuning", arm)
        row = f"| {arm} | {{:g}} | {{:.1f}} | {{:.2f}} | {{:+.2f}} ±{{:.2f}} |"
        rate = 0.1 * read_rates(RESULTS / "fine-tuning").arms[arm].factor
        yield TUNED, row, (rate, *measured, *difference("fine-tuning", arm))
    below_shorter = [
        below(difference("fine-tuning", arm, "shorter")) for arm in ("adaptive", "infobatch")
    ]
    yield (
        TUNED,
        "`adaptive` is {:.2f} ±{:.2f} points below it, `infobatch` {:.2f} ±{:.2f}",
        itertools.chain.from_iterable(below_shorter),
    )
    for words, folder, late in (
        ("thin ResNet-18, 30 epochs, rate in steps, correct labels", CLEAN, LATE),
        ("the same, 30 % wrong labels", WRONG, LATE),
        ("the same network, linear rate, correct labels", LINEAR_CLEAN, "shorter"),
        ("the same, 30 % wrong labels", LINEAR_WRONG, "shorter-2"),
        ("ResNet-9, 30 epochs, linear rate, correct labels", FITS_CLEAN, "shorter"),
        ("the same, 30 % wrong labels", FITS_WRONG, "shorter"),
    ):
        to_full = difference(folder, late) + difference(folder, "adaptive")
        row = f"| {words} | {{:.2f}} | {{:+.2f}} ±{{:.2f}} | {{:+.2f}} ±{{:.2f}} |"
        yield README, row, (accuracy(folder, "full"), *to_full)
    saved = 100 * arm_rows("lenet-cifar10-35")["fine-pruning"].skipped
    little_less = below(difference("lenet-cifar10-35", "fine-pruning"))
    for kind, words in (
        ("symmetric", "at random"),
        ("asymmetric", "confused as humans do (truck for car, cat for dog)"),
        ("cat-dog", "cats and dogs only"),
        ("confused", "where a weaker network errs"),
    ):
        figures = wrong(kind), found(kind, "watch"), found(kind, "loss")
        yield README, f"| {{:,}}, {words} | {{:.0f}} | {{:.0f}} |", figures
    yield README, "saved {:.1f} % of the steps of a LeNet", (saved,)
    yield README, "It was {:.2f} ±{:.2f} points below full training (three seeds)", little_less

    eight = difference("resnet9/correct-8", "adaptive", "shorter")
    yield FITS, "`adaptive` is {:.2f} ±{:.2f} points above `shorter`", eight
    for page, exact, folder, lr in (
        (FITS, "resnet9/exact", FITS_WRONG, ""),
        (VARIANTS, "adaptive/exact", LINEAR_WRONG, "0.154 | "),
    ):
        row = f"| exactly the wrong ones skipped | {lr}30.4 | {{:.2f}} | {{:+.2f}} ±{{:.2f}} |"
        to_full = tuned_difference(exact, "full", folder, "full")
        yield page, row, (accuracy(exact, "full"), *to_full)
        gap = tuned_difference(exact, "full", folder, "adaptive")
        yield page, "is {:.2f} ±{:.2f} points above `adaptive`", gap
    above_shorter = difference(FITS_WRONG, "adaptive", "shorter")
    longer = tuned_difference(FITS_LONG, "adaptive", FITS_TUNED, "shorter")
    from_full = difference(FITS_LONG, "adaptive")
    yield ADVICE, "and {:.2f} ±{:.2f} with a ResNet-9 that had memorised labels", longer
    yield (
        FITS,
        "`adaptive` is {:.2f} ±{:.2f} points above `full` and {:.2f} ±{:.2f} above `shorter`",
        (*from_full, *longer),
    )
    to_full = tuned_difference(FITS_TUNED, "shorter", FITS_LONG, "full")
    mean = accuracy(FITS_TUNED, "shorter")
    yield FITS, "| shorter | 0.6 | 35.0 | {:.2f} | {:+.2f} ±{:.2f} |", (mean, *to_full)
    row = "| the same, 60 epochs | {:.2f} | {:+.2f} ±{:.2f} | {:+.2f} ±{:.2f} |"
    yield README, row, (accuracy(FITS_LONG, "full"), *to_full, *from_full)
    yield FITS, "| full | 0.3 | 0.0 | {:.2f} | - |", (accuracy(FITS_CONFUSED, "full"),)
    for arm, rate in (("shorter-2", 0.6), ("adaptive", 0.3)):
        row = f"| {arm} | {rate} | {{:.1f}} | {{:.2f}} | {{:+.2f}} ±{{:.2f}} |"
        skipped = 100 * arm_rows(FITS_CONFUSED)[arm].skipped
        figures = skipped, accuracy(FITS_CONFUSED, arm), *difference(FITS_CONFUSED, arm)
        yield FITS, row, figures
    half_saved = [difference(FITS_HALF_SAVED, arm) for arm in ("shorter-2", "adaptive")]
    yield FITS, "| full | 0.3 | 0.0 | {:.2f} | - |", (accuracy(FITS_HALF_SAVED, "full"),)
    for arm, rate, to_full in (("shorter-2", 0.6, half_saved[0]), ("adaptive", 0.3, half_saved[1])):
        row = f"| {arm} | {rate} | {{:.1f}} | {{:.2f}} | {{:+.2f}} ±{{:.2f}} |"
        skipped = 100 * arm_rows(FITS_HALF_SAVED)[arm].skipped
        yield FITS, row, (skipped, accuracy(FITS_HALF_SAVED, arm), *to_full)
    half_above = difference(FITS_HALF_SAVED, "adaptive", "shorter-2")
    yield FITS, "are enough here**: `adaptive` is {:.2f} ±{:.2f} points above `shorter`", half_above
    words = "| the same, 50 % saved | 30 % wrong | {:+.2f} ±{:.2f} | {:+.2f} ±{:.2f} |"
    yield ADAPTIVE, words, (*half_above, *half_saved[1])
    row = "| the same, half of the steps saved | {:.2f} | {:+.2f} ±{:.2f} | {:+.2f} ±{:.2f} |"
    yield README, row, (accuracy(FITS_HALF_SAVED, "full"), *half_saved[0], *half_saved[1])
    for arm, rate in (("full", 0.3), ("shorter-2", 0.6), ("adaptive", 0.3)):
        shares = 100 * arm_rows("resnet9/half")[arm].skipped, accuracy("resnet9/half", arm)
        yield FITS, f"| {arm} | {rate} | {{:.1f}} | {{:.2f}} |", shares
    page, folder = "docs/results/lenet-cifar10.md", "lenet-cifar10-35"
    for arm, row in arm_rows(folder).items():
        shares = 100 * row.skipped, 100 * row.accuracy_last
        if arm == "full":
            yield page, f"| {arm} | {{:.1f}} | {{:.2f}} | - |", shares
            continue
        words = f"| {arm} | {{:.1f}} | {{:.2f}} | {{:+.2f}} ±{{:.2f}} |"
        yield page, words, (*shares, *difference(folder, arm))
    halved = "lenet-cifar10-50"
    halves = [accuracy(halved, arm) for arm in ("adaptive", "shorter")]
    yield page, "reached {:.2f} % and `shorter`, with 100 epochs, {:.2f} %", halves
    a_little = difference(halved, "adaptive", "shorter")
    yield page, "`adaptive` is {:.2f} ±{:.2f} points above it, and", a_little
    lost = below(tuned_difference(halved, "adaptive", folder, "full"))
    yield page, "It is {:.2f} ±{:.2f} points below full training.", lost
    little = difference(folder, "adaptive", "shorter")
    yield page, "`adaptive` is {:.2f} ±{:.2f} points above `shorter`", little
    confused = tuned_difference(FITS_CONFUSED_TUNED, "adaptive", FITS_CONFUSED, "shorter-2")
    confused_to_full = tuned_difference(FITS_CONFUSED_TUNED, "adaptive", FITS_CONFUSED, "full")
    yield FITS, "the same rate, it is {:.2f} ±{:.2f} points above `shorter`", confused
    row = "| adaptive, tuned | 0.6 | 34.4 | {:.2f} | {:+.2f} ±{:.2f} |"
    yield FITS, row, (accuracy(FITS_CONFUSED_TUNED, "adaptive"), *confused_to_full)
    instance = "resnet9/instance"
    yield (
        README,
        "labels confused consistently | 3 | {:+.2f} ±{:.2f} | | the same, labels that a weaker "
        "network confuses | 3 | {:+.2f} ±{:.2f} |",
        (*confused, *tuned_difference(FITS_INSTANCE_TUNED, "adaptive", instance, "shorter-2")),
    )
    yield FITS, "| shorter-2 | 0.6 | {:.2f} | - |", (accuracy(instance, "shorter-2"),)
    for folder, arm in (
        (instance, "adaptive | 0.3"),
        (FITS_INSTANCE_TUNED, "adaptive, tuned | 0.6"),
    ):
        to_shorter = tuned_difference(folder, "adaptive", instance, "shorter-2")
        row = f"| {arm} | {{:.2f}} | {{:+.2f}} ±{{:.2f}} |"
        yield FITS, row, (accuracy(folder, "adaptive"), *to_shorter)
    for file in ("proxy.jsonl", "proxy-32.jsonl"):
        lines = (RESULTS / "resnet9" / file).read_text().splitlines()
        trained = [line for line in map(json.loads, lines) if line["factor"] == 1]
        tests = {(run["arm"], run["seed"]): 100 * run["test"] for run in trained}
        seeds = sorted({seed for _, seed in tests})

        def above(arm, other, tests=tests, seeds=seeds):
            made = mean_difference([tests[arm, seed] - tests[other, seed] for seed in seeds])
            return made.mean, made.half_width or 0

        for first in (run for run in trained if run["seed"] == 0):
            arm = first["arm"]
            mean = sum(tests[arm, seed] for seed in seeds) / len(seeds)
            row = f"| {arm} | {first['rate']:g} | {{:,}} | {{:.0f}} | {{:.2f}} | "
            row += "- |" if arm == "shorter" else "{:+.2f} ±{:.2f} |"
            to_shorter = () if arm == "shorter" else above(arm, "shorter")
            yield FITS, row, (first["steps"], 100 * first["cost"], mean, *to_shorter)
            if arm == "random":
                words = "the accuracy was {:.2f} points higher (±{:.2f})"
                yield FITS, words, above(arm, "proxy")
    yield from on_a_gpu()
    residual = ("ResNet-18", "ResNet-34", "ResNet-50", "WRN-10", "WRN-16", "WRN-22")
    for name in ("LeNet", "VGG-13", "VGG-16", "VGG-19", *residual):
        ten = f"ten-networks/{name.lower().replace('-', '')}"
        reached = [accuracy(ten, arm) for arm in ("full", "fine-pruning", "shorter")]
        skipped = 100 * arm_rows(ten)["fine-pruning"].skipped
        number = arm_rows(ten)["full"].seeds
        row = f"| {name} | {number} | {{:.1f}} | {{:.2f}} | {{:.2f}} | {{:.2f}} |"
        yield PAPER, row, (skipped, *reached)
    yield from of_the_paper_beside_shorter(residual)
    reduced = [difference("ten-networks/lenet", arm) for arm in ("fine-pruning", "shorter")]
    yield (
        PAPER,
        "{:.2f} ±{:.2f} points above full training, and `shorter` {:.2f} ±{:.2f} below",
        (*reduced[0], *below(reduced[1])),
    )
    equal_rates = "adaptive", "matched", "fine-pruning", "infobatch"
    for folder, arms in (
        (LINEAR_WRONG, {"shorter-2": 0.308, **dict.fromkeys(equal_rates, 0.154)}),
        (LINEAR_CLEAN, {"shorter": 0.154, **dict.fromkeys(equal_rates, 0.154)}),
        (COSINE_WRONG, {"shorter-2": 0.308, "adaptive": 0.154}),
        (COSINE_CLEAN, {"shorter": 0.154, "adaptive": 0.154}),
    ):
        yield VARIANTS, "| full | 0.154 | 0.0 | {:.2f} | - |", (accuracy(folder, "full"),)
        for arm, rate in arms.items():
            row = f"| {arm} | {rate} | {{:.1f}} | {{:.2f}} | {{:+.2f}} ±{{:.2f}} |"
            skipped = 100 * arm_rows(folder)[arm].skipped
            yield VARIANTS, row, (skipped, accuracy(folder, arm), *difference(folder, arm))
    for arm, rate in (("full", 0.154), ("shorter-2", 0.308), ("adaptive", 0.154)):
        skipped = 100 * arm_rows("adaptive/half")[arm].skipped
        both = accuracy("adaptive/half", arm), accuracy("adaptive/confused", arm)
        yield VARIANTS, f"| {arm} | {rate} | {{:.1f}} | {{:.2f}} | {{:.2f}} |", (skipped, *both)
    half = difference("adaptive/half", "adaptive", "shorter-2")
    lost = below(difference("adaptive/half", "adaptive"))
    yield VARIANTS, "`adaptive` is {:.2f} ±{:.2f} points above `shorter`, whose", half
    yield VARIANTS, "and it is {:.2f} ±{:.2f} points below full training. In the", lost
    words = "wrong at random ({:.2f} ±{:.2f} below full training) | 3 | {:+.2f} ±{:.2f} |"
    yield README, words, (*lost, *half)
    words = "was {:.2f} ±{:.2f} points below full training, and {:.2f} ±{:.2f} above the shorter"
    yield ADAPTIVE, words, (*lost, *half)
    no_gain = below(difference("adaptive/confused", "adaptive", "shorter-2"))
    yield VARIANTS, "rate 0.154**: `adaptive` is {:.2f} ±{:.2f} points below `shorter`", no_gain
    chosen = "adaptive/confused-tuned"
    gained = difference(chosen, "adaptive", "shorter")
    yield VARIANTS, "is above `shorter`**, by {:.2f} ±{:.2f} points", gained
    yield (
        VARIANTS,
        "({:.2f} and {:.2f} %; [runs](adaptive/confused-tuned)",
        [accuracy(chosen, arm) for arm in ("adaptive", "shorter")],
    )
    yield ADAPTIVE, "confused consistently, it was {:.2f} ±{:.2f} points above", gained
    words = "ResNet-18, 30 epochs, labels confused consistently | 6 | {:+.2f} ±{:.2f} |"
    yield README, words, gained
    correct = difference(LINEAR_CLEAN, "adaptive", "shorter")
    yield VARIANTS, "as good as `shorter`**: {:.2f} ±{:.2f} points above it", correct
    random_choice = difference(LINEAR_CLEAN, "adaptive", "matched")
    yield VARIANTS, "`adaptive` is {:.2f} ±{:.2f} points above `matched`, but", random_choice
    for arm, words in (
        ("infobatch", "cannot be told apart from `shorter` ({:.2f} ±{:.2f} points below it)"),
        ("fine-pruning", "and `fine-pruning` is {:.2f} ±{:.2f} below it"),
    ):
        yield VARIANTS, words, below(difference(LINEAR_CLEAN, arm, "shorter"))
    again = "adaptive/linear-tuned"
    in_float32 = below(tuned_difference(again, "adaptive", LINEAR_WRONG, "full"))
    to_shorter = tuned_difference(again, "adaptive", LINEAR_WRONG, "shorter-2")
    words = "were {:.2f} ±{:.2f} above `shorter` and {:.2f} ±{:.2f} below `full`"
    yield VARIANTS, words, (*to_shorter, *in_float32)
    above = difference(LINEAR_WRONG, "adaptive", "shorter-2")
    yield VARIANTS, "`adaptive` is {:.2f} ±{:.2f} points above `shorter`", above
    quarter = "adaptive/quarter"
    for arm in ("adaptive", "shorter"):
        measured = 100 * arm_rows(quarter)[arm].skipped, accuracy(quarter, arm)
        rate = 0.154 * read_rates(RESULTS / quarter).arms[arm].factor
        row = f"| {arm} | {{:.3f}} | {{:.1f}} | {{:.2f}} | {{:+.2f}} ±{{:.2f}} |"
        yield VARIANTS, row, (rate, *measured, *difference(quarter, arm))
    yield VARIANTS, "| full | 0.308 | 0.0 | {:.2f} | - |", (accuracy(quarter, "full"),)
    less = difference(quarter, "adaptive", "shorter")
    yield VARIANTS, "`adaptive` is {:.2f} ±{:.2f} points above `shorter` and cannot", less
    words = "it was {:.2f} ±{:.2f} points above `fp.shorter` and {:.2f} ±{:.2f} below full"
    yield README, words, (*less, *below(difference(quarter, "adaptive")))
    twice = "adaptive/linear-twice"
    trials = json.loads((RESULTS / "adaptive/linear-rates.json").read_text(encoding="utf-8"))
    for arm, rates in trials.items():
        reached = [100 * statistics.mean(seeds) for seeds in rates.values()]
        yield VARIANTS, f"| {arm} | {{:.2f}} | {{:.2f}} | {{:.2f}} |", reached
    same_rate = tuned_difference(twice, "adaptive", LINEAR_WRONG, "shorter-2")
    smaller_rate = tuned_difference(twice, "adaptive", LINEAR_WRONG, "full")
    tuned_full = below(tuned_difference(twice, "adaptive", quarter, "full"))
    yield VARIANTS, "`adaptive` reaches {:.2f} % with this rate", (accuracy(twice, "adaptive"),)
    yield VARIANTS, "{:.2f} ±{:.2f} points above `shorter` with the same rate", same_rate
    words = "{:.2f} ±{:.2f} above full training with 0.154, but {:.2f} ±{:.2f} below full training"
    yield VARIANTS, words, (*smaller_rate, *tuned_full)
    words = (
        "`Adaptive` was {:.2f} ±{:.2f} points above `fp.shorter` (six seeds), but {:.2f} ±{:.2f}"
    )
    yield README, words + " below full training", (*same_rate, *tuned_full)
    row = "| the same, twice the rate (full training: three seeds) | 30 % wrong | {:+.2f} ±{:.2f} |"
    yield ADAPTIVE, row + " -{:.2f} ±{:.2f} |", (*same_rate, *tuned_full)
    cosine = {
        "30 % wrong": difference(COSINE_WRONG, "adaptive", "shorter-2"),
        "correct": difference(COSINE_CLEAN, "adaptive", "shorter"),
    }
    cosine_to_full = {
        "30 % wrong": difference(COSINE_WRONG, "adaptive"),
        "correct": difference(COSINE_CLEAN, "adaptive"),
    }
    yield (
        VARIANTS,
        "{:.2f} ±{:.2f} points above it with 30 % wrong labels, and {:.2f} ±{:.2f} with correct",
        (*cosine["30 % wrong"], *cosine["correct"]),
    )
    for labels, to_shorter in cosine.items():
        row = f"| thin ResNet-18, cosine rate, 30 epochs | {labels} |"
        row += " {:+.2f} ±{:.2f} | {:+.2f} ±{:.2f} |"
        yield ADAPTIVE, row, (*to_shorter, *cosine_to_full[labels])
    only_correct = read_run(RESULTS / "resnet9/correct/full-0").summary.accuracy_last
    yield FITS, "reached {:.2f} % (one seed", (100 * only_correct,)
    estimates = [
        sum(suspects(f"{FITS_LONG}/{arm}-{seed}") for seed in range(3)) / 3
        for arm in ("adaptive", "shorter", "full")
    ]
    yield FITS, "is {:,.0f} for `adaptive`, {:,.0f} for `shorter` and {:,.0f} for `full`", estimates
    nine, eighteen = "ResNet-9, linear rate, {} epochs | ", "thin ResNet-18, {}, 30 epochs | "
    noisy = "30 % wrong"
    for row, to_shorter, to_full in (
        (nine.format(60) + noisy, longer, from_full),
        (
            "ResNet-9, linear rate, 60 epochs, twice the rate | confused consistently",
            confused,
            confused_to_full,
        ),
        (nine.format(30) + noisy, above_shorter, difference(FITS_WRONG, "adaptive")),
        (
            eighteen.format("linear rate") + noisy,
            difference(LINEAR_WRONG, "adaptive", "shorter-2"),
            difference(LINEAR_WRONG, "adaptive"),
        ),
        (eighteen.format("rate in steps") + noisy, to_late[WRONG], with_wrong),
        (eighteen.format("rate in steps") + "correct", to_late[CLEAN], clean),
        (
            eighteen.format("linear rate") + "correct",
            correct,
            difference(LINEAR_CLEAN, "adaptive"),
        ),
        (
            nine.format(30) + "correct (eight seeds, three of full training)",
            eight,
            difference(FITS_CLEAN, "adaptive"),
        ),
    ):
        words = f"| {row} | {{:+.2f}} ±{{:.2f}} | {{:+.2f}} ±{{:.2f}} |"
        yield ADAPTIVE, words, (*to_shorter, *to_full)
    words = "it was {:.2f} ±{:.2f} to {:.2f} ±{:.2f} points above the shorter schedule, most in"
    yield CHOOSE, words, (*to_late[WRONG], *longer)
    yield ADVICE, "and {:.2f} ±{:.2f} with a ResNet-9).", eight
    for words, other in (("above `shorter`", "shorter"), ("above `matched`", "matched")):
        above = difference(FITS_WRONG, "adaptive", other)
        yield FITS, f" is {{:.2f}} ±{{:.2f}} points {words}", above
    yield (
        CHOOSE,
        "full training gained {} points on held-out images ({} %, one seed), and {} points with "
        "30 % wrong labels",
        (
            gain("0% full, rate scaled", "0% full"),
            held_out("0% full, rate scaled"),
            gain("30% full, rate scaled", "30% full"),
        ),
    )
    yield (
        CHOOSE,
        "fewer epochs at the smallest rates {} %, `Adaptive` {} %; with wrong labels, `Adaptive` "
        "and full training {} %, fewer epochs at the smallest rates {} %",
        (
            held_out("0% fewer epochs, late, rate scaled"),
            held_out("0% budget, rate scaled"),
            held_out("30% full, rate scaled"),
            held_out("30% fewer epochs, late, rate scaled"),
        ),
    )
    yield (
        CHOOSE,
        "gave the same accuracy ({} and {} %)",
        (held_out("0% budget"), held_out("0% budget, gradient norm, mean one")),
    )

    yield (
        ADVICE,
        "fp.Adaptive was {:.2f} ±{:.2f} points more accurate than the best shorter training",
        to_late[WRONG],
    )
    yield ADVICE, "as accurate ({:.2f} ±{:.2f} points above it with a thin", to_late[CLEAN]
    for name, what, arm in (
        ("fp.shorter(rates", "", LATE),
        ("fp.Adaptive(epochs", "", "adaptive"),
        ("fp.InfoBatch(epochs", ", which skips what is learned", "infobatch"),
    ):
        words = f'{name}, save=0.35){what}", "{{:+.2f}} ±{{:.2f}}", "{{:+.2f}} ±{{:.2f}}"'
        yield ADVICE, words, (*difference(CLEAN, arm), *difference(WRONG, arm))
    yield (
        ADVICE,
        "{:.1f} % of the samples after five epochs with 30 % wrong labels, and {:.1f} % with "
        "correct ones",
        (
            at_epoch(patience, 5, "skipped") / 100,
            at_epoch("0% budget, patience 5", 5, "skipped") / 100,
        ),
    )
    early, ten, thirty = estimated("3"), estimated("10"), estimated("30")
    yield (
        ADVICE,
        "the estimate was up to {:.1f} times too high after ten epochs, and up to {:.0f} times "
        "after three",
        (ten[1], early[1]),
    )
    yield ADVICE, "was {:.1f} to {:.1f} times the true number after ten epochs", ten
    yield ADVICE, "was {:.2f} to {:.2f} times the true number after 30 epochs", thirty
    memorised = [
        read_run(folder).summary.suspicion
        for folder in [*RESULTS.glob("resnet9/*/full-*"), *RESULTS.glob("resnet9-wide/*/full-*")]
    ]
    parts = [one.suspects / one.wrong for one in memorised if one and one.suspects and one.wrong]
    yield ADVICE, "and {:.2f} to {:.2f} times, or less, with", (min(parts), max(parts))
    linear = tuned_difference("resnet9/long-linear", "fewer-epochs", FITS_TUNED, "shorter")
    beside = tuned_difference(FITS_LONG, "adaptive", "resnet9/long-linear", "fewer-epochs")
    words = "reached {:.2f} %. It was {:.2f} ±{:.2f} points above `shorter`, and `adaptive` {:.2f} "
    figures = (accuracy("resnet9/long-linear", "fewer-epochs"), *linear, *beside)
    yield FITS, words + "±{:.2f} above it", figures
    other = tuned_difference("resnet9/wrong-linear", "fewer-epochs", FITS_WRONG, "shorter")
    reached = accuracy("resnet9/wrong-linear", "fewer-epochs")
    words = "reached {:.2f} %. It was {:.2f} ±{:.2f} points below `shorter`"
    yield FITS, words, (reached, *below(other))
    other = tuned_difference("adaptive/linear-fewer", "fewer-epochs", LINEAR_WRONG, "shorter-2")
    yield VARIANTS, "was {:.2f} ±{:.2f} points below `shorter` with the same", below(other)
    rare = small_classes("digits, five rare classes, 20 % wrong", "losses", "accuracy")
    words = "was {:.2f} ±{:.2f} points below the shorter schedule if only losses were known"
    yield ADAPTIVE, words, (-rare[0], rare[1])
    digits = [small_classes("digits, 30 % wrong", arm, "accuracy") for arm in ("quarter", "logits")]
    words = (
        "it was {:.2f} ±{:.2f} points above `fp.shorter` with 65 %, and `Adaptive` {:.2f} ±{:.2f}"
    )
    yield CHOOSE, words, (*digits[0][:2], *digits[1][:2])
    several = "two classes of one size, best error 20 %"
    beside_shorter = small_classes(several, "logits", "cross_entropy")
    words = "the cross-entropy was {:.2f} ±{:.2f} above that of the shorter schedule, {:.2f} "
    yield ADAPTIVE, words, beside_shorter

    areas = [roc_area(kind, seeds=(1, 2)) for kind in KINDS]
    firsts = [
        found(kind, "watch", seeds=(1, 2))
        for kind in ("symmetric", "cat-dog", "asymmetric", "confused")
    ]
    yield (
        FOUND,
        "on average {:.3f} (symmetric), {:.3f} (cat-dog), {:.3f} (asymmetric) and {:.3f} "
        "(confused), and {:.0f}, {:.0f}, {:.0f} and {:.0f} of the first 1,000 are wrong",
        (*areas, *firsts),
    )
    yield (
        FOUND,
        "{:.0f} are wrong with the asymmetric map and {:.0f} (of {}) with cats and dogs, where the "
        "loss finds {:.0f} and {:.0f}",
        (
            found("asymmetric", "watch"),
            found("cat-dog", "watch"),
            wrong("cat-dog"),
            found("asymmetric", "loss"),
            found("cat-dog", "loss"),
        ),
    )
    yield (
        FOUND,
        "The loss is slightly better ({:.0f} and {:.0f} of 1,000)",
        (found("symmetric", "loss"), found("symmetric", "watch")),
    )
    yield (
        FOUND,
        "(the loss finds {:.0f} of 1,000, the watch {:.0f})",
        (found("confused", "loss"), found("confused", "watch")),
    )
    beside = [beside_cleanlab(kind) for kind in ("asymmetric", "cat-dog", "confused", "symmetric")]
    yield (
        FOUND,
        "ROC areas: {:.3f} and {:.3f} (asymmetric), {:.3f} and {:.3f} (cat-dog), {:.3f} and {:.3f} "
        "(confused), {:.3f} and {:.3f} (symmetric)",
        [one["roc_area"] for pair in beside for one in pair],
    )
    yield (
        FOUND,
        "among the first 1,000: {} and {}, {} and {}, {} and {}, {} and {}",
        [one["first"] for pair in beside for one in pair],
    )
    words = "it is {:.2f} to {:.2f} times the true number, averaged over the runs of each kind"
    yield FOUND, words, thirty
    yield FOUND, "it is {:.1f} to {:.1f} times that", ten
    losses = [
        max(roc_area(kind) - roc_area(kind, f"strongest {number}") for kind in KINDS)
        for number in (4, 1)
    ]
    yield FOUND, "the ROC area is at most {:.3f} smaller, and with one {:.3f}", losses

    yield (
        VARIANTS,
        "{:.1f} points below full training, and as much as removing epochs at the smallest rates "
        "(`fewer-epochs-late`). Fewer epochs in proportion cost {:.1f} points",
        (exact_gain("0% full", "0% budget"), exact_gain("0% full", "0% fewer epochs")),
    )
    yield (
        VARIANTS,
        "it is {:.1f} points better than the budget alone, and alone it saves {:.0f} % without a "
        "loss. With correct labels it costs {:.1f} points: the {:.0f} % of",
        (
            exact_gain(patience, "30% budget"),
            100 * (1 - variants()[alone]["share_trained"]),
            exact_gain("0% budget", "0% budget, patience 5"),
            at_epoch("0% budget, patience 5", -1, "skipped") / 100,
        ),
    )
    yield (
        VARIANTS,
        "When the sixth epoch began, {:.1f} % did so with 30 % wrong labels, and {:.1f} % with "
        "correct ones ({:.1f} % at the end",
        (
            at_epoch(patience, 5, "skipped") / 100,
            at_epoch("0% budget, patience 5", 5, "skipped") / 100,
            at_epoch("0% budget, patience 5", -1, "skipped") / 100,
        ),
    )
    yield (
        VARIANTS,
        "the accuracy would be {:.1f} points above full training",
        (exact_gain("30% budget, oracle from 5", "30% full"),),
    )
    yield (
        VARIANTS,
        "it has found {:.0f} % of the wrong labels when the sixth epoch begins, and {:.0f} % at "
        "the end. Its errors ({:.0f} to {:.0f} % of the samples that it skips have correct labels) "
        "explain little of this: without them, the accuracy is {} %",
        (
            100 * at_epoch(patience, 5, "recall"),
            100 * at_epoch(patience, -1, "recall"),
            100 * (1 - at_epoch(patience, 5, "precision")),
            100 * (1 - at_epoch(patience, -1, "precision")),
            held_out("30% budget, patience 5, wrong labels only"),
        ),
    )
    yield (
        VARIANTS,
        "{:.2f} ±{:.2f} points above `fewer-epochs-late`, which is the strongest one, {:.2f} "
        "±{:.2f} above `matched`",
        (*to_late[WRONG], *to_matched[WRONG]),
    )
    yield (
        VARIANTS,
        "`adaptive` is {:.2f} ±{:.2f} points above `matched` and {:.2f} ±{:.2f} above "
        "`fewer-epochs-late`",
        (*to_matched[CLEAN], *to_late[CLEAN]),
    )

    yield (
        SPEED,
        "takes {:.1f} to {:.1f} % of a LeNet epoch",
        [
            float(cells("overhead.md", size, name)[-1].split()[0])
            for size, name in (("50,000", "fine-pruning"), ("50,000", "adaptive"))
        ],
    )
    yield (
        SPEED,
        "Selecting among 100 million samples takes {} s, and {} MB in addition",
        [cell.strip(" |") for cell in cells("overhead.md", "all equal")[1:]],
    )
    ratios = {
        name: [float(cell.split()[0]) for cell in cells("throughput.md", name)[-2:]]
        for name in ("LeNet", "ResNet-18")
    }
    yield (
        SPEED,
        "is {:.1f} times (LeNet) and {:.1f} times (ResNet-18) as fast as a plain loop",
        [ratio[0] for ratio in ratios.values()],
    )
    yield (
        SPEED,
        "Its throughput is {:.2f} and {:.2f} times that of the network alone",
        [ratio[1] for ratio in ratios.values()],
    )


QUOTES = [pytest.param(*quote, id=f"{quote[0]}-{place}") for place, quote in enumerate(quotes())]


@pytest.mark.parametrize(("page", "words", "figures"), QUOTES)
def test_a_quote_is_what_was_measured(page, words, figures):
    assert words.format(*figures) in page_text(page)


# Decimal numbers and shares that are no results: settings, versions, and rules of the method.
NO_RESULTS = {
    README: {
        "3.11",  # Python
        "2.6",  # PyTorch
        "2.0",  # licence
        "15 %",  # wrong labels of the picture
        "30 %",  # wrong labels of the table
        "35 %",  # saved
        "95 %",  # interval
    },
    CHOOSE: {"35 %", "30 %", "65 %", "5 %", "15 %", "0.154", "0.1"},
    ADAPTIVE: {"35 %", "30 %", "20 %", "1.5", "95 %", "7.5 %", "5 %"},
    LABELS: {"5 %", "80 %", "30 %", "35 %"},
    # Thresholds and settings, and what the thresholds are between.
    ADVICE: {
        "0.0",
        "0.01",
        "0.15",
        "0.35",
        "30 %",
        "35 %",
        "95 %",
    },
}
FIGURE = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+(?: %)?| %)(?!\w)")


@pytest.mark.parametrize("page", NO_RESULTS)
def test_each_figure_of_a_page_that_quotes_belongs_to_a_quote(page):
    text = page_text(page)
    for quoted, words, figures in quotes():
        if quoted == page:
            text = text.replace(words.format(*figures), "")
    code = re.compile(r"`[^`]*`|\{[^}]*\}")  # In Python, what is in braces is computed.
    assert set(FIGURE.findall(code.sub("", text))) <= NO_RESULTS[page]


# -- tables ----------------------------------------------------------------------------------------


def test_the_tables_of_found_labels_are_made_from_their_file():
    benchmark = runpy.run_path(str(ROOT / "benchmarks/label_ranking.py"))
    page = (ROOT / FOUND).read_text(encoding="utf-8")
    shown = page.partition(benchmark["BEGIN"])[2].partition(benchmark["END"])[0]
    assert shown.strip() == benchmark["tables"](found_labels())


def markdown_table(table):
    """A table as the pages of results show it, with its title and its note."""
    ruler = ["---", *["---:"] * (len(table.headers) - 1)]
    rows = [table.headers, ruler, *table.lines, *table.paper]
    lines = [f"| {' | '.join(row)} |".replace("\N{NO-BREAK SPACE}", " ") for row in rows]
    return "\n".join([f"**{table.title}**", "", *lines, "", table.note, ""])


def test_the_tables_of_scale_are_those_of_its_runs():
    """Figures, titles, columns and notes are what ``fineprune scale`` prints for these runs."""
    tables = scale_tables(scale_rows(read_scaling(RESULTS / "scale").runs, None))
    assert len(tables) == 5
    text = page_text("docs/results/scale.md")
    throughput, learning, staleness, phases, _ = tables
    for table in (throughput, learning, phases):
        assert " ".join(markdown_table(table).split()) in text
    assert "a mean staleness of 0.986 updates" in text
    assert sum(line[2] == "0.986" for line in staleness.lines) == 2


def test_the_table_of_lenet_is_that_of_its_runs():
    folders = (RESULTS / "lenet-cifar10").iterdir()
    shown = (RESULTS / "lenet-cifar10.md").read_text(encoding="utf-8").splitlines()
    (group,) = grouped(read_runs(sorted(folders)))
    rows = group_rows(group)
    table = comparison_table("", rows, columns_for(rows))
    lines = [line for line in markdown_table(table).splitlines() if line.startswith("|")]
    assert len(lines) == 8
    assert set(lines) <= set(shown)


def test_the_tables_of_simulated_clusters_are_those_of_their_runs():
    shown = page_text("docs/results/simulated-cluster.md")
    results = json.loads((RESULTS / "simulated-cluster.json").read_text(encoding="utf-8"))
    assert len(results) == 36
    for name, accuracies in results.items():
        learned = [value for value in accuracies if value is not None and value > 10.5]
        failed = len(accuracies) - len(learned)
        cell = f"{failed} of 3 failed" if failed else ""
        if learned:
            cell += ", else " if failed else ""
            cell += f"{np.mean(learned):.2f} ±{np.std(learned, ddof=1):.2f}"
        assert f"| {cell} |" in shown, name


@pytest.mark.parametrize(
    ("page", "folder", "arms"),
    [
        (VARIANTS, CLEAN, 8),
        (VARIANTS, WRONG, 8),
        (FITS, FITS_CLEAN, 3),
        (FITS, FITS_WRONG, 4),
    ],
)
def test_the_tables_of_comparisons_are_those_of_their_runs(page, folder, arms):
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = arm_rows(folder)
    assert len(rows) == arms
    for row in rows.values():
        points = "-"
        if row.arm != "full":
            mean, half_width = difference(folder, row.arm)
            points = f"{mean:+.2f} ±{half_width:.2f}"
        shares = f"{100 * row.skipped:.1f} | {100 * row.accuracy_last:.2f}"
        assert row.seeds == 3
        assert f"\n| {row.arm} | {shares} | {points} |\n" in text


# The rows of the table of variants, by what follows "0% " and "30% " in the names.
BY_RATE = (
    ("full", "full"),
    ("full, rate scaled", "full, rate scaled"),
    ("fewer epochs", None),
    ("fewer epochs, rate scaled", "fewer epochs, rate scaled"),
    ("fewer epochs, late", None),
    ("fewer epochs, late, rate scaled", "fewer epochs, late, rate scaled"),
    ("fewer epochs 50%, late", None),
    ("budget", "budget"),
    ("budget, rate scaled", "budget, rate scaled"),
    ("budget, power 0.5", "budget, power 0.5"),
    ("budget 50%", None),
    ("budget, patience 5", "budget, patience 5"),
    (None, "budget, patience 5, rate scaled"),
    (None, "budget 50%, patience 5"),
    (None, "patience 5 only"),
    ("budget, gradient norm, mean one", None),
    (None, "budget, patience 5, wrong labels only"),
    (None, "budget, oracle from 5"),
    (None, "budget, oracle from 18"),
)


def test_the_table_of_variants_is_that_of_its_file():
    page = (ROOT / VARIANTS).read_text(encoding="utf-8")
    lines = page.partition("| variant |")[2].splitlines()[2:]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in itertools.takewhile(bool, lines)
    ]
    for row, (correct, weak) in zip(rows, BY_RATE, strict=True):
        full_names = [name and at + name for at, name in (("0% ", correct), ("30% ", weak))]
        assert row[2:] == ["-" if name is None else str(held_out(name)) for name in full_names]
        shares = [variants()[name]["share_trained"] for name in full_names if name]
        assert {f"{100 * (1 - share):.0f}" for share in shares} == {row[1]}


def test_the_tables_of_the_joint_study_are_those_of_its_runs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    study = runpy.run_path(str(ROOT / "benchmarks/joint_study.py"))
    records = study["read_records"](RESULTS / "joint/runs.jsonl")
    tables = study["tables"](study["Study"](records)).split("\n\n")
    page = (RESULTS / "joint.md").read_text(encoding="utf-8")
    assert len(tables) == 3
    assert all(f"\n{table}\n" in page for table in tables[:2])
    overlap = [line.strip("| ").split(" | ") for line in tables[2].splitlines()[2:]]

    def shown(arm, same, seed):
        """The means of the pairs of one strategy, or of two."""
        return [
            row[3]
            for row in overlap
            if row[0] == arm and row[1].endswith(f"{seed} seed") and (" and " in row[1]) != same
        ]

    text = page_text("docs/results/joint.md")
    words = "(Jaccard {} with an age of one, {} with three, {} with seven)"
    assert words.format(*shown("fine-pruning", False, "same")) in text
    others = sorted(shown("fine-pruning", True, "other"))
    assert f"two seeds with the same strategy ({others[0]} to {others[-1]}; by chance" in text
    others = sorted(shown("adaptive", True, "other"))
    words = "({}, {} and {} with the same seed, {} to {} with others)"
    assert words.format(*shown("adaptive", False, "same"), others[0], others[-1]) in text


def test_the_table_of_stale_gradients_is_that_of_its_runs():
    page = (RESULTS / "staleness.md").read_text(encoding="utf-8")
    for workers in (1, 2, 4, 8):
        full, pruned = (
            read_run(RESULTS / f"staleness/{policy}-{workers}").summary
            for policy in ("full", "fine-pruning")
        )
        shares = (full.accuracy_last, pruned.accuracy_last, pruned.skipped_share)
        shown = " | ".join(f"{100 * share:.2f}" for share in shares)
        assert f"| {workers} | {workers - 1} | {shown} |" in page


def times_of_networks(page, section):
    """The cells of a table of times, by the names of the networks, and what made the rows."""
    text = (RESULTS / page).read_text(encoding="utf-8")
    (part,) = re.findall(rf"## {re.escape(section)}\n(.*?)\n## ", text, re.DOTALL)
    shown = {}
    for line in part.splitlines():
        if line.startswith("|"):
            name, *of_network = line.strip("| ").split(" | ")
            shown[name.lower().replace("-", "")] = of_network
    return shown, runpy.run_path(str(ROOT / "benchmarks/network_times.py"))


def test_the_table_of_the_times_of_the_networks_is_that_of_its_runs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    shown, benchmark = times_of_networks("paper.md", "Do larger networks save more?")
    for name in benchmark["IMAGES"]:
        row = benchmark["row_of"](name, RESULTS / "network-times" / name)
        formats = ("{:,}", "{:,}", "{:,.0f}", "{:.1f}", "{:.2f}", "{:.2f}")
        figures = [figure for column, figure in row.items() if column != "samples skipped, %"]
        assert row["samples skipped, %"] == 25
        assert shown[name] == [
            form.format(figure) for form, figure in zip(formats, figures[1:], strict=True)
        ]


def test_the_table_of_the_times_on_a_gpu_is_that_of_its_runs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    shown, benchmark = times_of_networks("gpu.md", "What bookkeeping costs")
    for name in benchmark["IMAGES"].keys() - {"wrn22"}:
        row = benchmark["row_of"](name, RESULTS / "network-times-gpu" / name)
        last = ("time saved, %", "time saved per share skipped", "bookkeeping, % of the time")
        figures = [row["ms per full step"], *(row[column] for column in last)]
        assert shown[name] == [
            form.format(figure)
            for form, figure in zip(("{:.1f}", "{:.1f}", "{:.2f}", "{:.1f}"), figures, strict=True)
        ]


def test_the_table_of_small_classes_is_that_of_its_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = runpy.run_path(str(ROOT / "benchmarks/small_classes.py"))
    found = json.loads((RESULTS / "small-classes.json").read_text(encoding="utf-8"))
    page = (ROOT / VARIANTS).read_text(encoding="utf-8")
    assert benchmark["table_of"](found["runs"], benchmark["COLUMNS"]) in page


def test_the_table_of_uneven_data_is_that_of_its_runs():
    runs = json.loads((RESULTS / "uneven-labels.json").read_text(encoding="utf-8"))["runs"]
    columns = {
        "wrong": "{:.0f}",
        "estimated": "{:.0f}",
        "right_suggestions": "{:.2f}",
        "watch_roc_area": "{:.3f}",
        "watch_found": "{:.2f}",
        "loss_roc_area": "{:.3f}",
        "loss_found": "{:.2f}",
    }
    for case in dict.fromkeys(run["case"] for run in runs):
        means = [
            form.format(statistics.mean(run[name] for run in runs if run["case"] == case))
            for name, form in columns.items()
        ]
        assert cells("labels.md", case)[1:] == [*means[:-1], means[-1] + " |"]
