"""Figures as SVG: what a comparison showed, [P] Figures 1 and 2 for our runs, and the counts.

The figures are drawn with matplotlib's objects, without pyplot and without changing matplotlib's
global settings. The same runs give the same bytes. Text is written as text, not as paths.
"""
