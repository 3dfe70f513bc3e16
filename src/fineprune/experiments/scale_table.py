"""The measures of a scaling experiment: throughput, speedup, staleness and the time to a loss.

The measures are those of [D] Tables 1 to 3 (Campos et al., ICCS 2017). In addition, the time of a
step is split into its phases, which that paper leaves as future work. A node is a worker with its
group, or a dedicated server.
"""

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fineprune.errors import InputError
from fineprune.experiments.configurations import ALL_REDUCE, ONE, Configuration, configuration
from fineprune.runs.files import DURATION, SCALING, read_json
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


@dataclass(frozen=True)
class ScaleRow:
    """The measures of one configuration. None marks a value that is not available.

    With several seeds, times, accuracies and numbers of epochs, samples and updates are means.

    Attributes:
        configuration: The text of the configuration.
        strategy: The strategy of the configuration.
        workers: The number of workers.
        servers: The number of parameter servers.
        nodes: The number of nodes; see ``Configuration.nodes``.
        seeds: The number of runs.
        throughput: The number of samples per second, as the median over all epochs but the first.
        throughput_low, throughput_high: The quartiles of the samples per second.
        speedup: The throughput divided by that of the baseline.
        efficiency: The speedup divided by the number of nodes per node of the baseline.
        speedup_all_reduce: The throughput divided by that of all-reduce with the same number of
            workers.
        accuracy_last: The accuracy after the last epoch, as a fraction.
        accuracy_deviation: The standard deviation of this accuracy over the seeds; None for one.
        seconds: The training time, in seconds.
        seconds_other: The time in seconds that the run's processes took for everything except
            training and evaluation, such as starting Ray, loading data and writing checkpoints.
        target_loss: The mean training loss to reach; None if it is not given and a configuration
            has no epoch on all data.
        epochs_to_target, samples_to_target, seconds_to_target: The epochs, samples and seconds to
            the end of the first epoch on all data whose mean training loss is at most the target;
            None if any run has no such epoch.
        speedup_to_target: The seconds to the target of the baseline, divided by those of this
            configuration.
        staleness: The number of updates with a staleness of 0, 1, 2 and so on; empty without
            servers.
        staleness_mean, staleness_p95, staleness_max: The mean, 95th percentile and maximum of the
            staleness of the updates.
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
    seeds: int
    throughput: float
    throughput_low: float
    throughput_high: float
    speedup: float | None
    efficiency: float | None
    speedup_all_reduce: float | None
    accuracy_last: float
    accuracy_deviation: float | None
    seconds: float
    seconds_other: float | None
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
    listed = read_json(folder / SCALING, dict[str, Any])
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
        other = read_json(duration, dict[str, float])["seconds"]
        other -= summary.seconds_train + summary.seconds_evaluate
    return Scaled(trained, run, other)


def scale_rows(
    runs: Sequence[Scaled], target_loss: float | None = None, baseline: str | None = None
) -> list[ScaleRow]:
    """Return one row for each configuration.

    Args:
        runs: The runs of one recipe.
        target_loss: The mean training loss to reach. By default, it is the lowest loss that every
            run reaches in an epoch on all data.
        baseline: The configuration to which speedups are relative; by default a single process, if
            there is one.
    """
    if not runs:
        raise InputError("expected at least one run, got none")
    if target_loss is None:
        lowest = [min((loss for _, loss in _losses(scaled.run)), default=None) for scaled in runs]
        losses = [loss for loss in lowest if loss is not None]
        target_loss = max(losses) if len(losses) == len(runs) else None
    groups = split_by(lambda scaled: scaled.configuration.text, runs)
    base = _baseline(groups, baseline)
    return [_row(group, base, groups, target_loss) for group in groups.values()]


def _baseline(groups: Mapping[str, list[Scaled]], text: str | None) -> list[Scaled] | None:
    if text is None:
        singles = (g for g in groups.values() if g[0].configuration.strategy == ONE)
        return next(singles, None)
    wanted = configuration(text).text
    if wanted not in groups:
        raise InputError(
            f"expected the baseline to be one of {', '.join(map(repr, groups))}, got {text!r}"
        )
    return groups[wanted]


def _row(
    group: Sequence[Scaled],
    base: Sequence[Scaled] | None,
    groups: Mapping[str, Sequence[Scaled]],
    target_loss: float | None,
) -> ScaleRow:
    config, runs = group[0].configuration, [scaled.run for scaled in group]
    throughput = [value for run in runs for value in _throughput(run)]
    median = statistics.median(throughput)
    low, high = np.percentile(throughput, [25, 75])
    speedup = None if base is None else median / _median(base)
    nodes = None if base is None else config.nodes / base[0].configuration.nodes
    reduced = next(
        (
            other
            for other in groups.values()
            if (other[0].configuration.strategy, other[0].configuration.workers)
            == (ALL_REDUCE, config.workers)
        ),
        None,
    )
    target = _to_target(runs, target_loss)
    epochs, samples, seconds = target or (None, None, None)
    base_target = None if base is None else _to_target([s.run for s in base], target_loss)
    served = [line["distributed"] for run in runs for line in run.metrics if "distributed" in line]
    staleness: list[int] = functools.reduce(added, (epoch["staleness"] for epoch in served), [])
    gradients = sum(map(_gradients, runs)) if served else 0
    dropped = sum(epoch["dropped"] for epoch in served)
    accuracies = [run.summary.accuracy_last for run in runs]
    other = [scaled.seconds_other for scaled in group]
    known = [seconds for seconds in other if seconds is not None]
    return ScaleRow(
        configuration=config.text,
        strategy=config.strategy,
        workers=config.workers,
        servers=config.servers,
        nodes=config.nodes,
        seeds=len(runs),
        throughput=median,
        throughput_low=float(low),
        throughput_high=float(high),
        speedup=speedup,
        efficiency=None if speedup is None or nodes is None else speedup / nodes,
        speedup_all_reduce=None if reduced is None else median / _median(reduced),
        accuracy_last=statistics.mean(accuracies),
        accuracy_deviation=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        seconds=statistics.mean(run.summary.seconds_train for run in runs),
        seconds_other=statistics.mean(known) if len(known) == len(other) else None,
        target_loss=target_loss,
        epochs_to_target=epochs,
        samples_to_target=samples,
        seconds_to_target=seconds,
        speedup_to_target=base_target[2] / target[2] if target and base_target else None,
        staleness=tuple(staleness),
        **staleness_figures(staleness),
        updates=statistics.mean(sum(line["steps"] for line in run.metrics) for run in runs),
        dropped=dropped / (gradients + dropped) if gradients else None,
        phases=_phases([epoch["seconds"] for epoch in served], gradients),
        each=_each(served),
    )


def _median(group: Sequence[Scaled]) -> float:
    return statistics.median(value for scaled in group for value in _throughput(scaled.run))


def _to_target(runs: Sequence[Run], target_loss: float | None) -> tuple[float, float, float] | None:
    """Return the mean epochs, samples and seconds to the target; None if a run never reaches it."""
    if target_loss is None:
        return None
    found = []
    for run in runs:
        reached = next((epoch for epoch, loss in _losses(run) if loss <= target_loss), None)
        if reached is None:
            return None
        samples = sum(line["samples"] for line in run.metrics[: reached + 1])
        found.append((reached + 1, samples, _seconds(run, reached)))
    epochs, samples, seconds = (statistics.mean(values) for values in zip(*found, strict=True))
    return epochs, samples, seconds


def _each(served: Sequence[dict[str, Any]]) -> tuple[WorkerRow, ...]:
    reports = [epoch["workers"] for epoch in served if epoch.get("workers")]
    if not reports:
        return ()
    rows = []
    in_all = sum(worker["samples"] for report in reports for worker in report)
    for rank in range(max(map(len, reports))):
        own = [report[rank] for report in reports if rank < len(report)]
        staleness: list[int] = functools.reduce(added, (worker["staleness"] for worker in own), [])
        share = sum(worker["samples"] for worker in own) / in_all if in_all else 0.0
        phases = _phases([worker["seconds"] for worker in own], sum(staleness))
        rows.append(WorkerRow(share, staleness_figures(staleness)["staleness_mean"], phases))
    return tuple(rows)


def loss_curve(run: Run) -> tuple[list[float], list[float]]:
    """Return the training time in seconds and the mean training loss after each epoch on all data.

    Pruned epochs are left out, because their mean loss is over other samples.
    """
    losses = _losses(run)
    return [_seconds(run, epoch) for epoch, _ in losses], [loss for _, loss in losses]


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


def _seconds(run: Run, epoch: int) -> float:
    """Return the training time from the start of the run to the end of an epoch."""
    return float(sum(line["seconds"] for line in run.metrics[: epoch + 1]))


def _gradients(run: Run) -> int:
    """Return the number of gradients that were applied: one per batch of a worker or a group."""
    distributed, size = run.recipe["distributed"], run.recipe["training"]["batch_size"]
    batch = size * distributed["group"]
    return sum(-(-line["samples"] // batch) for line in run.metrics)


def _phases(seconds: Sequence[Mapping[str, float]], gradients: int) -> dict[str, float]:
    if not gradients:  # no servers
        return {}
    sums = {
        phase: sum(epoch.get(phase, 0.0) for epoch in seconds)
        for phase in WORKER_PHASES + SERVER_PHASES
    }
    return {phase: total / gradients for phase, total in sums.items() if total}
