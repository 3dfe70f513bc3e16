"""Tables of results: printed in Markdown, and written as ``docs/tables.py`` reads them."""

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fineprune.training.hardware import describe


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table of text, of which the first columns are aligned to the left."""
    marks = [*["---"] * left, *["---:"] * (len(headers) - left)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [headers, marks, *rows])


def write(
    path: Path,
    setting: str,
    command: str,
    columns: Mapping[str, str],
    rows: Iterable[Sequence[Any]],
) -> None:
    """Write a table with the machine and the commit that made it, one row per line."""
    machine = describe("cpu", torch.get_num_threads())
    git = ["git", "describe", "--always", "--dirty"]
    about = {
        "setting": setting,
        "hardware": f"{machine.threads} of {machine.cores} cores of an {machine.cpu}, torch "
        f"{torch.__version__}",
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown",
        "command": command,
        "columns": columns,
    }
    head = json.dumps(about, indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
