"""Progress of long work: a bar on a terminal, plain lines elsewhere. On standard error."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Tell = Callable[[str, int, int], None]


@contextlib.contextmanager
def progress() -> Iterator[Tell]:
    """Yield a function of a line of text (or none), epochs done and epochs in all."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain
        return
    columns = (
        TextColumn("{task.completed} of {task.total} epochs"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("epochs", total=None)

        def tell(line: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if line:
                bar.console.print(line)

        yield tell


def _plain(line: str, done: int, total: int) -> None:
    if line:
        print(f"{done}/{total} epochs: {line}", file=sys.stderr, flush=True)
