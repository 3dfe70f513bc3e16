"""Reports: tables, figures and HTML pages, made from finished runs on disk. Trains nothing."""
