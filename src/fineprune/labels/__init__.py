"""Which labels are probably wrong: evidence that a training leaves behind, and its ranking."""
