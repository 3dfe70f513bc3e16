"""Describes this machine, and resolves "auto" settings from it and the recipe, never by timing."""

import contextlib
import importlib.util
import os
import platform
from pathlib import Path

import torch

from fineprune.errors import InputError, first_line
from fineprune.launcher import launched
from fineprune.runs.summary import Hardware
from fineprune.training.own_code import check_code, code_digest
from fineprune.training.recipe import Recipe

# The CPU time that the second version of cgroups allows, in microseconds, and in how many.
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def resolved(recipe: Recipe, *, frozen: Recipe | None = None, sharing: int = 1) -> Recipe:
    """Return the recipe with every "auto" setting resolved, as it is written to the run's folder.

    Args:
        recipe: The recipe as given.
        frozen: The recipe in the folder of a run that is resumed. The values that "auto" was
            resolved to are used again, even if the run continues on another machine.
        sharing: The number of runs that share this machine's cores.
    """
    run, served = recipe.run, recipe.distributed.served
    device, precision, compilation = run.device, run.precision, run.compile
    threads, arm, rate_factor, code = run.threads, run.arm, run.rate_factor, run.code
    if frozen is not None:
        previous = frozen.run
        device = previous.device if device == "auto" else device
        precision = previous.precision if precision == "auto" else precision
        compilation = previous.compile if compilation == "auto" else compilation
        threads, arm = threads or previous.threads, arm or previous.arm
        rate_factor, code = previous.rate_factor, previous.code
    if frozen is not None or code is not None:
        check_code(recipe, code)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _check_device(device)
    if precision == "auto":
        precision = "bfloat16" if _has_fast_bfloat16(device) else "float32"
    if compilation == "auto":
        # On a GPU, kernel launches limit the speed of small networks, and CUDA graphs replay many
        # as one. The kernels are generated with Triton. On CPUs, the gain was within the noise.
        compiles = device.startswith("cuda") and importlib.util.find_spec("triton") is not None
        compilation = "on" if compiles and not served else "off"
    processes = sharing * (recipe.distributed.workers if served else launched().local_size)
    return recipe.replaced(
        "run",
        device=device,
        precision=precision,
        compile=compilation,
        threads=threads or max(1, available_cores() // processes),
        arm=arm,
        rate_factor=rate_factor,
        code=code_digest(recipe),
    )


def available_cores() -> int:
    """Return the number of CPU cores that this process may use, as its container allows it."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    # In a container, "150000 100000" allows one and a half cores, and "max 100000" all of them.
    with contextlib.suppress(OSError, ValueError):
        allowed, period = map(int, _QUOTA.read_text(encoding="utf-8").split())
        cores = max(1, min(cores, allowed // period))
    return cores


def describe(device: str, threads: int) -> Hardware:
    """Describe this machine, for a run's summary."""
    cpu = _cpuinfo("model name") or platform.processor() or platform.machine()
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return Hardware(cpu=cpu, cores=available_cores(), threads=threads, device=device, gpu=gpu)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that it was given; on a CPU, nothing waits."""
    if device.type == "mps":
        torch.mps.synchronize()  # It takes no device.
    else:
        torch.get_device_module(device).synchronize(device)


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        # The second sentence may say what to do; a list of all backends may follow.
        reason = ". ".join(first_line(error).split(". ")[:2])
        raise InputError(
            f"expected run.device to be auto, cpu or a device of this machine, got {name!r}: "
            f"{reason}"
        ) from error


def _has_fast_bfloat16(device: str) -> bool:
    if device.startswith("cuda"):
        return torch.cuda.get_device_capability(device)[0] >= 8
    # On a CPU, bfloat16 is faster than float32 only if the CPU has matrix units for it (AMX).
    return device == "cpu" and "amx_bf16" in _cpuinfo("flags").split()


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
