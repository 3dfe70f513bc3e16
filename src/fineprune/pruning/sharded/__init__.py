"""The form for a billion samples: each rank owns a part of the samples and their counts."""
