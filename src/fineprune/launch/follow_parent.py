"""End this process when the one that started it ends, however that happens."""

import os
import threading
import time

PARENT_VARIABLE = "FINEPRUNE_PARENT"

_POLL_SECONDS = 0.2


def end_with_parent(parent: int) -> None:
    """Watch the parent process in the background, and end this process soon after it.

    For processes that an experiment starts: if the experiment is killed, they must not go on
    training into a folder that its next start will use.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


def follow_parent_if_told() -> None:
    """Call ``end_with_parent`` if the parent asked for it through the environment."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and int(parent) == os.getppid():
        end_with_parent(int(parent))
