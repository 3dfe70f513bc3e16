"""Wrong labels, pruning and stale gradients together: trains a study, and prints its tables.

    python benchmarks/cifar_as_files.py data data/cifar10-jpeg --jpeg
    python benchmarks/joint_study.py train runs/joint --seeds 3
    python benchmarks/joint_study.py tables runs/joint/runs.jsonl

``train`` trains the arms of ``fineprune compare`` under several strategies, one seed after another.
Each strategy has the same number of samples per update, and gradients of another age. The command
continues a study where it was stopped. Every finished run is a line of ``runs.jsonl``, from which
``tables`` makes Markdown tables, or JSON with ``--json``.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from table import markdown

from fineprune.errors import InputError, RunError
from fineprune.experiments.arm_table import Difference, mean_difference
from fineprune.experiments.compare import plan_runs
from fineprune.experiments.configurations import configuration, configured
from fineprune.experiments.launched_run import launch
from fineprune.experiments.planned_run import PlannedRun
from fineprune.inspection.overlap import expected_jaccard, largest
from fineprune.inspection.suspects import smoothed_losses
from fineprune.report.table import decimal, percent
from fineprune.runs.history import read_history
from fineprune.runs.lock import only_writer
from fineprune.runs.run import Run, read_run
from fineprune.training.data import load_data
from fineprune.training.hardware import resolved
from fineprune.training.recipe import Recipe, read_recipe
from fineprune.training.stop import Stopped
from fineprune.training.suspicion import Suspicion, detection

# A strategy is a configuration of ``fineprune scale`` and a number of workers to simulate. Their
# gradients are 0, about 1, about 3 and (but for the first ones of an epoch) exactly 7 updates old.
STRATEGIES = {
    "all-reduce": ("all-reduce 2", 0),
    "mixed": ("mixed 4+1 group=2", 0),
    "async": ("async 4+1", 0),
    "simulated": ("one", 8),
}
ARMS = ("full", "fine-pruning", "adaptive", "matched", "fewer-epochs-late")
BASELINE, FRESH = ARMS[0], next(iter(STRATEGIES))
RESULTS = "runs.jsonl"

# The values of a record of which the tables show means, and differences to fresh gradients.
MEANS = (
    *("staleness", "accuracy", "loss_roc_area", "roc_area"),
    *("precision", "recall", "wrong_of_skipped"),
)
SINCE_FRESH = {
    "to_fresh": "accuracy",
    "losses_to_fresh": "loss_roc_area",
    "suspicion_to_fresh": "roc_area",
}

# The share of the samples that are compared as the most skipped ones.
SHARE = 0.1

Record = dict[str, Any]
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def planned(
    recipe: Recipe, folder: Path, seeds: int, strategy: str, arms: Sequence[str]
) -> list[PlannedRun]:
    """Return the runs of a strategy, ordered by seed."""
    text, simulate = STRATEGIES[strategy]
    made = configured(recipe, configuration(text), same_update=True)
    if simulate:
        made = made.replaced("distributed", simulate=simulate)
    return plan_runs(resolved(made), folder / strategy, seeds, arms)


def train(
    recipe: Recipe, folder: Path, seeds: int, strategies: Sequence[str], arms: Sequence[str]
) -> None:
    """Train the runs that are not finished: those of the first seed first."""
    plans = {name: planned(recipe, folder, seeds, name, arms) for name in strategies}
    queue = [
        (name, run)
        for number in range(seeds)
        for name, runs in plans.items()
        for run in runs
        if run.number == number
    ]
    for name, run in queue:
        if run.finished():
            continue
        with only_writer(run.folder.parent):
            complete = run.complete()
            assert complete is not None  # The run that a control matches comes before it.
            print(f"{name}, {run.name}, seed {run.number}", flush=True)
            ready = dataclasses.replace(run, recipe=complete, matches=None)
            launch(ready, configuration(STRATEGIES[name][0]), lambda: None)


def record(folder: Path, wrong: npt.NDArray[np.bool_]) -> Record:
    """Return what the tables need of a finished run.

    Args:
        folder: The folder of the run, in the folder of its strategy.
        wrong: Which training labels are wrong; bool, shape (N,).
    """
    run = read_run(folder)
    summary = run.summary
    history = read_history(folder, len(wrong))
    assert history is not None
    skipped = (~history.trained).sum(axis=0)
    # The same measure for all arms, also for those that suspect no samples.
    losses = Suspicion(torch.from_numpy(smoothed_losses(history)), None)
    own = summary.suspicion
    assert own is not None
    found = {name: _rounded(getattr(own, name)) for name in ("roc_area", "precision", "recall")}
    return {
        "strategy": folder.parent.name,
        "arm": summary.arm,
        "seed": summary.seed,
        "accuracy": summary.accuracy_last,
        "train_samples": summary.train_samples,
        "samples_trained": summary.samples_trained,
        "steps": summary.steps,
        "seconds": round(summary.seconds_train, 1),
        "staleness": _rounded(mean_staleness(run)),
        "loss_roc_area": _rounded(detection(losses, wrong)["roc_area"]),
        **found,
        "suspects": own.suspects,
        "roc_areas": [_rounded(line.get("suspicion", {}).get("roc_area")) for line in run.metrics],
        "wrong_of_skipped": _rounded(skipped @ wrong / skipped.sum()) if skipped.any() else None,
        # One digit per sample, to the base 36.
        "times_skipped": "".join(_DIGITS[times] for times in skipped) if skipped.any() else None,
        "deaths": sum(
            line["distributed"][f"{kind}_deaths"]
            for line in run.metrics
            for kind in ("worker", "server")
            if "distributed" in line
        ),
        "versions": summary.versions,
        "hardware": vars(summary.hardware),
    }


def mean_staleness(run: Run) -> float:
    """Return the mean age of a run's gradients, in updates."""
    simulate = run.recipe["distributed"]["simulate"]
    ages = []
    for line in run.metrics:
        if simulate:  # All workers read the same weights at the start of an epoch.
            ages.append(np.minimum(np.arange(line["steps"]), simulate - 1))
        elif "distributed" in line:
            counts = line["distributed"]["staleness"]
            ages.append(np.repeat(np.arange(len(counts)), counts))
        else:
            ages.append(np.zeros(line["steps"]))
    return float(np.concatenate(ages).mean())


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 4)


