"""A run on disk: its folder, its files, and whether they belong together. Trains nothing."""
