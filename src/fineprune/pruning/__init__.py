"""The method: which samples an epoch trains on. Needs torch and NumPy, and no other room."""
