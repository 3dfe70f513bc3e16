"""Torch's own random state (initial weights, dropout): seeded for a run and restored after it.

A run draws from the generator of the CPU and from that of its own device. Only these two are
touched; the generators of all other devices belong to the user.
"""

import contextlib
from collections.abc import Iterator

import torch

from fineprune.pruning.random_streams import stream


@contextlib.contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Seed torch's generators inside the block, and restore their states after it."""
    before = random_state(device)
    try:
        for generator in _generators(device).values():
            generator.manual_seed(seed)
        yield
    finally:
        set_random_state(before, device)


def reseed(seed: int, rank: int, device: str) -> None:
    """Give the generators of another rank than 0 a stream of their own, inside ``seeded``."""
    own = int(stream(seed, rank, "torch").integers(2**62))
    for generator in _generators(device).values():
        generator.manual_seed(own)


def random_state(device: str) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators as tensors on the CPU, by kind of device."""
    return {kind: generator.get_state() for kind, generator in _generators(device).items()}


def set_random_state(state: dict[str, torch.Tensor], device: str) -> None:
    """Restore states from ``random_state``, as far as they belong to this kind of device."""
    for kind, generator in _generators(device).items():
        if kind in state:
            generator.set_state(state[kind])


def _generators(device: str) -> dict[str, torch.Generator]:
    generators = {"cpu": torch.default_generator}
    own = torch.device(device)
    if own.type == "cuda":
        torch.cuda.init()
        # Without a number, ``cuda`` is torch's current GPU.
        index = torch.cuda.current_device() if own.index is None else own.index
        generators["cuda"] = torch.cuda.default_generators[index]
    elif own.type == "mps":
        generators["mps"] = torch.mps._get_default_mps_generator()
    return generators
