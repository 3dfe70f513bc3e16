"""The ``fineprune`` command, also as ``python -m fineprune``."""

import sys


def main() -> None:
    """Run the command line, or say what to install if a package of the extra ``cli`` is missing."""
    try:
        from fineprune.cli.main import main as run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "fineprune"):
            raise
        print(
            f"fineprune: expected the packages of the command line, but {missing} is not "
            f"installed: pip install 'fineprune[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
