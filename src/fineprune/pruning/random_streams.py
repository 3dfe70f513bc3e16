"""Independent random streams, one for each (seed, epoch, purpose).

Ties, augmentation and random skipping must not disturb one another, nor the user's own random
state: each draws from a generator of its own, made anew from the three values and from nothing
else. A resumed run, another number of ranks or of loader workers therefore draws the same.
"""

import zlib

import numpy as np


def stream(seed: int, epoch: int, purpose: str) -> np.random.Generator:
    """Return the generator of one purpose in one epoch.

    Args:
        seed: the run's seed, at least 0.
        epoch: the epoch, counted from 0.
        purpose: a short name, such as ``"ties"``; other names give independent streams.
    """
    return np.random.default_rng([seed, epoch, zlib.crc32(purpose.encode())])
