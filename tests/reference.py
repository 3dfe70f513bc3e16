"""A slow, plain twin of the method, written from its description alone.

It does not import the package, torch or numpy. It uses lists, dictionaries and exact fractions
only, so that it shares no code, no rounding and no vectorised indexing with the package. Throughout
this file, epochs are the paper's e = 1..E; the API of the package counts them from 0.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

Batch = Sequence[tuple[int, float]]


# --- Algorithm 2: which epochs prune ---------------------------------------------------------


def attenuated(start: int, attenuation: float, times: int) -> int:
    """Apply ``int(start / attenuation)`` ``times`` times."""
    for _ in range(times):
        start = int(start / attenuation)
    return start


def prunes_constant(
    e: int,
    window: int,
    start: int,
    attenuation: float = 1.0,
    block: int = 1,
    count: int = 1,
    attenuate: str = "window",
) -> bool:
    """Algorithm 2 with one window for the whole training."""
    times = (e - 1) // window if attenuate == "window" else max(0, e - window)
    return e % window >= attenuated(start, attenuation, times) and e % block < count


def clears_constant(e: int, window: int) -> bool:
    return e % window == 0


class Window(NamedTuple):
    """The epochs ``begin < e <= begin + length``, and their start before attenuation."""

    begin: int
    length: int
    start: int


def windows_from_milestones(
    epochs: int, milestones: Sequence[int], per_interval: int = 1, share: float = 0.0
) -> list[Window]:
    """Cut each interval between milestones into windows at ``round(j * L / m)``."""
    edges = [0, *milestones]
    width = edges[1] if milestones else epochs
    evenly_spaced = all(b - a == width for a, b in pairwise(edges))
    rest = epochs - edges[-1]
    if rest > 0:
        # If the spacing is even, the last interval has full length; otherwise, it ends with E.
        edges.append(edges[-1] + width if evenly_spaced and rest < width else epochs)
    windows = []
    for left, right in pairwise(edges):
        interval = right - left
        cuts = [left + round(j * interval / per_interval) for j in range(per_interval + 1)]
        for begin, end in pairwise(cuts):
            length = end - begin
            windows.append(Window(begin, length, math.floor(share * length + 1e-9)))
    return windows


def constant_windows(epochs: int, window: int, start: int) -> list[Window]:
    return [Window(begin, window, start) for begin in range(0, epochs, window)]


def boundaries(windows: Sequence[Window]) -> list[int]:
    """The ends of all windows. 0 is not a boundary."""
    return [w.begin + w.length for w in windows]


def position(e: int, windows: Sequence[Window]) -> int:
    return e - max(b for b in [0, *boundaries(windows)] if b <= e)


def prunes_windows(
    e: int,
    windows: Sequence[Window],
    attenuation: float = 1.0,
    block: int = 1,
    count: int = 1,
    attenuate: str = "window",
) -> bool:
    """Algorithm 2 with windows of any lengths.

    The start is that of the window with ``begin < e <= end``. A boundary therefore has position 0,
    but the start of the window that ends there.
    """
    passed = sum(1 for b in boundaries(windows) if b < e)
    times = passed if attenuate == "window" else max(0, e - windows[0].length)
    start = attenuated(windows[passed].start, attenuation, times)
    return position(e, windows) >= start and e % block < count


def clears_windows(e: int, windows: Sequence[Window]) -> bool:
    return e in boundaries(windows)


def formula_3(n: int, w: int, a: int, r: int, c: int) -> int:
    """The paper's number of pruned epochs if ``n`` is a multiple of ``w``."""
    return ((w - a) // r * c + (w - a) % r) * (n // w)


def formula_4(n: int, w: int, a: int, r: int, c: int) -> int:
    """The paper's number of pruned epochs if ``n`` is not a multiple of ``w``."""
    return formula_3(n, w, a, r, c) + (n % w - a) // r * c + (n % w - a) % r


def closed_form(n: int, w: int, a: int, r: int, c: int) -> int:
    return formula_3(n, w, a, r, c) if n % w == 0 else formula_4(n, w, a, r, c)


# --- Algorithm 1: which samples are marked ---------------------------------------------------


def marks_of_batch(batch: Batch, tolerance: float = 0.0) -> set[int]:
    """Samples whose loss exceeds ``mean + tolerance * |mean|``, with the mean of finite losses."""
    finite = [(index, Fraction(loss)) for index, loss in batch if math.isfinite(loss)]
    if not finite:
        return set()
    mean = sum((loss for _, loss in finite), Fraction(0)) / len(finite)
    threshold = mean + Fraction(tolerance) * abs(mean)
    return {index for index, loss in finite if loss > threshold}


def marks_of_epoch(batches: Iterable[Batch], tolerance: float = 0.0) -> set[int]:
    """The marked samples. A sample has at most one mark, however many batches contain it."""
    marked: set[int] = set()
    for batch in batches:
        marked |= marks_of_batch(batch, tolerance)
    return marked


def nonfinite_losses(batches: Iterable[Batch]) -> int:
    return sum(1 for batch in batches for _, loss in batch if not math.isfinite(loss))


def counts_after_epoch(counts: Sequence[int], marked: set[int], clears: bool) -> list[int]:
    """The counts at the end of an epoch: first clear, then add."""
    new = [0] * len(counts) if clears else list(counts)
    for index in marked:
        new[index] += 1
    return new


# --- KeepList --------------------------------------------------------------------------------


def number_skipped(n: int, prune: int | float) -> int:
    """``prune`` as a whole number, or as a decimal share of ``n``."""
    return prune if isinstance(prune, int) else math.floor(Fraction(str(prune)) * n)


def round_up(number: int, multiple: int) -> int:
    while number % multiple:
        number += 1
    return number


def why_invalid(counts: Sequence[int], kept: Sequence[int], skipped: int) -> str | None:
    """What is wrong with ``kept`` for these counts; None if it is valid."""
    n = len(counts)
    if list(kept) != sorted(set(kept)):
        return "the kept samples are not sorted and distinct"
    if any(not 0 <= index < n for index in kept):
        return "a kept index is out of range"
    if len(kept) != n - skipped:
        return f"{len(kept)} samples are kept, not {n} - {skipped}"
    kept_counts = [counts[index] for index in kept]
    inside = set(kept)
    skipped_counts = [counts[index] for index in range(n) if index not in inside]
    if kept_counts and skipped_counts and min(skipped_counts) < max(kept_counts):
        return "a skipped sample has a smaller count than a kept one"
    return None


# --- steps -----------------------------------------------------------------------------------


def samples_per_rank(
    n: int, skipped: int, ranks: int = 1, multiple: int | None = None, drop_last: bool = False
) -> int:
    """Number of indices per rank and epoch; ``multiple`` is batch x ranks x accumulation.

    An epoch with ``skipped == 0`` is full. As in torch's DistributedSampler, it is padded to equal
    lengths, or its tail is dropped.
    """
    if skipped:
        return round_up(n - skipped, multiple or ranks) // ranks
    if drop_last and n % ranks:
        return math.ceil((n - ranks) / ranks)
    return math.ceil(n / ranks)


def batches(samples: int, batch_size: int, drop_last: bool = False) -> int:
    full, tail = divmod(samples, batch_size)
    return full if drop_last or tail == 0 else full + 1
