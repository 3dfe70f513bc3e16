"""Independent random streams, one for each (seed, epoch, purpose).

Breaking ties, augmentation and random skipping must not influence each other or the user's own
random state. Each of them therefore draws from its own generator, which depends on these three
values only. Resuming a run or changing the number of ranks or loader workers does not change the
draws.
"""

import zlib

import numpy as np


def stream(seed: int, epoch: int, purpose: str) -> np.random.Generator:
    """Return the generator for one purpose in one epoch.

    Args:
        seed: The seed of the run, at least 0.
        epoch: The epoch, counted from 0.
        purpose: A short name, such as ``"select"``. Different names give independent streams.
    """
    return np.random.default_rng([seed, epoch, zlib.crc32(purpose.encode())])
