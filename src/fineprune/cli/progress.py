"""Progress of long operations on standard error: a bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator

Update = Callable[[str, int, int], None]


@contextlib.contextmanager
def progress() -> Iterator[Update]:
    """Yield a function to call with a line of text, the epochs done and the number of all epochs.

    The line may be empty. The bar appears with the first call, so that a download or an error
    before it has the terminal to itself.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    console = Console(stderr=True, markup=False, emoji=False)
    if not console.is_terminal:
        yield _plain
        return
    columns = ("{task.completed} of {task.total} epochs", BarColumn(), TaskProgressColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task("epochs", total=None)

    def update(line: str, done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        bar.start()
        if line:
            bar.console.print(line)

    try:
        yield update
    finally:
        bar.stop()


def _plain(line: str, done: int, total: int) -> None:
    if line:
        print(f"{done}/{total} epochs: {line}", file=sys.stderr, flush=True)
