"""What a launcher such as torchrun says of this process: the only place that reads its variables.

A variable that is empty counts as unset.
"""

import os
from dataclasses import dataclass

from fineprune.errors import InputError


@dataclass(frozen=True)
class Launched:
    """The place of this process among those that a launcher started.

    Attributes:
        rank: The number of this process, from 0.
        size: The number of processes on all machines; 1 without a launcher.
        local_rank: The number of this process on its machine; None if the launcher does not say.
        local_size: The number of processes on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int = 1


def launched() -> Launched:
    """Return what the launcher says.

    Raises:
        InputError: Its variables are incomplete, are no numbers, or do not fit together.
    """
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if size is None and rank is not None:
        raise InputError(
            f"expected the environment of a launcher such as torchrun, got RANK={rank} without "
            f"WORLD_SIZE: start it with torchrun, or unset RANK"
        )
    if size is None or size == 1:
        return Launched(local_size=_number("LOCAL_WORLD_SIZE") or 1)
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(n)]
    if rank is None or missing:
        raise InputError(
            f"expected the environment of a launcher such as torchrun, got WORLD_SIZE={size} "
            f"without {', '.join(missing)}: start it with torchrun, or unset WORLD_SIZE"
        )
    if rank >= size:
        raise InputError(
            f"expected RANK below WORLD_SIZE={size}, got {rank}: start it with torchrun"
        )
    return Launched(rank, size, _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE") or 1)


def world_size() -> int:
    """Return the number of processes that the launcher started on all machines."""
    return _number("WORLD_SIZE") or 1


def check_not_launched(what: str, starts: str) -> None:
    """Check that no launcher such as ``torchrun`` started this process together with others.

    Args:
        what: What is started, such as ``fineprune compare``.
        starts: What it starts itself.

    Raises:
        InputError: A launcher started several processes.
    """
    size = launched().size
    if size > 1:
        raise InputError(
            f"expected {what} without torchrun, got {size} processes: start one process, which "
            f"starts {starts} itself"
        )


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise InputError(
            f"expected the variable {variable} to be a whole number, as a launcher sets it, got "
            f"{text!r}: unset it"
        )
    return int(text)
