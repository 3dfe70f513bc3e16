"""The report of ``fineprune scale``: [D] Tables 1 to 3 and Figures 1 to 3, for our runs."""