def records(recipe: Recipe, folder: Path) -> list[Record]:
    """Return the records of all finished runs, in the order of the strategies, arms and seeds."""
    wrong = load_data(resolved(recipe)).wrong
    assert wrong is not None
    found = [
        record(path.parent, wrong)
        for name in STRATEGIES
        for path in (folder / name).glob("*/summary.json")
    ]
    names = list(STRATEGIES)
    return sorted(
        found, key=lambda r: (names.index(r["strategy"]), ARMS.index(r["arm"]), r["seed"])
    )


class Study:
    """The records of a study, and what is computed from them.

    Args:
        found: The records of its runs.
    """

    def __init__(self, found: Sequence[Record]) -> None:
        self._by_place = {(r["strategy"], r["arm"], r["seed"]): r for r in found}
        self.seeds = sorted({r["seed"] for r in found})

    def of(self, strategy: str, arm: str) -> dict[int, Record]:
        """Return the runs of an arm under a strategy, by seed."""
        places = {seed: (strategy, arm, seed) for seed in self.seeds}
        return {s: self._by_place[p] for s, p in places.items() if p in self._by_place}

    def mean(self, strategy: str, arm: str, name: str) -> float | None:
        """Return the mean of a value over the seeds; None if a run has no such value."""
        values = [run[name] for run in self.of(strategy, arm).values()]
        return statistics.fmean(values) if values and None not in values else None

    def difference(self, name: str, *terms: tuple[int, str, str]) -> Difference | None:
        """Return a sum of values, paired by seed, with the interval of its mean.

        Args:
            name: The name of the value.
            terms: The sign, the strategy and the arm of each value.

        Returns:
            The mean over the seeds that all terms have; None if there is none.
        """
        runs = [(sign, self.of(strategy, arm)) for sign, strategy, arm in terms]
        shared = set.intersection(*(set(by_seed) for _, by_seed in runs))
        parts = [[(sign, part[seed][name]) for sign, part in runs] for seed in sorted(shared)]
        if not parts or any(value is None for part in parts for _, value in part):
            return None
        return mean_difference([sum(sign * value for sign, value in part) for part in parts])

    def rows(self) -> list[dict[str, Any]]:
        """Return the values of each arm under each strategy, and their differences.

        ``to_full`` is the difference to the arm ``full`` of the same strategy, ``to_fresh`` that to
        the same arm with fresh gradients, and ``change`` the difference of ``to_full`` to that with
        fresh gradients. All are paired by seed.
        """
        result = []
        for strategy, arm in itertools.product(STRATEGIES, ARMS):
            runs = self.of(strategy, arm)
            if not runs:
                continue
            here, fresh = (1, strategy, arm), (-1, FRESH, arm)
            full, fresh_full = (-1, strategy, BASELINE), (1, FRESH, BASELINE)
            row: dict[str, Any] = {"strategy": strategy, "arm": arm, "seeds": len(runs)}
            row |= {name: self.mean(strategy, arm, name) for name in MEANS}
            row |= dict.fromkeys(("to_full", "to_fresh", "change"))
            trained, of_full = (self.mean(strategy, a, "samples_trained") for a in (arm, BASELINE))
            row["saved"] = 1 - trained / of_full if trained and of_full else None
            if arm != BASELINE:
                row["to_full"] = self.difference("accuracy", here, full)
            for name, value in SINCE_FRESH.items():
                row[name] = self.difference(value, here, fresh) if strategy != FRESH else None
            if arm != BASELINE and strategy != FRESH:
                row["change"] = self.difference("accuracy", here, full, fresh, fresh_full)
            result.append(row)
        return result

    def overlaps(self) -> list[dict[str, Any]]:
        """Return how far pairs of runs skip the same samples most often."""
        found: dict[tuple[str, str], list[float]] = {}
        by_chance = 0.0
        for arm in ("fine-pruning", "adaptive"):
            runs = [r for name in STRATEGIES for r in self.of(name, arm).values()]
            size = round(SHARE * runs[0]["train_samples"]) if runs else 0
            # Each run has its own random numbers, by which equal samples are chosen.
            tops = [largest(times_skipped(r), size, seed) for seed, r in enumerate(runs)]
            for (i, one), (j, other) in itertools.combinations(enumerate(runs), 2):
                same_seed = one["seed"] == other["seed"]
                kind = _kind(one["strategy"], other["strategy"], same_seed=same_seed)
                if kind is None:
                    continue
                common = len(np.intersect1d(tops[i], tops[j]))
                found.setdefault((arm, kind), []).append(common / (2 * size - common))
                by_chance = expected_jaccard(size, one["train_samples"])
        return [
            {
                "arm": arm,
                "pairs of runs": kind,
                "pairs": len(values),
                "jaccard": statistics.fmean(values),
                "smallest": min(values),
                "largest": max(values),
                "by_chance": by_chance,
            }
            for (arm, kind), values in found.items()
        ]


