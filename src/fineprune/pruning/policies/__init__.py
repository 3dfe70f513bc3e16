"""Policies: which samples an epoch keeps. Each policy has its own file."""
