"""The command line: parses, calls and prints. One verb a file."""
