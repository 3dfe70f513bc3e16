"""What the machine is, and what "auto" means on it. Decided from the hardware, never by timing."""

import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

import torch

from fineprune.distributed.all_reduce import local_size
from fineprune.errors import InputError
from fineprune.training.recipe import Recipe


def resolved(recipe: Recipe, *, frozen: Recipe | None = None, sharing: int = 1) -> Recipe:
    """Return the recipe with every "auto" replaced, as it is written to the run's folder.

    Args:
        recipe: The recipe as given.
        frozen: The recipe of the run that is resumed. What it was resolved to then holds again,
            on whatever machine the run goes on.
        sharing: The number of runs that share this machine's cores.

    Raises:
        InputError: The device is not known or not there.
    """
    given = recipe.run
    if frozen is not None:
        there = frozen.run
        recipe = recipe.replaced(
            "run",
            device=there.device if given.device == "auto" else given.device,
            precision=there.precision if given.precision == "auto" else given.precision,
            compile=there.compile if given.compile == "auto" else given.compile,
            threads=given.threads or there.threads,
            arm=there.arm,
        )
        given = recipe.run
    device = given.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _check_device(device)
    precision = given.precision
    if precision == "auto":
        precision = "bfloat16" if _fast_bfloat16(device) else "float32"
    served = recipe.distributed.served
    compiling = given.compile
    if compiling == "auto":
        compiling = "on" if _compiling_pays(device) and not served else "off"
    processes = sharing * (recipe.distributed.workers if served else local_size())
    threads = given.threads or max(1, available_cores() // processes)
    return recipe.replaced(
        "run", device=device, precision=precision, compile=compiling, threads=threads
    )


def available_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe(device: str, threads: int) -> dict[str, Any]:
    """Describe the hardware for a run's summary."""
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "threads": threads,
        "device": device,
        "gpu": gpu,
    }


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"expected run.device to be auto, cpu or a device of this machine, got {name!r}: "
            f"{reason}"
        ) from error


def _fast_bfloat16(device: str) -> bool:
    if device.startswith("cuda"):
        return torch.cuda.get_device_capability(device)[0] >= 8
    # On a CPU bfloat16 pays where there are matrix units for it (AMX); without, it is slower.
    return device == "cpu" and "amx_bf16" in _cpu_flags()


def _compiling_pays(device: str) -> bool:
    # On a GPU small networks are bound by kernel launches, which CUDA graphs replay as one; Triton
    # makes the kernels. On CPUs the gain was within noise and the compiler takes half a minute.
    return device.startswith("cuda") and importlib.util.find_spec("triton") is not None


def _cpu_flags() -> set[str]:
    return set(_cpuinfo("flags").split())


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
