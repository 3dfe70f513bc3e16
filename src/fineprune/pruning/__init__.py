"""The method: which samples an epoch trains on. It imports no other subpackage."""
