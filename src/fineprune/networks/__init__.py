"""Networks by name. One family a file."""
