"""The measures of a scaling experiment: throughput, speedup, staleness and the time to a loss.

They are those of [D] Tables 1 to 3 (Campos et al., ICCS 2017). In addition, the time of a step is
split into its phases, which that paper leaves as future work.
"""

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fineprune.errors import InputError
from fineprune.experiments.configurations import Configuration, configuration
from fineprune.experiments.scale import ScalingList
from fineprune.runs.files import SCALING, read_json
from fineprune.runs.run import Run, read_run, split_by
from fineprune.training.served_epochs import added, staleness_figures

# The phases of a step, in the order in which a gradient passes through them. The phases of the
# servers take place while a worker waits for them.
WORKER_PHASES = ("data", "compute", "group reduce", "pull", "wait")
SERVER_PHASES = ("apply",)


@dataclass(frozen=True)
class Scaled:
    """A configuration and its run.

    Attributes:
        configuration: The configuration that was trained.
        run: The finished run.
    """

    configuration: Configuration
    run: Run


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
class WorkerRow:
    """What one worker of a configuration did, over all its runs.

    Attributes:
        share: The share of the samples that it trained.
        staleness_mean: The mean staleness of its updates; None if it made none.
        phases: The time per gradient of each phase, in seconds.
    """

    share: float
    staleness_mean: float | None
    phases: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ScaleRow:
    """The measures of one configuration. None marks a value that is not available.

    With several seeds, times, accuracies and numbers of epochs, samples and updates are means. The
    baseline is the first configuration.

    Attributes:
        configuration: The text of the configuration.
        strategy, workers, servers, nodes: See ``Configuration``.
        per_node: The number of workers per node.
        seeds: The number of runs.
        throughput, throughput_low, throughput_high: The samples per second, as the median and the
            quartiles over all epochs but the first.
        speedup: The throughput divided by that of the baseline.
        efficiency: The speedup divided by the accelerators per accelerator of the baseline. If all
            nodes have as many, this is the speedup by node of [D] Tables 1 and 2.
        accuracies: The accuracy of each seed's run after its last epoch, as a fraction.
        accuracy_last: Their mean.
        accuracy_deviation: Its standard deviation over the seeds; None for one.
        seconds: The training time, in seconds.
        target_loss: The mean training loss to reach; None if it is not given and a configuration
            has no epoch on all data.
        epochs_to_target, samples_to_target, seconds_to_target: What a run takes until its
            ``loss_curve`` falls to the target, interpolated; None if any run never reaches it.
        speedup_to_target: The baseline's seconds to the target, divided by this configuration's.
        staleness: The number of updates with a staleness of 0, 1, 2 and so on; empty without
            servers.
        staleness_mean, staleness_p95, staleness_max: The mean, 95th percentile and maximum of it.
        updates: The number of updates of the parameters.
        dropped: The fraction of the computed gradients that were discarded.
        phases: The time per gradient of each phase in seconds, summed over all processes; empty
            without servers.
        each: What each worker did, by rank; empty without servers.
    """

    configuration: str
    strategy: str
    workers: int
    servers: int
    nodes: int
    per_node: int
    seeds: int
    throughput: float
    throughput_low: float
    throughput_high: float
    speedup: float
    efficiency: float
    accuracies: dict[int, float]
    accuracy_last: float
    accuracy_deviation: float | None
    seconds: float
    target_loss: float | None
    epochs_to_target: float | None
    samples_to_target: float | None
    seconds_to_target: float | None
    speedup_to_target: float | None
    staleness: tuple[int, ...]
    staleness_mean: float | None
    staleness_p95: float | None
    staleness_max: int | None
    updates: float
    dropped: float | None
    phases: dict[str, float]
    each: tuple[WorkerRow, ...]


