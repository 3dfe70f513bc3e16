"""What the samples of finished runs have in common: read from their histories, without training."""
