"""Draw which subpackage imports which, from the source itself, as an SVG file.

    python docs/import_diagram.py docs/images/imports.svg

Each subpackage stands above and to the left of everything that it imports. Its line runs to the
right, and turns down at each subpackage that it imports. Modules at the top level, such as
``errors``, are left out. The same imports give the same file.
"""

import argparse
import ast
import functools
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "fineprune"
SOURCE = Path(__file__).resolve().parents[1] / "src"

COLUMN, ROW = 106, 62  # The distances between the centres of two boxes, in pixels.
WIDTH, HEIGHT = 94, 32  # The size of a box.
MARGIN, RADIUS = 14, 14
LINE, BORDER, FILL, TEXT = "#4a6a85", "#3b4654", "#eef2f7", "#1c2430"


@functools.cache  # the tests ask often
def imported_modules(file: Path) -> set[str]:
    """Return the full names of all modules that a file may import, anywhere in it.

    For ``from a import b``, this is ``a.b``, which may be a module or a name in the module ``a``.

    Raises:
        ValueError: An import is relative.
    """
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                raise ValueError(f"expected absolute imports, got a relative one in {file}")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def subpackages(source: Path = SOURCE) -> list[str]:
    """Return the names of all subpackages, sorted."""
    return sorted(file.parent.name for file in (source / PACKAGE).glob("*/__init__.py"))


def imports(source: Path = SOURCE) -> dict[str, set[str]]:
    """Return which other subpackages each subpackage imports."""
    names = subpackages(source)
    graph = {}
    for name in names:
        graph[name] = {
            target
            for file in (source / PACKAGE / name).rglob("*.py")
            for module in imported_modules(file)
            for target in names
            if f"{module}.".startswith(f"{PACKAGE}.{target}.") and target != name
        }
    return graph


def in_order(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the subpackages in an order in which each precedes all that it imports.

    Raises:
        graphlib.CycleError: Subpackages import each other in a cycle.
    """
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), reverse=True)
        order += ready
        sorter.done(*ready)
    return order[::-1]


def svg(graph: Mapping[str, set[str]]) -> str:
    """Draw the imports; the subpackages that import nothing share the last row."""
    order = in_order(graph)
    rows = [name for name in order if graph[name]]
    columns = rows + [name for name in order if not graph[name]]
    x = {name: MARGIN + WIDTH // 2 + COLUMN * place for place, name in enumerate(columns)}
    y = {name: MARGIN + HEIGHT // 2 + ROW * rows.index(name) for name in rows}
    last = MARGIN + HEIGHT // 2 + ROW * len(rows)
    y |= {name: last for name in columns if name not in rows}
    width, height = max(x.values()) + WIDTH // 2 + MARGIN, last + HEIGHT // 2 + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="sans-serif" font-size="13">',
        "<title>Which subpackage imports which</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for name in columns:
        lines += _arrows(x, y, name, [one for one in rows if name in graph[one]])
    for name in columns:
        lines.append(
            f'<rect x="{x[name] - WIDTH // 2}" y="{y[name] - HEIGHT // 2}" width="{WIDTH}" '
            f'height="{HEIGHT}" rx="6" fill="{FILL}" stroke="{BORDER}"/>'
        )
        lines.append(
            f'<text x="{x[name]}" y="{y[name] + 4}" text-anchor="middle" fill="{TEXT}">{name}'
            f"</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def _arrows(
    x: Mapping[str, int], y: Mapping[str, int], name: str, importers: list[str]
) -> Iterator[str]:
    """Yield a line from each importer; the lines join above the box ``name`` and end at its top."""
    top = y[name] - HEIGHT // 2
    for one in importers:
        yield (
            f'<path d="M{x[one] + WIDTH // 2} {y[one]} H{x[name] - RADIUS} '
            f'Q{x[name]} {y[one]} {x[name]} {y[one] + RADIUS} V{top - 6}" '
            f'fill="none" stroke="{LINE}" stroke-width="1.5"/>'
        )
    if importers:
        yield f'<path d="M{x[name]} {top} l-5 -9 h10 z" fill="{LINE}"/>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the SVG file to write")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(svg(imports()), encoding="utf-8")


if __name__ == "__main__":
    main()