def read_scaling(folder: Path) -> Scaling:
    """Read a scaling experiment from its folder."""
    if not (folder / SCALING).is_file():
        raise InputError(
            f"expected a folder that fineprune scale wrote, with {SCALING}, got {folder}"
        )
    listed = read_json(folder / SCALING, ScalingList)
    runs = [
        Scaled(configuration(run.configuration), read_run(folder / run.path)) for run in listed.runs
    ]
    return Scaling(listed.title, listed.same_update, runs)


def scale_rows(runs: Sequence[Scaled], target_loss: float | None = None) -> list[ScaleRow]:
    """Return one row for each configuration.

    Args:
        runs: The runs of one recipe.
        target_loss: The mean training loss to reach. By default, it is the lowest loss that every
            run reaches at the end of an epoch on all data.
    """
    if not runs:
        raise InputError("expected at least one run, got none")
    if target_loss is None:
        lowest = [min(_epoch_losses(scaled.run), default=None) for scaled in runs]
        losses = [loss for loss in lowest if loss is not None]
        target_loss = max(losses) if len(losses) == len(runs) else None
    groups = list(split_by(lambda scaled: scaled.configuration.text, runs).values())
    return [_row(group, groups[0], target_loss) for group in groups]


def _row(group: Sequence[Scaled], base: Sequence[Scaled], target_loss: float | None) -> ScaleRow:
    config, runs = group[0].configuration, [scaled.run for scaled in group]
    throughput = _throughput(group)
    median = statistics.median(throughput)
    low, high = np.percentile(throughput, [25, 75])
    speedup = median / statistics.median(_throughput(base))
    target, base_target = _to_target(group, target_loss), _to_target(base, target_loss)
    epochs, samples, seconds = target or (None, None, None)
    served = _served(runs)
    staleness: list[int] = functools.reduce(added, (epoch["staleness"] for epoch in served), [])
    gradients = sum(map(_gradients, runs))
    dropped = sum(epoch["dropped"] for epoch in served)
    accuracies = {run.summary.seed: run.summary.accuracy_last for run in runs}
    return ScaleRow(
        configuration=config.text,
        strategy=config.strategy,
        workers=config.workers,
        servers=config.servers,
        nodes=config.nodes,
        per_node=config.group,
        seeds=len(runs),
        throughput=median,
        throughput_low=float(low),
        throughput_high=float(high),
        speedup=speedup,
        efficiency=speedup * base[0].configuration.accelerators / config.accelerators,
        accuracies=accuracies,
        accuracy_last=statistics.mean(accuracies.values()),
        accuracy_deviation=statistics.stdev(accuracies.values()) if len(accuracies) > 1 else None,
        seconds=statistics.mean(run.summary.seconds_train for run in runs),
        target_loss=target_loss,
        epochs_to_target=epochs,
        samples_to_target=samples,
        seconds_to_target=seconds,
        speedup_to_target=base_target[2] / target[2] if target and base_target else None,
        staleness=tuple(staleness),
        **staleness_figures(staleness),
        updates=statistics.mean(sum(line["steps"] for line in run.metrics) for run in runs),
        dropped=dropped / (gradients + dropped) if served else None,
        phases=_phases([epoch["seconds"] for epoch in served], gradients),
        each=_each(served),
    )


def _to_target(group: Sequence[Scaled], loss: float | None) -> tuple[float, float, float] | None:
    """Return the mean epochs, samples and seconds to a loss; None if a run never reaches it."""
    if loss is None:
        return None
    found = [_reached(loss_curve(scaled.run), loss) for scaled in group]
    known = [place for place in found if place is not None]
    if len(known) < len(found):
        return None
    epochs, samples, seconds = (statistics.mean(values) for values in zip(*known, strict=True))
    return epochs, samples, seconds


def _reached(
    curve: Sequence[tuple[float, float, float, float]], target: float
) -> tuple[float, float, float] | None:
    """Return where a curve first falls to a loss, on the line from the point before."""
    for before, point in zip([*curve[:1], *curve], curve, strict=False):
        if point[3] <= target:
            ends = zip(point[:3], before[:3], strict=True)
            losses = (point[3], before[3])
            epochs, samples, seconds = (float(np.interp(target, losses, pair)) for pair in ends)
            return epochs, samples, seconds
    return None