def _kind(one: str, other: str, *, same_seed: bool) -> str | None:
    """Return the kind of a pair of runs; None for pairs that the table leaves out."""
    if one == other:
        return f"{one}, other seed"
    if FRESH in (one, other):
        return f"{one} and {other}, {'same' if same_seed else 'other'} seed"
    return None


def times_skipped(run: Record) -> npt.NDArray[np.int64]:
    """Return how often each sample was skipped; int64, shape (N,)."""
    return np.array([_DIGITS.index(digit) for digit in run["times_skipped"]], dtype=np.int64)


def points(difference: Difference | None, factor: int = 100, digits: int = 2) -> str:
    """Write a difference with half its 95 % interval, in percentage points by default."""
    if difference is None:
        return "-"
    half = difference.half_width
    text = f"{factor * difference.mean:+.{digits}f}"
    return text if half is None else f"{text} ±{factor * half:.{digits}f}"


def tables(study: Study) -> str:
    """Return the tables of a study: accuracies, wrong labels found, and overlaps."""
    rows = study.rows()
    accuracies = markdown(
        [
            *("strategy", "arm", "seeds", "staleness", "saved, %", "last epoch, %"),
            *("to full, points", f"to {FRESH}, points", "change of to full, points"),
        ],
        [
            [
                *(row["strategy"], row["arm"], str(row["seeds"]), decimal(row["staleness"], 2)),
                *(percent(row["saved"], 1), percent(row["accuracy"])),
                *(points(row[name]) for name in ("to_full", "to_fresh", "change")),
            ]
            for row in rows
        ],
        left=2,
    )
    found = markdown(
        [
            *("strategy", "arm", "ROC area of the losses", f"to {FRESH}"),
            *("ROC area of the suspicion", f"to {FRESH}"),
            *("precision, %", "recall, %", "wrong of the skipped, %"),
        ],
        [
            [
                *(row["strategy"], row["arm"]),
                *(decimal(row["loss_roc_area"], 3), points(row["losses_to_fresh"], 1, 3)),
                *(decimal(row["roc_area"], 3), points(row["suspicion_to_fresh"], 1, 3)),
                *(percent(row[name], 1) for name in ("precision", "recall", "wrong_of_skipped")),
            ]
            for row in rows
        ],
        left=2,
    )
    overlaps = markdown(
        ["arm", "pairs of runs", "n", "Jaccard", "range", "by chance"],
        [
            [
                *(row["arm"], row["pairs of runs"], str(row["pairs"]), f"{row['jaccard']:.2f}"),
                f"{row['smallest']:.2f}-{row['largest']:.2f}",
                f"{row['by_chance']:.2f}",
            ]
            for row in study.overlaps()
        ],
        left=2,
    )
    return f"{accuracies}\n\n{found}\n\n{overlaps}"


