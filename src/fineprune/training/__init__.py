"""Training: recipes, the training loop, and the run folder that it writes."""
