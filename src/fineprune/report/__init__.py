"""Reports: tables, figures and pages, from finished runs on disk. Trains nothing."""
