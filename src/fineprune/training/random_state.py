"""Torch's own random state (initial weights, dropout): seeded for a run, and given back after."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fineprune.pruning.random_streams import stream


@contextlib.contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Seed torch's generators inside the block; the user's own state comes back after it."""
    devices = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


def reseed(seed: int, rank: int, device: str) -> None:
    """Give another rank's generators a stream of their own, inside ``seeded``."""
    own = int(stream(seed, rank, "torch").integers(2**62))
    torch.default_generator.manual_seed(own)
    if device.startswith("cuda"):
        torch.cuda.manual_seed(own)


def random_state(device: str) -> dict[str, Any]:
    """Return the state of torch's generators, as tensors."""
    state = {"cpu": torch.get_rng_state()}
    if device.startswith("cuda"):
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: str) -> None:
    """Set the generators to a state that ``random_state`` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.startswith("cuda"):
        torch.cuda.set_rng_state(state["cuda"], device)
