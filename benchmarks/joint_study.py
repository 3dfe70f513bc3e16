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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.experiments.arm_table import Difference, mean_difference
from fineprune.experiments.compare import plan_runs
from fineprune.experiments.configurations import configuration, configured
from fineprune.experiments.launched_run import launch
from fineprune.experiments.planned_run import PlannedRun
from fineprune.inspection.overlap import expected_jaccard, largest
from fineprune.inspection.suspects import smoothed_losses
from fineprune.runs.history import read_history
from fineprune.runs.lock import only_writer
from fineprune.runs.run import read_run
from fineprune.training.data import load_data
from fineprune.training.hardware import resolved
from fineprune.training.recipe import Recipe, read_recipe
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

# The share of the samples that are compared as the most skipped ones.
SHARE = 0.1

Record = dict[str, Any]
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def planned(recipe: Recipe, folder: Path, seeds: int, strategy: str) -> list[PlannedRun]:
    """Return the runs of a strategy, ordered by seed."""
    text, simulate = STRATEGIES[strategy]
    made = configured(recipe, configuration(text), same_update=True)
    if simulate:
        made = made.replaced("distributed", simulate=simulate)
    return plan_runs(resolved(made), folder / strategy, seeds, ARMS)


def train(recipe: Recipe, folder: Path, seeds: int, strategies: Sequence[str]) -> None:
    """Train the runs that are not finished: those of the first seed first."""
    plans = {name: planned(recipe, folder, seeds, name) for name in strategies}
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
    staleness = [np.array(line.get("distributed", {}).get("staleness", ())) for line in run.metrics]
    counts = np.sum([np.pad(part, (0, 99 - len(part))) for part in staleness], axis=0)
    updates = max(int(counts.sum()), 1)
    own = summary["suspicion"]
    found = {name: own[name] for name in ("roc_area", "suspects", "precision", "recall")}
    return {
        "strategy": folder.parent.name,
        "arm": summary["arm"],
        "seed": summary["seed"],
        "accuracy": summary["accuracy_last"],
        "train_samples": summary["train_samples"],
        "skipped_share": summary["skipped_share"],
        "steps": summary["steps"],
        "seconds": round(summary["seconds_train"], 1),
        "staleness": round(float(counts @ np.arange(99)) / updates, 4),
        "suspicion": found,
        "roc_areas": [_rounded(line.get("suspicion", {}).get("roc_area")) for line in run.metrics],
        "loss_roc_area": _rounded(detection(losses, wrong)["roc_area"]),
        "wrong_of_skipped": _rounded(skipped @ wrong / skipped.sum()) if skipped.any() else None,
        # One digit per sample, to the base 36.
        "times_skipped": "".join(_DIGITS[times] for times in skipped) if skipped.any() else None,
        "versions": summary["versions"],
        "hardware": summary["hardware"],
    }


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

    def mean(self, strategy: str, arm: str, value: Callable[[Record], Any]) -> float | None:
        """Return the mean of a value over the seeds; None if a run has no such value."""
        values = [value(run) for run in self.of(strategy, arm).values()]
        return statistics.fmean(values) if values and None not in values else None

    def difference(self, *terms: tuple[int, str, str]) -> Difference | None:
        """Return a sum of accuracies, paired by seed, with the interval of its mean.

        Args:
            terms: The sign, the strategy and the arm of each accuracy.

        Returns:
            The mean over the seeds that all terms have; None if there is none.
        """
        runs = [(sign, self.of(strategy, arm)) for sign, strategy, arm in terms]
        shared = set.intersection(*(set(by_seed) for _, by_seed in runs))
        if not shared:
            return None
        sums = [sum(sign * part[s]["accuracy"] for sign, part in runs) for s in sorted(shared)]
        return mean_difference(sums)

    def rows(self) -> list[dict[str, Any]]:
        """Return the main table: one row per strategy and arm."""
        result = []
        for strategy, arm in itertools.product(STRATEGIES, ARMS):
            if not self.of(strategy, arm):
                continue
            here, fresh = (1, strategy, arm), (-1, FRESH, arm)
            full, fresh_full = (-1, strategy, BASELINE), (1, FRESH, BASELINE)
            is_full, is_fresh = arm == BASELINE, strategy == FRESH
            result.append(
                {
                    "strategy": strategy,
                    "arm": arm,
                    "seeds": len(self.of(strategy, arm)),
                    "staleness": self.mean(strategy, arm, staleness_of),
                    "skipped": self.mean(strategy, arm, lambda r: r["skipped_share"]),
                    "accuracy": self.mean(strategy, arm, lambda r: r["accuracy"]),
                    "to_full": None if is_full else self.difference(here, full),
                    "to_fresh": None if is_fresh else self.difference(here, fresh),
                    "change": None
                    if is_full or is_fresh
                    else self.difference(here, full, fresh, fresh_full),
                    "loss_roc_area": self.mean(strategy, arm, lambda r: r["loss_roc_area"]),
                    "roc_area": self.mean(strategy, arm, lambda r: r["suspicion"]["roc_area"]),
                    "precision": self.mean(strategy, arm, lambda r: r["suspicion"]["precision"]),
                    "recall": self.mean(strategy, arm, lambda r: r["suspicion"]["recall"]),
                    "wrong_of_skipped": self.mean(strategy, arm, lambda r: r["wrong_of_skipped"]),
                }
            )
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


