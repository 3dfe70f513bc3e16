"""Networks by name. Each family has a file of its own."""
