"""Write the tables of measured figures into the pages, each from ``docs/results/NAME.json``.

    python docs/tables.py

A page says where with a line ``<!-- table NAME -->``, and ``<!-- end -->`` ends what is written. A
file has the ``columns`` (a format for each), the ``rows``, and where its figures come from. A list
in a row has the figure of each seed, None for a training that failed. The page shows their mean
and, if the format begins with ±, half the width of its 95 % interval.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fineprune.experiments.arm_table import mean_difference

DOCS = Path(__file__).resolve().parent
_PLACE = re.compile(r"(<!-- table (?P<name>[\w-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the text of a page with the tables that it names."""
    return _PLACE.sub(lambda place: place[1] + _table(place["name"]), page)


def _table(name: str) -> str:
    known = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    columns: Mapping[str, str] = known["columns"]
    lines = [[header.strip() for header in columns]]
    lines.append(["---:" if form else "---" for form in columns.values()])
    for row in known["rows"]:
        cells = zip(row, columns.values(), strict=True)
        lines.append([_cell(value, form) for value, form in cells])
    source = [known[key] for key in ("setting", "hardware") if key in known]
    source.append(f"commit {known['commit']}")
    parts = ["\n".join(f"| {' | '.join(line)} |" for line in lines), f"*{'; '.join(source)}.*"]
    if "command" in known:
        parts.append(f"```\n{known['command']}\n```")
    return "\n" + "\n\n".join(parts) + "\n\n"


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    interval, form = form.startswith("±"), form.removeprefix("±")
    if not isinstance(value, list):
        return format(value, form)
    seeds = [seed for seed in value if seed is not None]
    failed = f"{len(value) - len(seeds)} of {len(value)} failed" if len(seeds) < len(value) else ""
    if not seeds:
        return failed
    mean = mean_difference(seeds)
    shown = format(mean.mean, form)
    if interval and mean.half_width is not None:
        shown += f" ±{format(mean.half_width, form.lstrip('+'))}"
    return f"{shown}, {failed}" if failed else shown


def main() -> int:
    """Rewrite the pages, and return 1 if one has changed."""
    changed = 0
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        written = with_tables(page)
        if written != page:
            path.write_text(written, encoding="utf-8")
            print(f"{path} had another table than its file, and has been rewritten")
            changed = 1
    return changed


if __name__ == "__main__":
    sys.exit(main())
