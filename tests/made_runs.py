"""Writes complete run folders with invented numbers, to test reports without training."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fineprune.experiments.arm_table import Row, group_rows, grouped
from fineprune.experiments.configurations import configuration
from fineprune.experiments.controls import make_arms
from fineprune.experiments.scale_table import Scaled
from fineprune.pruning.policies.policy import Training
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.runs.comparison import Comparison, ListedRun, write_comparison
from fineprune.runs.files import append_metrics, epoch_file, write_json
from fineprune.runs.run import Run
from fineprune.runs.summary import Hardware, Summary
from fineprune.training.learning_rate import rate_at
from fineprune.training.recipe import Recipe, make_recipe
from fineprune.writing import write_atomically

ARMS = ("full", "fine-pruning", "random", "shorter")

# The difference between the final accuracies of each arm and of the full arm.
_SHIFTS = {"full": 0.0, "fine-pruning": -0.002, "random": -0.006, "shorter": -0.004}


def made_recipe(
    network: str = "lenet",
    dataset: str = "digits",
    epochs: int = 20,
    train_size: int = 512,
    **training: object,
) -> Recipe:
    """Return a recipe with milestones at 30, 60 and 80 % of the epochs."""
    return make_recipe(
        {
            "data": {"name": dataset, "train_size": train_size},
            "network": {"name": network},
            "training": {
                "epochs": epochs,
                "batch_size": 128,
                "milestones": [epochs * part // 10 for part in (3, 6, 8)],
                "evaluate_every": 2,
                **training,
            },
            "pruning": {
                "policy": "fine-pruning",
                "window": epochs * 3 // 10,
                "start": epochs * 3 // 20,
                "attenuation": 2.0,
                "block": 3,
                "count": 2,
                "prune": 0.25,
            },
            "run": {"device": "cpu", "precision": "float32", "threads": 1},
        }
    )


def make_compare(
    folder: Path,
    *,
    recipe: Recipe | None = None,
    arms: Sequence[str] = ARMS,
    seeds: Sequence[int] = (0, 1, 2),
    title: str = "digits-lenet",
    counts: bool = True,
    history: bool = True,
) -> Path:
    """Write the folder of a comparison with invented numbers, which are the same every time."""
    recipe = recipe or made_recipe()
    folder.mkdir(parents=True)
    made = make_arms(recipe, arms, _train_size(recipe))
    for seed in seeds:
        for arm in made:
            changed = recipe if arm.name == "matched" else recipe.changed(arm.changes)
            seeded = changed.replaced("run", seed=seed)
            make_run(
                folder / f"{arm.name}-{seed}", seeded, arm.name, counts=counts, history=history
            )
    runs = [ListedRun(arm=arm, seed=seed, path=f"{arm}-{seed}") for seed in seeds for arm in arms]
    listed = Comparison(title=title, sha256={}, arms=tuple(made), runs=tuple(runs))
    write_comparison(folder, listed)
    return folder


def make_run(
    folder: Path, recipe: Recipe, arm: str, *, counts: bool = True, history: bool = True
) -> None:
    """Write the folder of one run, with noisy curves that change at the milestones."""
    folder.mkdir()
    training, number = recipe.training, _train_size(recipe)
    policy = recipe.policy()
    policy.begin(Training(number, 1, number))
    lengths = policy.lengths()
    assert lengths is not None
    noise = np.random.default_rng([recipe.run.seed, *arm.encode()])
    write_atomically(folder / "recipe.toml", recipe.to_toml())
    lines = []
    for epoch in range(training.epochs):
        kept = lengths[epoch]
        passed = sum(milestone <= epoch for milestone in training.milestones)
        rate = rate_at(training, epoch)
        done = 1 - 0.5 ** (1 + passed) * (0.4 + 0.6 * np.exp(-epoch / training.epochs * 8))
        accuracy = 0.95 * done + _SHIFTS.get(arm, -0.01) * done + noise.normal(0, 0.002)
        left = training.epochs - 1 - epoch
        evaluated = (epoch + 1) % training.evaluate_every == 0 or left < training.evaluate_last
        line = {
            "epoch": epoch,
            "lr": rate,
            "pruned": kept < number,
            "samples": kept,
            "skipped": number - kept,
            "steps": -(-kept // training.batch_size),
            "train_loss": 2.3 * (1 - done) + 0.02,
            "nonfinite": 0,
            "seconds": kept / number * (6 + noise.uniform(0, 0.3)),
            "bookkeeping_seconds": 0.02,
            "evaluate_seconds": 0.5 if evaluated else 0.0,
            "test_loss": 2.5 * (1 - accuracy) + 0.05 if evaluated else None,
            "test_accuracy": accuracy if evaluated else None,
            "validation_loss": None,
            "validation_accuracy": None,
        }
        if history:
            _make_history(folder / "history", recipe, epoch, kept, 1 - done)
        append_metrics(folder / "metrics.jsonl", line)
        lines.append(line)
    if counts and isinstance(policy, ScheduledPolicy) and arm == "fine-pruning":
        _make_counts(folder / "counts", policy, number, noise)
    write_json(folder / "summary.json", _summary(recipe, arm, lines))


def _make_history(folder: Path, recipe: Recipe, epoch: int, kept: int, height: float) -> None:
    """Write the losses of an epoch, of which a few samples have rising ones."""
    number = _train_size(recipe)
    noise = np.random.default_rng([recipe.run.seed, epoch])
    losses = 2.5 * height * noise.uniform(0.7, 1.3, number)
    hard = np.random.default_rng(recipe.run.seed).permutation(number)[: number // 20]
    losses[hard] = 6 * (1 - height) * noise.uniform(0.7, 1.3, len(hard))
    losses[noise.permutation(number)[kept:]] = np.nan  # They were skipped.
    folder.mkdir(exist_ok=True)
    np.save(epoch_file(folder, epoch), losses.astype(np.float16))


def _make_counts(
    folder: Path, policy: ScheduledPolicy, number: int, noise: np.random.Generator
) -> None:
    folder.mkdir()
    schedule = policy.schedule
    ends = sorted({*schedule.boundaries, schedule.epochs})
    for start, end in zip([0, *ends], ends, strict=False):
        counts = (end - start) * noise.beta(0.3, 1.2 + start / schedule.epochs * 5, number)
        np.save(folder / f"epoch-{end:04d}.npy", counts.astype(np.uint8), allow_pickle=False)


def _summary(recipe: Recipe, arm: str, lines: list[dict[str, Any]]) -> Summary:
    accuracies = [line["test_accuracy"] for line in lines if line["test_accuracy"] is not None]
    samples_full = _train_size(recipe) * recipe.training.epochs
    return made_summary(
        arm=arm,
        policy=recipe.pruning.policy,
        seed=recipe.run.seed,
        epochs=recipe.training.epochs,
        network=recipe.network.name,
        dataset=recipe.data.name,
        train_samples=_train_size(recipe),
        samples_trained=sum(line["samples"] for line in lines),
        samples_full=samples_full,
        skipped_share=sum(line["skipped"] for line in lines) / samples_full,
        steps=sum(line["steps"] for line in lines),
        pruned_epochs=sum(line["pruned"] for line in lines),
        seconds_train=sum(line["seconds"] for line in lines),
        seconds_bookkeeping=sum(line["bookkeeping_seconds"] for line in lines),
        seconds_evaluate=sum(line["evaluate_seconds"] for line in lines),
        accuracy_last=accuracies[-1],
        accuracy_best3=statistics.fmean(sorted(accuracies)[-3:]),
    )


def made_summary(**values: Any) -> Summary:
    """Return a summary with the given values; all others are invented."""
    return dataclasses.replace(_INVENTED, **values)


_INVENTED = Summary(
    arm="full",
    policy="full",
    seed=0,
    epochs=10,
    network="lenet",
    dataset="digits",
    parameters=62006,
    train_samples=100,
    samples_trained=1000,
    samples_full=1000,
    skipped_share=0.0,
    steps=100,
    pruned_epochs=0,
    seconds_train=100.0,
    seconds_bookkeeping=2.0,
    seconds_evaluate=5.0,
    accuracy_last=0.9,
    accuracy_best3=0.91,
    top5_last=None,
    evaluated_on="test",
    hardware=Hardware(cpu="Made CPU", cores=2, threads=1, device="cpu", gpu=None),
    versions={"fineprune": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6", "python": "3.11"},
    precision="float32",
    ranks=1,
    git="abc1234",
    weights_sha256=None,
    labels_sha256=None,
    data_sha256=None,
    left_out_sha256=None,
    code_sha256=None,
    suspicion=None,
)


def made_scaled(
    text: str,
    seconds: Sequence[float],
    losses: Sequence[float],
    *,
    samples: int = 100,
    batch_size: int = 10,
    pruned: Sequence[int] = (),
    distributed: dict[str, Any] | None = None,
    folder: Path = Path("nowhere"),
    **summary: Any,
) -> Scaled:
    """Return a run of a scaling experiment, with these seconds and losses of its epochs."""
    chosen = configuration(text)
    more = {} if distributed is None else {"distributed": {"dropped": 0, **distributed}}
    metrics = [
        {
            "epoch": epoch,
            "seconds": duration,
            "train_loss": loss,
            "pruned": epoch in pruned,
            "samples": samples,
            "steps": samples // batch_size,
            "nonfinite": 0,
            **more,
        }
        for epoch, (duration, loss) in enumerate(zip(seconds, losses, strict=True))
    ]
    recipe = {
        "training": {"batch_size": batch_size},
        "distributed": {"group": chosen.distributed.group},
    }
    made = made_summary(seconds_train=sum(seconds), **summary)
    return Scaled(chosen, Run(folder, made, metrics, recipe))


def three_scaled() -> list[Scaled]:
    """Return the runs of a scaling experiment, the last of which skips samples in one epoch."""
    report = {
        "staleness": [2, 6, 2],
        "dropped": 2,
        "seconds": {"compute": 0.5, "pull": 0.25, "apply": 0.125},
    }
    return [
        made_scaled("one", [9, 4, 4, 4], [3, 2, 1, 0.5]),
        made_scaled("all-reduce 2", [9, 2, 2, 2], [3, 2.5, 1, 0.8]),
        made_scaled(
            "async 2+2 dedicated", [9, 2, 2.5, 4], [3, 0.5, 2, 0.9], pruned=[1], distributed=report
        ),
    ]


def _train_size(recipe: Recipe) -> int:
    assert recipe.data.train_size is not None
    return recipe.data.train_size


def table_rows(runs: Sequence[Run]) -> list[Row]:
    """Return the rows of all groups."""
    return [row for group in grouped(runs) for row in group_rows(group)]


def with_summary(run, **values):
    """Return a copy of a run with some values of its summary replaced."""
    return dataclasses.replace(run, summary=dataclasses.replace(run.summary, **values))
