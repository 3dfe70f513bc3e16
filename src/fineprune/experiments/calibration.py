"""Measures on this machine, in about a minute, what the steps of a recipe cost on a cluster.

The spread of the steps comes from a worker that trains alone in this process. What an exchange with
a server costs beyond computing comes from a training with one worker and one server on this
machine; what the server itself does is measured apart.
"""

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fineprune.distributed.parameter_servers.flat_layout import flat_layout
from fineprune.distributed.parameter_servers.start import parameter_servers
from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError
from fineprune.experiments.cluster_costs import Costs
from fineprune.training.hardware import wait_for
from fineprune.training.optimizer import build_optimizer
from fineprune.training.recipe import Recipe
from fineprune.training.recipe_replica import RecipeReplica
from fineprune.training.served_epochs import with_absolute_paths

# How long each of the two trainings is measured, in seconds, and its fewest steps.
_SECONDS, _FEWEST, _MOST = 15.0, 12, 400
_WARM_UP = 3
_REPEATS = 15


def calibrated(
    recipe: Recipe, given: dict[str, Any], on_progress: Callable[[str], None] = lambda text: None
) -> tuple[Costs, int]:
    """Return the costs of a recipe's step, and the number of its training samples.

    Args:
        recipe: The recipe for a single process, without "auto" settings.
        given: The costs that are given and not measured, by the names of ``Costs``.
        on_progress: Called with a line of text before each measurement.
    """
    torch.set_num_threads(recipe.run.threads)
    replica = RecipeReplica(recipe, 0)
    layout = flat_layout(replica.model, 1)
    samples = torch.arange(min(recipe.training.batch_size, replica.num_samples))
    narrow = recipe.distributed.gradients == "bfloat16"
    found: dict[str, Any] = {
        "samples": len(samples),
        "megabytes": 4e-6 * layout.elements,
        "gradients": 0.5 if narrow else 1.0,
    }
    if "steps" not in given:
        on_progress("measuring the steps of one worker")
        found["steps"] = tuple(_steps(replica, samples))
    if not {"serve", "apply"} <= given.keys():
        on_progress("measuring the work of a server")
        parameters = layout.flat(replica.model).cpu()
        found["serve"], found["apply"] = _server_seconds(parameters, recipe)
    if not {"overhead", "coordinate"} <= given.keys():
        if importlib.util.find_spec("ray") is None:
            raise InputError(
                "expected Ray, to measure an exchange with a server, found none: pip install "
                "'fineprune[cluster]', or give costs.overhead and costs.coordinate with --cluster"
            )
        on_progress("measuring an exchange with a server")
        known = {**found, **given}
        placed = with_absolute_paths(recipe)
        beyond, own = _exchange(placed, replica, samples, statistics.mean(known["steps"]))
        # Bytes over the loopback interface are part of it, as copies in memory.
        found["overhead"] = max(0.0, beyond - known["serve"] - known["apply"] - own)
        found["coordinate"] = own
    return Costs(**{**found, **given}), replica.num_samples


def _steps(replica: RecipeReplica, samples: torch.Tensor) -> list[float]:
    """Return the durations of steps, which include the part of loading that computing cannot hide.

    A worker loads the next batch while it computes, so the longer of the two counts.
    """
    device = next(replica.model.parameters()).device

    def now() -> float:
        wait_for(device)
        return time.perf_counter()

    durations: list[float] = []
    began = now()
    while len(durations) < _FEWEST + _WARM_UP or (
        now() - began < _SECONDS and len(durations) < _MOST
    ):
        start = now()
        batch = replica.load((0, len(durations)), samples)
        loaded = now()
        replica.model.zero_grad(set_to_none=False)
        replica.step(batch, None)
        computed = now()
        if replica.overlaps:
            durations.append(max(loaded - start, computed - loaded))
        else:
            durations.append(computed - start)
    return durations[_WARM_UP:]


def _server_seconds(parameters: torch.Tensor, recipe: Recipe) -> tuple[float, float]:
    """Return how long a server that holds all parameters is busy with a gradient and an update."""
    gradient, answer = torch.zeros_like(parameters), torch.empty_like(parameters)
    held = parameters.clone()
    held.grad = torch.zeros_like(held)
    optimizer = build_optimizer([("all", held)], settings=recipe.training)

    def serve() -> None:
        torch.mul(gradient, 1.0, out=held.grad)
        answer.copy_(held)

    def seconds(act: Callable[[], Any]) -> float:
        times = []
        for _ in range(_REPEATS + _WARM_UP):
            start = time.perf_counter()
            act()
            times.append(time.perf_counter() - start)
        return statistics.median(times[_WARM_UP:])

    return seconds(serve), seconds(optimizer.step)


def _exchange(
    recipe: Recipe, replica: RecipeReplica, samples: torch.Tensor, step: float
) -> tuple[float, float]:
    """Return the seconds per update beyond computing, and those of the driver's processor."""
    updates = max(_FEWEST, min(_MOST, int(_SECONDS / step)))
    batches = [samples] * updates
    found = 0.0, 0.0
    with parameter_servers(
        Strategy("async", workers=1, gradients=recipe.distributed.gradients, snapshot_every=0),
        replica.model,
        partial(RecipeReplica, recipe),
        partial(build_optimizer, settings=recipe.training),
        threads=recipe.run.threads,
        gpus=1.0 if recipe.run.device.startswith("cuda") else 0.0,
    ) as made:
        made.wait_for_workers()
        for epoch in range(2):  # The first one warms up.
            count = batches if epoch else batches[:_FEWEST]
            began, own = time.perf_counter(), _processor_seconds()
            result = made.run_epoch(epoch, count, lambda applied: 0.0)
            total, own = time.perf_counter() - began, _processor_seconds() - own
            total -= result.snapshot_seconds
            spent = result.seconds["compute"] + result.seconds["data"]
            found = (total - spent) / len(count), own / len(count)
    return found


def _processor_seconds() -> float:
    used = os.times()
    return used.user + used.system
