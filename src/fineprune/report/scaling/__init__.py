"""The report of ``fineprune scale``: the second paper's Tables 1 to 3 and Figures 1 to 3, ours."""
