"""The colour and the marker of each strategy, which are the same in every figure."""

from fineprune.report.figures.style import INK

COLOURS = {
    "one": INK,
    "all-reduce": "#0072b2",
    "sync": "#009e73",
    "async": "#d55e00",
    "mixed": "#cc79a7",
}
MARKERS = {"one": "s", "all-reduce": "^", "sync": "o", "async": "D", "mixed": "v"}

# The line styles that distinguish configurations with the same strategy in a figure.
DASHES = ("-", (0, (4, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))
