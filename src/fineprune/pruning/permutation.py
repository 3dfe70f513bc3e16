"""Permutation: a random order whose positions are computed one by one, without an array of all.

It is a Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from
pseudorandom functions", SIAM Journal on Computing 17, 1988) over pairs of numbers below the square
root of the length. The round functions are tables of random numbers. Values outside the order are
permuted again until they are inside (Black and Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002).
"""

import math

import numpy as np
import numpy.typing as npt

# With six rounds or fewer, chi-square tests over thousands of orders find that positions at the
# distance of one side have related values. With eight, they find nothing.
_ROUNDS = 8

# An order of at most so many numbers is stored: a network of so few pairs makes some orders more
# often than others.
_STORED = 256


class Permutation:
    """A random order of 0..length-1, which takes memory in proportion to the root of its length.

    Args:
        length: How many numbers are permuted, at least 1 and below 2**62.
        rng: The random stream that chooses the order.
        rounds: Number of rounds of the network.
    """

    def __init__(self, length: int, rng: np.random.Generator, rounds: int = _ROUNDS) -> None:
        self.length = length
        self._stored = rng.permutation(length) if length <= _STORED else None
        self._side = math.isqrt(length - 1) + 1  # The smallest square that contains the order.
        self._tables = rng.integers(0, self._side, size=(rounds, self._side), dtype=np.uint64)

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers at some positions of the order.

        Args:
            positions: From 0 to length - 1; int64, shape (n,).

        Returns:
            int64, shape (n,). All positions together give every number from 0 to length - 1 once.
        """
        if self._stored is not None:
            return self._stored[positions]
        values = self._permuted(positions)
        outside = np.flatnonzero(values >= self.length)
        while len(outside):
            values[outside] = self._permuted(values[outside])
            outside = outside[values[outside] >= self.length]
        return values

    def _permuted(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Permute numbers below the square of the side."""
        side = np.uint64(self._side)
        left, right = np.divmod(values.view(np.uint64), side)
        for table in self._tables:
            left += table.take(right.view(np.int64))
            # The difference of unsigned numbers is huge instead of negative.
            np.minimum(left, left - side, out=left)
            left, right = right, left
        left *= side
        left += right
        return left.view(np.int64)
