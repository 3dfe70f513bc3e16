"""Image sets in memory, and batches of them that are made on the device."""
