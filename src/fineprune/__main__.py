"""``python -m fineprune``."""

from fineprune.cli.main import main

if __name__ == "__main__":
    main()
