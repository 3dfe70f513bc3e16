"""What a list of configurations gained and cost: throughput, speedup, staleness, time to a loss.

The measures are those of Campos et al., ICCS 2017, Tables 1 to 3, and what that paper left open:
where the time of a step goes. A node is a worker or a dedicated server.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fineprune.errors import InputError
from fineprune.experiments.configurations import ALL_REDUCE, ONE, Configuration, configuration
from fineprune.runs.files import DURATION, SCALING, read_json
from fineprune.runs.run import Run, read_run

# In the order in which a gradient passes them. What a worker does, and what its servers do while
# it waits in its pull.
WORKER_PHASES = ("data", "compute", "group reduce", "push", "pull", "wait")
SERVER_PHASES = ("queue", "apply", "send")


@dataclass(frozen=True)
class Scaled:
    """A configuration and its run.

    Attributes:
        configuration: Who trained.
        run: The run.
        seconds_other: The wall-clock time of the command that is neither training nor evaluation;
            None if the command was interrupted, so that it is not known.
    """

    configuration: Configuration
    run: Run
    seconds_other: float | None = None


@dataclass(frozen=True)
class Scaling:
    """A folder of ``fineprune scale``, read.

    Attributes:
        title: of the recipe.
        same_update: whether all configurations update by as many samples.
        runs: in the order in which they were asked for.
    """

    title: str
    same_update: bool
    runs: list[Scaled]


@dataclass(frozen=True)
class ScaleRow:
    """One configuration. None: cannot be said from these runs.

    Attributes:
        configuration: its text.
        strategy: of it.
        workers, servers, nodes: how many; a node is a worker or a dedicated server.
        throughput: samples a second, the median over the epochs but the first.
        throughput_low, throughput_high: the quartiles.
        speedup: against one process alone.
        efficiency: speedup over nodes.
        speedup_all_reduce: against all-reduce on as many workers.
        accuracy_last: after the last epoch, a share.
        seconds: of training in all.
        seconds_other: from the start of the command to its end, less training and evaluation:
            starting processes, Ray among them, loading data, writing checkpoints.
        target_loss: the mean training loss that is waited for; None if no configuration has an
            epoch on all data.
        epochs_to_target, samples_to_target, seconds_to_target: until the first epoch on all data
            whose mean training loss is at most the target; None where there is none.
        speedup_to_target: against one process alone.
        staleness: how many updates were 0, 1, ... updates stale; empty without servers.
        staleness_mean, staleness_p95, staleness_max: over the updates.
        updates: of the parameters.
        dropped: gradients thrown away, as a share of all that were computed.
        lost: batches that were lost with a server.
        phases: seconds a gradient of each phase, over all processes; empty without servers.
    """

    configuration: str
    strategy: str
    workers: int
    servers: int
    nodes: int
    throughput: float
    throughput_low: float
    throughput_high: float
    speedup: float | None
    efficiency: float | None
    speedup_all_reduce: float | None
    accuracy_last: float
    seconds: float
    seconds_other: float | None
    target_loss: float | None
    epochs_to_target: int | None
    samples_to_target: int | None
    seconds_to_target: float | None
    speedup_to_target: float | None
    staleness: tuple[int, ...]
    staleness_mean: float | None
    staleness_p95: float | None
    staleness_max: int | None
    updates: int
    dropped: float | None
    lost: int
    phases: dict[str, float]


def read_scaling(folder: Path) -> Scaling:
    """Read a folder of ``fineprune scale``.

    Raises:
        InputError: it is none, or a run is not finished.
    """
    if not (folder / SCALING).is_file():
        raise InputError(f"expected a folder of fineprune scale, with {SCALING}, got {folder}")
    listed = read_json(folder / SCALING)
    try:
        runs = [
            _read_scaled(configuration(run["configuration"]), folder / run["path"])
            for run in listed["runs"]
        ]
        return Scaling(str(listed["title"]), bool(listed["same_update"]), runs)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"expected title, same_update and runs in {folder / SCALING}, one is missing: "
            f"run fineprune scale again"
        ) from error


def _read_scaled(asked: Configuration, folder: Path) -> Scaled:
    run = read_run(folder)
    took = folder / DURATION
    other = None
    if took.exists():
        summary = run.summary
        other = read_json(took)["seconds"]
        other -= summary["seconds_train"] + summary["seconds_evaluate"]
    return Scaled(asked, run, other)


def scale_rows(runs: Sequence[Scaled], target_loss: float | None = None) -> list[ScaleRow]:
    """Return a row for each configuration.

    Args:
        runs: of one recipe.
        target_loss: of training; by default the lowest that all of them reach in an epoch on all
            data.

    Raises:
        InputError: there are no runs, or a run has too few epochs to measure.
    """
    if not runs:
        raise InputError("expected at least one run, got none")
    if target_loss is None:
        lowest = [min((loss for _, loss in _losses(one.run)), default=None) for one in runs]
        known = [loss for loss in lowest if loss is not None]
        target_loss = max(known) if len(known) == len(runs) else None
    base = _first(runs, ONE, 1)
    rows = []
    for one in runs:
        throughput = _throughput(one.run)
        median = statistics.median(throughput)
        low, high = np.percentile(throughput, [25, 75])
        speedup = median / statistics.median(_throughput(base)) if base else None
        peer = _first(runs, ALL_REDUCE, one.configuration.workers)
        reached = _reached(one.run, target_loss)
        seconds = None if reached is None else _seconds(one.run, reached)
        base_reached = None if base is None else _reached(base, target_loss)
        told = [line["distributed"] for line in one.run.metrics if "distributed" in line]
        stale = _histogram(told)
        steps = sum(line["steps"] for line in one.run.metrics)
        gradients = _gradients(one.run) if told else 0
        dropped = sum(line["dropped"] for line in told)
        rows.append(
            ScaleRow(
                configuration=one.configuration.text,
                strategy=one.configuration.strategy,
                workers=one.configuration.workers,
                servers=one.configuration.servers,
                nodes=one.configuration.nodes,
                throughput=median,
                throughput_low=float(low),
                throughput_high=float(high),
                speedup=speedup,
                efficiency=None if speedup is None else speedup / one.configuration.nodes,
                speedup_all_reduce=(
                    None if peer is None else median / statistics.median(_throughput(peer))
                ),
                accuracy_last=one.run.summary["accuracy_last"],
                seconds=one.run.summary["seconds_train"],
                seconds_other=one.seconds_other,
                target_loss=target_loss,
                epochs_to_target=None if reached is None else reached + 1,
                samples_to_target=(
                    None
                    if reached is None
                    else sum(line["samples"] for line in one.run.metrics[: reached + 1])
                ),
                seconds_to_target=seconds,
                speedup_to_target=(
                    None
                    if seconds is None or base is None or base_reached is None
                    else _seconds(base, base_reached) / seconds
                ),
                staleness=tuple(stale),
                staleness_mean=_mean(stale),
                staleness_p95=_percentile(stale, 95),
                staleness_max=len(stale) - 1 if stale else None,
                updates=steps,
                dropped=dropped / (gradients + dropped) if told else None,
                lost=sum(len(line["lost"]) for line in told),
                phases=_phases(told, gradients),
            )
        )
    return rows


def loss_curve(run: Run) -> tuple[list[float], list[float]]:
    """Return seconds of training and mean training losses, after each epoch on all data.

    The samples of a pruned epoch are others, and so is their loss.
    """
    known = _losses(run)
    return [_seconds(run, epoch) for epoch, _ in known], [loss for _, loss in known]


def _first(runs: Sequence[Scaled], strategy: str, workers: int) -> Run | None:
    wanted = (strategy, workers)
    found = (r for r in runs if (r.configuration.strategy, r.configuration.workers) == wanted)
    return next((one.run for one in found), None)


def _throughput(run: Run) -> list[float]:
    # The first epoch pays for what is made once.
    measured = [line["samples"] / line["seconds"] for line in run.metrics[1:]]
    if not measured:
        raise InputError(
            f"expected runs of at least two epochs, the first of which is a warm-up, "
            f"got {len(run.metrics)} in {run.path}"
        )
    return measured


def _losses(run: Run) -> list[tuple[int, float]]:
    return [
        (line["epoch"], line["train_loss"])
        for line in run.metrics
        if not line["pruned"] and line["train_loss"] is not None
    ]


def _reached(run: Run, target: float | None) -> int | None:
    if target is None:
        return None
    return next((epoch for epoch, loss in _losses(run) if loss <= target), None)


def _seconds(run: Run, epoch: int) -> float:
    return float(sum(line["seconds"] for line in run.metrics[: epoch + 1]))


def _gradients(run: Run) -> int:
    """Gradients that were applied: each of a worker's or a group's batch."""
    distributed, size = run.recipe["distributed"], run.recipe["training"]["batch_size"]
    batch = size * distributed["group"]
    return sum(-(-line["samples"] // batch) for line in run.metrics)


def _histogram(told: Sequence[dict[str, Any]]) -> list[int]:
    if not told:
        return []
    total = np.zeros(max(len(line["staleness"]) for line in told), dtype=np.int64)
    for line in told:
        total[: len(line["staleness"])] += np.array(line["staleness"], dtype=np.int64)
    return [int(count) for count in total]


def _mean(histogram: Sequence[int]) -> float | None:
    if not sum(histogram):
        return None
    return sum(stale * count for stale, count in enumerate(histogram)) / sum(histogram)


def _percentile(histogram: Sequence[int], share: float) -> float | None:
    if not sum(histogram):
        return None
    return float(np.percentile(np.repeat(np.arange(len(histogram)), histogram), share))


def _phases(told: Sequence[dict[str, Any]], gradients: int) -> dict[str, float]:
    sums = {
        phase: sum(line["seconds"].get(phase, 0.0) for line in told)
        for phase in WORKER_PHASES + SERVER_PHASES
    }
    return {phase: seconds / gradients for phase, seconds in sums.items() if seconds}
