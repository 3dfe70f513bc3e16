"""One row per sample of each run, for other programs: as CSV or Parquet."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fineprune.errors import check_installed
from fineprune.inspection.inspected import Inspected
from fineprune.inspection.suspects import suspects_of
from fineprune.writing import replacing, write_atomically

Columns = dict[str, npt.NDArray[Any]]


def sample_columns(runs: Sequence[Inspected]) -> Columns:
    """Return the columns of the table, each with one value per sample of each run.

    The rows of a run are sorted by suspicion; samples without a loss are left out.

    Returns:
        ``run``, ``key`` (empty without keys), ``index`` (in the whole training set), ``label`` and
        ``suggestion`` (names of classes; empty for none), ``agreement``, ``score`` and
        ``times_skipped``.
    """
    parts: list[Columns] = []
    for run in runs:
        suspects, training_set = suspects_of(run), run.training_set()
        index = training_set.index[suspects.index]
        keys = training_set.keys or [""] * len(training_set.labels)
        classes = 1 + max(int(part.max(initial=0)) for part in (run.labels, suspects.suggestion))
        # The last name is that of the suggestion -1.
        named = np.array([*(training_set.name(number) for number in range(classes)), ""])
        parts.append(
            {
                "run": np.full(len(suspects), run.name),
                "key": np.array([keys[number] for number in index]),
                "index": index,
                "label": named[run.labels[suspects.index]],
                "suggestion": named[suspects.suggestion],
                "agreement": suspects.agreement,
                "score": suspects.score,
                "times_skipped": run.times_skipped()[suspects.index],
            }
        )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def write_csv(columns: Columns, path: Path) -> None:
    """Write the table as CSV, atomically."""
    file = io.StringIO(newline="")
    table = csv.writer(file, lineterminator="\n")
    table.writerow(columns)
    # tolist() gives Python's numbers, which are written in fewer digits than NumPy's.
    rounded = [
        np.round(values.astype(np.float64), 5) if values.dtype.kind == "f" else values
        for values in columns.values()
    ]
    table.writerows(zip(*(values.tolist() for values in rounded), strict=True))
    write_atomically(path, file.getvalue())


def write_parquet(columns: Columns, path: Path) -> None:
    """Write the table as Parquet, atomically."""
    check_installed("pyarrow", "pyarrow for --parquet", "parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(path) as file:
        pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), file)
