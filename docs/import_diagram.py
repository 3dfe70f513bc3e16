"""Draw which subpackage imports which, from the source itself, as an SVG file.

    python docs/import_diagram.py docs/images/imports.svg

A subpackage stands above everything that it imports. The number at an arrow says how many modules
import; top-level modules such as ``errors`` are left out, since everything may import them.
"""

import argparse
import ast
from collections import Counter
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

PACKAGE = "fineprune"
WIDTH, ROW = 9.0, 1.15
BOX, LINE = "#e8f0f7", "#4a6a85"


def imports(source: Path) -> Counter[tuple[str, str]]:
    """Count the modules of each subpackage that import from each other subpackage."""
    root = source / PACKAGE
    rooms = {path.name for path in root.iterdir() if (path / "__init__.py").exists()}
    edges: Counter[tuple[str, str]] = Counter()
    for file in sorted(root.rglob("*.py")):
        own = file.relative_to(root).parts[0]
        if own not in rooms:
            continue
        found = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                package, _, rest = name.partition(".")
                target = rest.partition(".")[0]
                if package == PACKAGE and target in rooms and target != own:
                    found.add(target)
        edges.update((own, target) for target in found)
    return edges


def layers(edges: Counter[tuple[str, str]]) -> list[list[str]]:
    """Place each subpackage one layer above the highest one that it imports; the last is lowest.

    Raises:
        ValueError: Subpackages import each other in a circle.
    """
    names = sorted({name for edge in edges for name in edge})
    height = dict.fromkeys(names, 0)
    for _ in names:
        for one, other in edges:
            height[one] = max(height[one], height[other] + 1)
    if max(height.values()) >= len(names):
        raise ValueError("expected no circle of imports, got one")
    return [
        [name for name in names if height[name] == level]
        for level in range(max(height.values()), -1, -1)
    ]


def draw(edges: Counter[tuple[str, str]], out: Path) -> None:
    """Write the diagram as SVG, the same file for the same imports."""
    rows = layers(edges)
    place = {}
    for level, row in enumerate(rows):
        for number, name in enumerate(row):
            place[name] = (WIDTH * (number + 1) / (len(row) + 1), -ROW * level)
    with matplotlib.rc_context(
        {"svg.hashsalt": "imports", "svg.fonttype": "none", "font.family": "sans-serif"}
    ):
        figure = Figure((WIDTH, ROW * len(rows)))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, WIDTH)
        axes.set_ylim(-ROW * len(rows) + ROW / 2, ROW / 2)
        for (one, other), number in sorted(edges.items()):
            start, end = place[one], place[other]
            # Arrows that pass a layer bend around what stands there.
            bend = 0.0 if start[1] - end[1] <= ROW else 0.12 * (1 if end[0] >= WIDTH / 2 else -1)
            arrow = FancyArrowPatch(
                start,
                end,
                arrowstyle="-|>",
                mutation_scale=9,
                shrinkA=16,
                shrinkB=16,
                connectionstyle=f"arc3,rad={bend}",
                color=LINE,
                linewidth=0.5 + number / 8,
                alpha=0.7,
            )
            axes.add_patch(arrow)
        for name, (x, y) in place.items():
            box = {"boxstyle": "round,pad=0.45", "facecolor": BOX, "edgecolor": LINE}
            axes.text(x, y, name, ha="center", va="center", bbox=box, fontsize=10, zorder=3)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the SVG file to write")
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    options = parser.parse_args()
    edges = imports(options.source)
    draw(edges, options.out)
    for (one, other), number in sorted(edges.items()):
        print(f"{one} -> {other}: {number} modules")


if __name__ == "__main__":
    main()
