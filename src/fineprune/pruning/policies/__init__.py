"""Policies: what an epoch keeps. One policy a file."""
