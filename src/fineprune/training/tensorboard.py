"""The metrics of a run as an event file in its folder, for TensorBoard."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fineprune.runs.files import read_metrics
from fineprune.runs.folder import RunFolder

# The end of the name of our event files, so that no others are removed.
_SUFFIX = ".fineprune"


@contextlib.contextmanager
def event_file(files: RunFolder, num_samples: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Write an event file, beginning with the epochs in ``metrics.jsonl``.

    The event file of an earlier attempt is replaced, so that each epoch occurs once. The step of a
    value is its epoch, counted from 1. ``saved`` is the share of all sample-steps so far that was
    skipped.

    Yields:
        A function that writes the metrics of the next epoch.
    """
    from torch.utils.tensorboard import SummaryWriter

    for old in files.path.glob(f"events.out.tfevents.*{_SUFFIX}"):
        old.unlink()
    writer = SummaryWriter(str(files.path), filename_suffix=_SUFFIX)
    skipped = 0

    def write(metrics: dict[str, Any]) -> None:
        nonlocal skipped
        skipped += metrics["skipped"]
        step = metrics["epoch"] + 1
        for name, value in metrics.items():
            if isinstance(value, int | float) and name not in ("epoch", "pruned"):
                writer.add_scalar(name, value, step)
        writer.add_scalar("saved", skipped / (step * num_samples), step)
        writer.flush()

    try:
        for metrics in read_metrics(files.metrics):
            write(metrics)
        yield write
    finally:
        writer.close()
