"""The ``fineprune`` command, also as ``python -m fineprune``."""

import importlib.util
import os
import signal
import sys

# The modules of the extra ``cli``. All are needed by some command, and most are imported late.
_MODULES = (
    "typer",
    "rich",
    "matplotlib",
    "jinja2",
    "PIL",
    "scipy",
    "pooch",
    "filelock",
    "msgspec",
    "tomli_w",
)


def main() -> None:
    """Run the command line, or say what to install if a package of the extra ``cli`` is missing."""
    _open_streams()
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"fineprune: expected the packages of the command line, but {missing[0]} is not "
            f"installed: pip install 'fineprune[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        from fineprune.cli.main import main as run
    except KeyboardInterrupt:  # Importing takes a second or two.
        print("fineprune: stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    run()


def _open_streams() -> None:
    """Let nothing take the place of a standard stream that is closed, as after ``2>&-``.

    ``print`` would write to standard output instead, and the next file would have its number.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


if __name__ == "__main__":
    main()