def read_records(file: Path) -> list[Record]:
    """Read the file of results."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_records(found: Sequence[Record], file: Path) -> None:
    """Write the file of results."""
    file.write_text("".join(f"{json.dumps(line)}\n" for line in found), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    trains = verbs.add_parser("train", help="train what is not finished")
    trains.add_argument("out", type=Path, help="the folder of the runs and of their results")
    trains.add_argument("--recipe", type=Path, default=Path("recipes/joint.toml"))
    trains.add_argument(
        "--set", nargs="+", default=[], help="changes of the recipe", dest="changes"
    )
    trains.add_argument("--seeds", type=int, default=3, help="0 to collect the results only")
    trains.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    trains.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    shows = verbs.add_parser("tables", help="print the tables")
    shows.add_argument("results", type=Path, help=f"the file {RESULTS}")
    shows.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.verb == "train":
        recipe = read_recipe(options.recipe, options.changes)
        if options.seeds:
            train(recipe, options.out, options.seeds, options.strategies, options.arms)
        write_records(records(recipe, options.out), options.out / RESULTS)
        return
    study = Study(read_records(options.results))
    if options.json:
        both = {"runs": study.rows(), "overlaps": study.overlaps()}
        print(json.dumps(both, indent=1, default=dataclasses.asdict))
    else:
        print(tables(study))


if __name__ == "__main__":
    try:
        main()
    except (InputError, RunError, Stopped) as error:
        sys.exit(f"joint_study.py: {error}")
