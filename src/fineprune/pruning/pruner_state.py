"""The state dict of ``Pruner``: packed, checked and unpacked by functions without side effects."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fineprune.errors import InputError, first_line
from fineprune.pruning.epoch_cycle import Progress
from fineprune.pruning.plan import EpochPlan, check_plan

STATE_VERSION = 1

_KEYS = (
    "epoch",
    "open",
    "synchronized",
    "nonfinite",
    "asked_to_rescore",
    "progress",
    "learned",
    "skips",
    "totals",
    "watch",
)


@dataclass(frozen=True)
class PrunerState:
    """A pruner between two batches.

    Attributes:
        epoch: The current epoch, or the one in progress if there is one.
        open: Whether that epoch has not ended.
        progress: What was recorded of the epoch in progress; None if nothing was. A loaded one does
            not know how many samples are planned.
        synchronized: Whether the state includes the losses of all ranks.
        nonfinite_so_far: Number of losses of the epoch in progress, on all ranks together, that
            were NaN or infinite.
        asked_to_rescore: Whether the loop has asked for samples to rescore in any epoch.
        learned: The state dict of the policy.
        skips: The number of epochs in a row in which each sample was skipped, uint8, shape (N,);
            None if no option of the policy needs it.
        totals: The sums over the epochs that ended, by their names.
        watch: The state dict of the ``LabelWatch``; None if no logits were recorded.
    """

    epoch: int
    open: bool
    progress: Progress[EpochPlan] | None
    synchronized: bool
    nonfinite_so_far: int
    asked_to_rescore: bool
    learned: dict[str, Any]
    skips: torch.Tensor | None
    totals: dict[str, int]
    watch: dict[str, Any] | None


def pack_state(state: PrunerState, identity: dict[str, Any]) -> dict[str, Any]:
    """Turn a state into tensors, numbers, strings, lists and dicts.

    Args:
        state: The state to pack.
        identity: ``num_samples``, ``seed``, the policy's ``settings`` and its ``options``. A pruner
            loads the state only if it agrees with all of them.

    Raises:
        InputError: The state was taken in the middle of an epoch without ``synchronize()``, or it
            holds something that does not load with ``weights_only=True``.
    """
    if not state.synchronized:
        raise InputError(unsynchronized(state.epoch))
    progress = None
    if state.progress is not None:
        kept = np.zeros(identity["num_samples"], dtype=np.bool_)
        kept[state.progress.plan.kept.numpy()] = True
        progress = {
            "kept": torch.from_numpy(np.packbits(kept)),
            "weights": state.progress.plan.weights,
            "batches": state.progress.batches,
            "samples": state.progress.samples,
            "rescored": state.progress.rescored,
        }
    packed: dict[str, Any] = {
        "version": STATE_VERSION,
        **identity,
        "epoch": state.epoch,
        "open": state.open,
        "synchronized": state.synchronized,
        "nonfinite": state.nonfinite_so_far,
        "asked_to_rescore": state.asked_to_rescore,
        "progress": progress,
        "learned": state.learned,
        "skips": state.skips,
        "totals": state.totals,
        "watch": state.watch,
    }
    loadable: dict[str, Any] = plain(packed, "the state")
    return loadable


def unpack_state(packed: dict[str, Any], identity: dict[str, Any]) -> PrunerState:
    """Check a packed state and turn it back into a ``PrunerState``.

    Args:
        packed: A dict from ``pack_state``.
        identity: ``num_samples``, ``seed``, ``settings`` and ``options`` of the pruner that
            loads the state.

    Raises:
        InputError: The state is incomplete, has another version, comes from a run with another N,
            seed or policy, or was taken in the middle of an epoch without ``synchronize()``.
    """
    check_state(packed, plain({"version": STATE_VERSION, **identity}, "the settings"), _KEYS)
    packed = on_cpu(packed)
    if not packed["synchronized"]:
        raise InputError(unsynchronized(packed["epoch"]))
    progress = None
    saved = packed["progress"]
    if saved is not None:
        mask = np.unpackbits(saved["kept"].numpy(), count=identity["num_samples"])
        kept = torch.from_numpy(np.flatnonzero(mask))
        plan = EpochPlan(packed["epoch"], kept, saved["weights"])
        check_plan(plan, packed["epoch"], None, identity["num_samples"])
        counts = {name: saved[name] for name in ("batches", "samples", "rescored")}
        progress = Progress(plan, 0, **counts)
    return PrunerState(
        epoch=packed["epoch"],
        open=packed["open"],
        progress=progress,
        synchronized=True,
        nonfinite_so_far=packed["nonfinite"],
        asked_to_rescore=packed["asked_to_rescore"],
        learned=packed["learned"],
        skips=packed["skips"],
        totals=packed["totals"],
        watch=packed["watch"],
    )


def plain(value: Any, name: str) -> Any:
    """Return a value of which ``torch.load`` with ``weights_only=True`` loads every part.

    Numbers of NumPy become those of Python, and tuples become lists.

    Args:
        value: Tensors, numbers, strings, bytes, None, and lists, tuples and dicts of these.
        name: What the value is called in the error.

    Raises:
        InputError: There is something else in it.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {plain(key, name): plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{number}]") for number, item in enumerate(value)]
    if value is None or isinstance(value, torch.Tensor | bool | int | float | str | bytes):
        return value
    raise InputError(
        f"expected {name} as a tensor, a number, a string, or a list or dict of these, which "
        f"torch.load loads with weights_only=True, got {type(value).__name__}: return such values "
        f"from settings() and state_dict() of the policy"
    )


def on_cpu(value: Any) -> Any:
    """Return a state whose tensors are on the CPU: ``map_location`` moves those of a file.

    Args:
        value: The packed state, or a part of it.
    """
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    return [on_cpu(item) for item in value] if isinstance(value, list) else value


def check_state(packed: object, identity: dict[str, Any], keys: Sequence[str]) -> None:
    """Raise InputError unless a state is a dict that has these values and these further keys."""
    if not isinstance(packed, dict):
        raise InputError(f"expected a pruner state as a dict, got {type(packed).__name__}")
    for key, value in identity.items():
        if packed.get(key) != value:
            raise InputError(
                f"expected a pruner state with {key}={value}, got {packed.get(key)}: "
                f"resume with the settings that the state was made with"
            )
    missing = [key for key in keys if key not in packed]
    if missing:
        raise InputError(f"expected a pruner state with {missing[0]}, got one without it")


def to_bytes(packed: dict[str, Any]) -> bytes:
    """Return a packed state as the bytes of a file of ``torch.save``."""
    file = io.BytesIO()
    torch.save(packed, file)
    return file.getvalue()


def from_bytes(data: object) -> dict[str, Any]:
    """Return the packed state of ``to_bytes``, without running any code that it might contain.

    Raises:
        InputError: These are not the bytes of a state.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InputError(f"expected the bytes of state_bytes(), got {type(data).__name__}")
    try:
        packed: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no error of its own for damaged files.
        raise InputError(
            f"expected the bytes of state_bytes(), got {len(data)} bytes that cannot be read: "
            f"{first_line(error)}"
        ) from error
    return packed


def unsynchronized(epoch: int) -> str:
    """Return the message about a state that lacks what other ranks recorded."""
    return (
        f"expected a state with what all ranks recorded, got one that was taken in epoch {epoch} "
        f"without synchronize(): call it on every rank before state_dict()"
    )