def staleness_of(run: Record) -> float:
    """Return the mean age of a run's gradients, in updates."""
    simulated: int = STRATEGIES[run["strategy"]][1]
    # All workers read the same weights at the start of an epoch; see ``SimulatedWorkers``.
    return float(simulated - 1) if simulated else float(run["staleness"])


def times_skipped(run: Record) -> npt.NDArray[np.int64]:
    """Return how often each sample was skipped; int64, shape (N,)."""
    return np.array([_DIGITS.index(digit) for digit in run["times_skipped"]], dtype=np.int64)


def points(difference: Difference | None) -> str:
    """Write a difference of accuracies in percentage points, with half its 95 % interval."""
    if difference is None:
        return "-"
    half = difference.half_width
    return f"{100 * difference.mean:+.2f}" + ("" if half is None else f" ±{100 * half:.2f}")


def share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(headers: Sequence[str], left: int, rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, of which the first columns are aligned to the left."""
    marks = [*["---"] * left, *["---:"] * (len(headers) - left)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [headers, marks, *rows])


def markdown(study: Study) -> str:
    """Return the tables of a study."""
    main = table(
        [
            *("strategy", "arm", "seeds", "staleness", "skipped, %", "last epoch, %"),
            *("to full, points", f"to {FRESH}, points", "change, points"),
            *("ROC area, losses", "ROC area", "precision, %", "recall, %", "wrong of skipped, %"),
        ],
        2,
        [
            [
                *(row["strategy"], row["arm"], str(row["seeds"]), number(row["staleness"], 2)),
                *(share(row["skipped"]), share(row["accuracy"], 2)),
                *(points(row[name]) for name in ("to_full", "to_fresh", "change")),
                *(number(row[name], 3) for name in ("loss_roc_area", "roc_area")),
                *(share(row[name]) for name in ("precision", "recall", "wrong_of_skipped")),
            ]
            for row in study.rows()
        ],
    )
    overlaps = table(
        ["arm", "pairs of runs", "n", "Jaccard", "range", "by chance"],
        2,
        [
            [
                *(row["arm"], row["pairs of runs"], str(row["pairs"]), f"{row['jaccard']:.2f}"),
                f"{row['smallest']:.2f}-{row['largest']:.2f}",
                f"{row['by_chance']:.2f}",
            ]
            for row in study.overlaps()
        ],
    )
    return f"{main}\n\n{overlaps}"


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
    trains.add_argument("--set", nargs="+", default=[], help="changes of the recipe", dest="changes")
    trains.add_argument("--seeds", type=int, default=3, help="0 to collect the results only")
    trains.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    shows = verbs.add_parser("tables", help="print the tables")
    shows.add_argument("results", type=Path, help=f"the file {RESULTS}")
    shows.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.verb == "train":
        recipe = read_recipe(options.recipe, options.changes)
        if options.seeds:
            train(recipe, options.out, options.seeds, options.strategies)
        write_records(records(recipe, options.out), options.out / RESULTS)
        return
    study = Study(read_records(options.results))
    if options.json:
        both = {"runs": study.rows(), "overlaps": study.overlaps()}
        print(json.dumps(both, indent=1, default=dataclasses.asdict))
    else:
        print(markdown(study))


if __name__ == "__main__":
    main()
