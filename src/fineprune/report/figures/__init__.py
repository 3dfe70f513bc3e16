"""Figures as SVG: what a comparison or a scaling experiment showed, as in the papers' figures."""
