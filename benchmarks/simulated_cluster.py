"""What workers on a cluster do to the accuracy: questions that [D] leaves open, by simulation.

    python benchmarks/simulated_cluster.py runs/simulated-cluster --set data.dir=data
    python benchmarks/simulated_cluster.py runs/simulated-cluster --only batch --seeds 3

All workers are simulated in one process with real gradients, so the results do not depend on the
machine's speed. The questions:

- **batch**: synchronous workers average more samples per update, with the rate as it is, and with
  the rate multiplied by the workers, or by their root, and a warm-up.
- **backup**: of eight synchronous workers, one or two are backups, so an update averages fewer
  batches than without (``sync-8``, in the table of **batch**).
- **slow**: one of eight asynchronous workers takes three times as long.
- **rate**: each number of asynchronous workers with several learning rates.

Runs that are finished are kept, and one that was stopped is continued, so the same command goes on
where it was stopped. The last part of the output is a table with the mean and the standard
deviation of the accuracy after the last epoch, which ``--json`` also writes, for each seed.
"""

import argparse
import contextlib
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from fineprune.experiments.planned_run import PlannedRun, with_seed
from fineprune.runs.run import read_run
from fineprune.training.epoch_metrics import TrainingDiverged
from fineprune.training.hardware import resolved
from fineprune.training.loop import train
from fineprune.training.recipe import Recipe, read_recipe

RECIPE = Path(__file__).parent.parent / "recipes/paper/lenet.toml"
WORKERS = (1, 2, 4, 8, 16, 32)
RATE_WORKERS = (1, 4, 16)
# The epochs in which a scaled rate rises, as in Goyal et al. (2017), "Large Minibatch SGD".
WARM_UP = 5
RATE_FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
QUESTIONS = ("batch", "backup", "slow", "rate")


def arms(question: str, recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield the name and the recipe of each arm of a question."""
    rate = recipe.training.lr
    if question == "batch":
        for workers in WORKERS:
            made = recipe.replaced("distributed", simulate=workers, simulate_as="sync")
            yield f"sync-{workers}", made
            if workers > 1:
                for scaling, factor in (("linear", workers), ("root", math.sqrt(workers))):
                    scaled = {"lr": rate * factor, "warmup": WARM_UP}
                    yield f"sync-{workers}-{scaling}", made.replaced("training", **scaled)
    elif question == "backup":
        for backup in (1, 2):
            made = recipe.replaced("distributed", simulate=8, simulate_as="sync", backup=backup)
            yield f"sync-8-backup-{backup}", made
    elif question == "slow":
        yield "async-8", recipe.replaced("distributed", simulate=8)
        slow = (*[1.0] * 7, 3.0)
        yield "async-8-one-slow", recipe.replaced("distributed", simulate=8, step_seconds=slow)
        yield "async-8-spread", recipe.replaced("distributed", simulate=8, step_spread=0.3)
    else:
        for workers in RATE_WORKERS:
            for factor in RATE_FACTORS:
                made = recipe.replaced("distributed", simulate=workers)
                yield (
                    f"async-{workers}-rate-{rate * factor:g}",
                    made.replaced("training", lr=rate * factor),
                )


def accuracy(run: PlannedRun) -> float | None:
    """Return the accuracy of a run after the last epoch, in percent; None if it diverged."""
    if not run.finished():
        return None
    return round(100 * read_run(run.folder).summary.accuracy_last, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--only", choices=QUESTIONS, help="one question")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the accuracies")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    recipe = read_recipe(options.recipe, options.set).replaced("pruning", policy="full")
    questions = [options.only] if options.only else list(QUESTIONS)
    named = [(q, name, made) for q in questions for name, made in arms(q, recipe)]
    runs: dict[str, list[PlannedRun]] = {}
    for number in range(options.seeds):
        for question, name, made in named:
            folder = options.folder / question / f"{name}-{number}"
            run = PlannedRun(name, number, resolved(with_seed(made, number)), folder)
            runs.setdefault(f"{question}: {name}", []).append(run)
            if not run.finished():
                with contextlib.suppress(TrainingDiverged):
                    train(run.recipe, folder, resume=True)
                print(f"{question}: {name}, seed {number + 1} of {options.seeds}", flush=True)
    print("\n| arm | accuracy, % | standard deviation | n | diverged |\n|---|---:|---:|---:|---:|")
    accuracies = {name: [accuracy(run) for run in planned] for name, planned in runs.items()}
    for name, all_seeds in accuracies.items():
        found = [value for value in all_seeds if value is not None]
        mean = f"{statistics.mean(found):.2f}" if found else "-"
        spread = f"{statistics.stdev(found):.2f}" if len(found) > 1 else "-"
        print(f"| {name} | {mean} | {spread} | {len(all_seeds)} | {len(all_seeds) - len(found)} |")
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps(known | accuracies, indent=1) + "\n")


if __name__ == "__main__":
    main()
