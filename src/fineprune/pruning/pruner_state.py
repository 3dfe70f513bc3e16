"""The state dict of a pruner: its parts are packed, checked and unpacked without side effects."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fineprune.errors import InputError
from fineprune.pruning.epoch import Epoch
from fineprune.pruning.plan import EpochPlan, check_plan
from fineprune.pruning.step_counts import BatchShape

# Longer values, such as lists of rates, are shortened in error messages.
_MOST_SHOWN = 200

# What to do with a state that this version cannot read.
OF_ANOTHER_VERSION = (
    "load it with the version of fineprune that saved it (and of your policy), or train anew"
)


def pack_epoch(epoch: Epoch, num_samples: int) -> dict[str, Any]:
    """Return an unfinished epoch: its kept samples as bits, and how far it got."""
    kept = np.zeros(num_samples, dtype=np.bool_)
    kept[epoch.plan.kept.numpy()] = True
    return {
        "kept": torch.from_numpy(np.packbits(kept)),
        "weights": epoch.plan.weights,
        "batches": epoch.batches,
        "done": epoch.done,
        "complete": epoch.complete,
    }


def unpack_epoch(packed: dict[str, Any], number: int, num_samples: int, shape: BatchShape) -> Epoch:
    """Return the epoch that ``pack_epoch`` packed, in batches of this shape."""
    mask = np.unpackbits(packed["kept"].numpy(), count=num_samples)
    plan = EpochPlan(number, torch.from_numpy(np.flatnonzero(mask)), packed["weights"])
    planned = shape.planned(check_plan(plan, number, None, num_samples).number)
    # With another number of ranks or another batch size, ``done`` would not tell this.
    done = max(packed["done"], planned) if packed["complete"] else packed["done"]
    return Epoch(plan, planned, packed["batches"], done)


def plain(value: Any, name: str) -> Any:
    """Return a value of which ``torch.load`` with ``weights_only=True`` loads every part.

    NumPy numbers become those of Python, tuples become lists, and tensors are on the CPU.

    Raises:
        InputError: A part of the value, which is called ``name``, is something else.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {plain(key, name): plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise InputError(
        f"expected {name} as a tensor, a number, a string, or a list or dict of these, which "
        f"torch.load loads with weights_only=True, got {type(value).__name__}: let settings() and "
        f"state_dict() of the policy return such values"
    )


def check_state(packed: object, identity: dict[str, Any], keys: Sequence[str]) -> None:
    """Raise InputError unless a state is a dict that has these values and these further keys."""
    if not isinstance(packed, dict):
        raise InputError(f"expected a pruner state as a dict, got {type(packed).__name__}")
    if not identity.keys() & packed.keys():
        raise InputError(
            f"expected a pruner state, got a dict with the keys {_brief(list(packed))}: give what "
            f"pruner.state_dict() returned"
        )
    missing = [key for key in (*identity, *keys) if key not in packed]
    if missing:
        raise InputError(
            f"expected a pruner state with {missing[0]}, got one without it: {OF_ANOTHER_VERSION}"
        )
    for key, value in identity.items():
        if found := _difference(key, value, packed[key]):
            name, own, given = found
            remedy = OF_ANOTHER_VERSION if name == "version" else "resume with the settings of then"
            raise InputError(
                f"expected a pruner state with {name}={_brief(own)}, got {_brief(given)}: {remedy}"
            )


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."


def _difference(name: str, own: Any, given: Any) -> tuple[str, object, object] | None:
    """Return the name and the values of the first setting that differs."""
    if isinstance(own, dict) and isinstance(given, dict):
        parts = (_difference(key, own.get(key), given.get(key)) for key in {**given, **own})
        return next(filter(None, parts), None)
    return None if own == given else (name, own, given)
