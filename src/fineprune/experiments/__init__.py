"""Experiments: comparisons at equal cost, scaling experiments, and their statistics."""
