"""Training: a recipe, one readable loop, and the run folder it leaves."""
