"""What finished runs say of their samples: read from their folders, without training."""
