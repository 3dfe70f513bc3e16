"""Experiments: comparisons at equal cost, and their statistics."""
