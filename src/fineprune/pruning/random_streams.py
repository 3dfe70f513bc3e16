"""Independent random streams, one for each (seed, epoch, purpose).

Breaking ties, augmentation and random skipping draw from generators of their own, so they influence
neither each other nor the user's random state, and a resume or another number of ranks or loader
workers does not change the draws.
"""

import zlib

import numpy as np


def stream(seed: int, epoch: int, purpose: str) -> np.random.Generator:
    """Return the generator for one purpose, a name such as ``"select"``, in one epoch of a run."""
    return np.random.default_rng([seed, epoch, zlib.crc32(purpose.encode())])
