"""Checks that all runs of an experiment read the same labels, weights and data.

The file that lists the runs of an experiment contains the digests with which it began, as
``training.summary.input_digests`` returns them.
"""

from collections.abc import Mapping
from pathlib import Path

from fineprune.errors import InputError, RunError
from fineprune.runs.files import SUMMARY, read_json
from fineprune.runs.summary import read_summary

Digests = Mapping[str, str | None]


def check_begun_with(listing: Path, digests: Digests, what: str) -> None:
    """Check that an experiment goes on with the files with which it began.

    The runs are not enough, because runs that are added have nothing to check yet. If the file that
    lists them does not exist, has no digests or is damaged, nothing is known and nothing checked.
    """
    try:
        begun = dict(read_json(listing)["sha256"])
    except (InputError, KeyError, TypeError, ValueError):
        return
    changed = _changed(begun, digests)
    if changed:
        raise InputError(
            f"expected {changed} with which the {what} in {listing.parent} began, got others: "
            f"restore the files, or give another --out"
        )


def check_finished(run: Path, digests: Digests, what: str) -> None:
    """Check that the run in a folder has just trained with what its experiment began with."""
    changed = _changed(digests, read_summary(run / SUMMARY).digests)
    if changed:
        raise RunError(
            f"{changed} changed while the {what} trained: remove {run}, restore what changed (a "
            f"function must return the same data on every call), and run the same command again"
        )


def _changed(digests: Digests, others: Digests) -> str:
    """Return what has other digests; an empty text if nothing has."""
    return " and ".join(f"the {name}" for name in digests if digests[name] != others.get(name))
