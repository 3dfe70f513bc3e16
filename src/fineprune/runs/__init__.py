"""Runs on disk: writes, reads and checks the files of a run. Trains nothing."""
