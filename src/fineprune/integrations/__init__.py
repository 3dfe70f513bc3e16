"""The pruning inside the trainers of other packages. Nothing else of fineprune imports these."""