def loss_curve(run: Run) -> list[tuple[float, float, float, float]]:
    """Return the training loss of a run, as it is noted several times per epoch on all data.

    Pruned epochs are left out, because their mean loss is over other samples.

    Returns:
        Tuples of the epochs, samples and seconds so far, and the mean cross-entropy, without the L2
        term, over as many batches as an epoch has (fewer in the first epoch).
    """
    points: list[tuple[float, float, float, float]] = []
    losses: list[float] = []
    samples, seconds = 0, 0.0
    for line in run.metrics:
        if not line["pruned"] and line["train_loss"] is not None:
            parts = line.get("losses") or [line["train_loss"]]
            for number, loss in enumerate(parts, start=1):
                losses.append(loss)
                share = number / len(parts)
                done = samples + share * line["samples"], seconds + share * line["seconds"]
                mean = statistics.fmean(losses[-len(parts) :])
                points.append((line["epoch"] + share, *done, mean))
        samples += line["samples"]
        seconds += line["seconds"]
    return points


def _epoch_losses(run: Run) -> list[float]:
    """Return the mean training losses of the epochs on all data."""
    lines = [line for line in run.metrics if not line["pruned"]]
    return [line["train_loss"] for line in lines if line["train_loss"] is not None]


def _after_warm_up(run: Run) -> list[dict[str, Any]]:
    """Return the metrics of all epochs but the first, in which some work is done only once."""
    if len(run.metrics) < 2:
        raise InputError(
            f"expected runs of at least two epochs, the first of which is a warm-up, "
            f"got {len(run.metrics)} in {run.path}"
        )
    return run.metrics[1:]


def _throughput(group: Sequence[Scaled]) -> list[float]:
    """Return the number of samples per second in each epoch but the first."""
    lines = [line for scaled in group for line in _after_warm_up(scaled.run)]
    return [line["samples"] / line["seconds"] for line in lines]


def steps_per_second(run: Run) -> float:
    """Return the number of updates per second, as the median over all epochs but the first."""
    rates: list[float] = [line["steps"] / line["seconds"] for line in _after_warm_up(run)]
    return statistics.median(rates)


def phases_of(run: Run) -> dict[str, float]:
    """Return the seconds per gradient of each phase of a run; empty without servers."""
    return _phases([epoch["seconds"] for epoch in _served([run])], _gradients(run))


def _served(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [line["distributed"] for run in runs for line in run.metrics if "distributed" in line]


def _gradients(run: Run) -> int:
    """Return the number of gradients that were applied: one per batch of a worker or a group."""
    distributed, size = run.recipe["distributed"], run.recipe["training"]["batch_size"]
    batch = size * distributed["group"]
    return sum(-(-line["samples"] // batch) for line in run.metrics)


def _phases(seconds: Sequence[Mapping[str, float]], gradients: int) -> dict[str, float]:
    sums = {
        phase: sum(epoch.get(phase, 0.0) for epoch in seconds)
        for phase in WORKER_PHASES + SERVER_PHASES
    }
    return {phase: total / gradients for phase, total in sums.items() if total and gradients}


def _each(served: Sequence[dict[str, Any]]) -> tuple[WorkerRow, ...]:
    reports = [epoch["workers"] for epoch in served if epoch.get("workers")]
    in_all = sum(worker["samples"] for report in reports for worker in report)
    rows = []
    for rank in range(max(map(len, reports), default=0)):
        own = [report[rank] for report in reports if rank < len(report)]
        staleness: list[int] = functools.reduce(added, (worker["staleness"] for worker in own), [])
        share = sum(worker["samples"] for worker in own) / in_all if in_all else 0.0
        phases = _phases([worker["seconds"] for worker in own], sum(staleness))
        rows.append(WorkerRow(share, staleness_figures(staleness)["staleness_mean"], phases))
    return tuple(rows)
