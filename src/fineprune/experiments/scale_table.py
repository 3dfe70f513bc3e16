"""The measures of a scaling experiment: throughput, speedup, staleness and the time to a loss.

The measures are those of [D] Tables 1 to 3 (Campos et al., ICCS 2017). In addition, the time of a
step is split into its phases, which that paper leaves as future work. A node is a worker or a
dedicated server.
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

# The phases of a step, in the order in which a gradient passes through them. The phases of the
# servers take place while a worker waits for them.
WORKER_PHASES = ("data", "compute", "group reduce", "push", "pull", "wait")
SERVER_PHASES = ("queue", "apply", "send")


@dataclass(frozen=True)
class Scaled:
    """A configuration and its run.

    Attributes:
        configuration: The configuration that was trained.
        run: The finished run.
        seconds_other: The wall-clock time of the run's processes in seconds, excluding training and
            evaluation; None if the run was interrupted, because the time is then not known.
    """

    configuration: Configuration
    run: Run
    seconds_other: float | None = None


@dataclass(frozen=True)
class Scaling:
    """A scaling experiment, as read from its folder.

    Attributes:
        title: The title of the experiment.
        same_update: Whether an update uses the same number of samples in every configuration.
        runs: The configurations and their runs, in the order in which they were trained.
    """

    title: str
    same_update: bool
    runs: list[Scaled]


@dataclass(frozen=True)
class ScaleRow:
    """The measures of one configuration. None marks a value that is not available.

    Attributes:
        configuration: The text of the configuration.
        strategy: The strategy of the configuration.
        workers: The number of workers.
        servers: The number of parameter servers.
        nodes: The number of workers and dedicated servers.
        throughput: The number of samples per second, as the median over all epochs but the first.
        throughput_low, throughput_high: The quartiles of the samples per second.
        speedup: The throughput divided by that of a single process.
        efficiency: The speedup divided by the number of nodes.
        speedup_all_reduce: The throughput divided by that of all-reduce with the same number of
            workers.
        accuracy_last: The accuracy after the last epoch, as a fraction.
        seconds: The training time, in seconds.
        seconds_other: The time in seconds that the run's processes took for everything except
            training and evaluation, such as starting Ray, loading data and writing checkpoints.
        target_loss: The mean training loss to reach; None if it is not given and a configuration
            has no epoch on all data.
        epochs_to_target, samples_to_target, seconds_to_target: The epochs, samples and seconds to
            the end of the first epoch on all data whose mean training loss is at most the target;
            None if there is no such epoch.
        speedup_to_target: The seconds to the target of a single process, divided by those of this
            configuration.
        staleness: The number of updates with a staleness of 0, 1, 2 and so on; empty without
            servers.
        staleness_mean, staleness_p95, staleness_max: The mean, 95th percentile and maximum of the
            staleness of the updates.
        updates: The number of updates of the parameters.
        dropped: The fraction of the computed gradients that were discarded.
        lost: The number of batches that were lost because a server failed.
        phases: The time per gradient of each phase in seconds, summed over all processes; empty
            without servers.
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
    """Read a scaling experiment from its folder.

    Raises:
        InputError: The folder was not written by ``fineprune scale``, or a run is not finished.
    """
    if not (folder / SCALING).is_file():
        raise InputError(
            f"expected a folder that fineprune scale wrote, with {SCALING}, got {folder}"
        )
    listed = read_json(folder / SCALING)
    try:
        runs = [
            _read_scaled(configuration(run["configuration"]), folder / run["path"])
            for run in listed["runs"]
        ]
        return Scaling(str(listed["title"]), bool(listed["same_update"]), runs)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"expected title, same_update and runs in {folder / SCALING}, at least one is missing: "
            f"run fineprune scale again"
        ) from error


def _read_scaled(trained: Configuration, folder: Path) -> Scaled:
    run = read_run(folder)
    duration = folder / DURATION
    other = None
    if duration.exists():
        summary = run.summary
        other = read_json(duration)["seconds"]
        other -= summary.seconds_train + summary.seconds_evaluate
    return Scaled(trained, run, other)


