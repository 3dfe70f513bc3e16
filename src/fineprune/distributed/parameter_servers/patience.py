"""How long a process may be silent before it counts as hanging."""

import statistics
from collections import deque

from fineprune.distributed.strategy import Strategy

# The number of recent steps whose median duration is the usual step.
_RECENT_STEPS = 20


class Patience:
    """The silence of a server, or of a group of workers, and its limit.

    While a process waits for CPUs, nothing is expected of it. The limit of a server is
    ``startup_seconds``, and so is that of a group until the end of its first step. After that, the
    limit of a group is ``silence_seconds``, or ``silence_factor`` times its usual step if that is
    longer.

    Attributes:
        silence: For how many seconds the expected answer has not come.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.silence = 0.0
        self._strategy = strategy
        self._expected = False
        self._limit: float | None = None
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)

    def expect(self, limit: float | None = None) -> None:
        """Begin to wait for an answer.

        Args:
            limit: The longest silence until this answer, in seconds; None for the usual limit.
        """
        self.silence = 0.0
        self._expected = True
        self._limit = limit

    def hear(self) -> None:
        """Note a sign of life. The answer is still expected."""
        self.silence = 0.0

    def rest(self) -> None:
        """Expect no more answer."""
        self.silence = 0.0
        self._expected = False

    def note_step(self, seconds: float) -> None:
        """Note the duration of a step."""
        self._steps.append(seconds)

    def ends(self, seconds: float) -> bool:
        """Add to the silence, if an answer is expected. Return whether it exceeds the limit."""
        if self._expected:
            self.silence += seconds
        return self.silence > self.limit

    @property
    def limit(self) -> float:
        """The longest silence, in seconds."""
        if self._limit is not None:
            return self._limit
        if not self._steps:
            return self._strategy.startup_seconds
        return max(self._strategy.silence_seconds, self._strategy.silence_factor * self.step)

    @property
    def step(self) -> float:
        """The duration of a usual step, in seconds; 0 before the first step."""
        return statistics.median(self._steps) if self._steps else 0.0

    def __str__(self) -> str:
        usual = (
            f"its usual step takes {self.step:.2g} s" if self._steps else "before its first step"
        )
        return f"{self.silence:.0f} s ({usual})"
