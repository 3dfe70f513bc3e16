"""The command line: it parses, calls and prints. Each verb has a file of its own."""