def scale_rows(runs: Sequence[Scaled], target_loss: float | None = None) -> list[ScaleRow]:
    """Return one row for each configuration.

    Args:
        runs: The runs of one recipe.
        target_loss: The mean training loss to reach. By default, it is the lowest loss that every
            configuration reaches in an epoch on all data.

    Raises:
        InputError: There are no runs, or a run has fewer than two epochs.
    """
    if not runs:
        raise InputError("expected at least one run, got none")
    if target_loss is None:
        lowest = [min((loss for _, loss in _losses(scaled.run)), default=None) for scaled in runs]
        losses = [loss for loss in lowest if loss is not None]
        target_loss = max(losses) if len(losses) == len(runs) else None
    single = _find(runs, ONE, 1)
    rows = []
    for scaled in runs:
        config, run = scaled.configuration, scaled.run
        throughput = _throughput(run)
        median = statistics.median(throughput)
        low, high = np.percentile(throughput, [25, 75])
        speedup = median / statistics.median(_throughput(single)) if single else None
        all_reduce = _find(runs, ALL_REDUCE, config.workers)
        reached = _reached(run, target_loss)
        seconds = None if reached is None else _seconds(run, reached)
        single_reached = None if single is None else _reached(single, target_loss)
        served = [line["distributed"] for line in run.metrics if "distributed" in line]
        staleness = _histogram(served)
        steps = sum(line["steps"] for line in run.metrics)
        gradients = _gradients(run) if served else 0
        dropped = sum(epoch["dropped"] for epoch in served)
        rows.append(
            ScaleRow(
                configuration=config.text,
                strategy=config.strategy,
                workers=config.workers,
                servers=config.servers,
                nodes=config.nodes,
                throughput=median,
                throughput_low=float(low),
                throughput_high=float(high),
                speedup=speedup,
                efficiency=None if speedup is None else speedup / config.nodes,
                speedup_all_reduce=(
                    None
                    if all_reduce is None
                    else median / statistics.median(_throughput(all_reduce))
                ),
                accuracy_last=run.summary.accuracy_last,
                seconds=run.summary.seconds_train,
                seconds_other=scaled.seconds_other,
                target_loss=target_loss,
                epochs_to_target=None if reached is None else reached + 1,
                samples_to_target=(
                    None
                    if reached is None
                    else sum(line["samples"] for line in run.metrics[: reached + 1])
                ),
                seconds_to_target=seconds,
                speedup_to_target=(
                    None
                    if seconds is None or single is None or single_reached is None
                    else _seconds(single, single_reached) / seconds
                ),
                staleness=tuple(staleness),
                staleness_mean=_mean(staleness),
                staleness_p95=_percentile(staleness, 95),
                staleness_max=len(staleness) - 1 if staleness else None,
                updates=steps,
                dropped=dropped / (gradients + dropped) if gradients else None,
                lost=sum(len(epoch["lost"]) for epoch in served),
                phases=_phases(served, gradients),
            )
        )
    return rows


def loss_curve(run: Run) -> tuple[list[float], list[float]]:
    """Return the training time in seconds and the mean training loss after each epoch on all data.

    Pruned epochs are left out, because their mean loss is over other samples.
    """
    losses = _losses(run)
    return [_seconds(run, epoch) for epoch, _ in losses], [loss for _, loss in losses]


def _find(runs: Sequence[Scaled], strategy: str, workers: int) -> Run | None:
    """Return the first run with this strategy and number of workers; None if there is none."""
    for scaled in runs:
        config = scaled.configuration
        if (config.strategy, config.workers) == (strategy, workers):
            return scaled.run
    return None


def _throughput(run: Run) -> list[float]:
    """Return the number of samples per second in each epoch but the first."""
    # The first epoch is slower because of work that is done only once, such as compilation.
    measured = [line["samples"] / line["seconds"] for line in run.metrics[1:]]
    if not measured:
        raise InputError(
            f"expected runs of at least two epochs, the first of which is a warm-up, "
            f"got {len(run.metrics)} in {run.path}"
        )
    return measured


def _losses(run: Run) -> list[tuple[int, float]]:
    """Return the epochs on all data and their mean training losses."""
    return [
        (line["epoch"], line["train_loss"])
        for line in run.metrics
        if not line["pruned"] and line["train_loss"] is not None
    ]


def _reached(run: Run, target: float | None) -> int | None:
    """Return the first epoch on all data whose mean training loss is at most the target."""
    if target is None:
        return None
    return next((epoch for epoch, loss in _losses(run) if loss <= target), None)


def _seconds(run: Run, epoch: int) -> float:
    """Return the training time from the start of the run to the end of an epoch."""
    return float(sum(line["seconds"] for line in run.metrics[: epoch + 1]))


def _gradients(run: Run) -> int:
    """Return the number of gradients that were applied: one per batch of a worker or a group."""
    distributed, size = run.recipe["distributed"], run.recipe["training"]["batch_size"]
    batch = size * distributed["group"]
    return sum(-(-line["samples"] // batch) for line in run.metrics)


def _histogram(served: Sequence[dict[str, Any]]) -> list[int]:
    """Add the histograms of staleness of all epochs."""
    if not served:
        return []
    total = np.zeros(max(len(epoch["staleness"]) for epoch in served), dtype=np.int64)
    for epoch in served:
        total[: len(epoch["staleness"])] += np.array(epoch["staleness"], dtype=np.int64)
    return [int(count) for count in total]


def _mean(histogram: Sequence[int]) -> float | None:
    if not sum(histogram):
        return None
    return sum(value * count for value, count in enumerate(histogram)) / sum(histogram)


def _percentile(histogram: Sequence[int], percent: float) -> float | None:
    if not sum(histogram):
        return None
    return float(np.percentile(np.repeat(np.arange(len(histogram)), histogram), percent))


def _phases(served: Sequence[dict[str, Any]], gradients: int) -> dict[str, float]:
    if not gradients:  # no servers, or all updates were lost with a server
        return {}
    sums = {
        phase: sum(epoch["seconds"].get(phase, 0.0) for epoch in served)
        for phase in WORKER_PHASES + SERVER_PHASES
    }
    return {phase: seconds / gradients for phase, seconds in sums.items() if seconds}
