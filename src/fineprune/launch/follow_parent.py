"""End this process when the one that started it ends, however that happens."""

import multiprocessing
import os
import threading
import time

PARENT_VARIABLE = "FINEPRUNE_PARENT"

_POLL_SECONDS = 0.2


def end_with_parent(parent: int) -> None:
    """Watch the parent process in the background, and end this process soon after it.

    If an experiment is killed, its processes must not go on training into a folder that its next
    start will use.
    """
    started_by = multiprocessing.parent_process()  # None unless multiprocessing started this one.

    def watch() -> None:
        # On Windows, the number of the parent stays the same when it has ended.
        while os.getppid() == parent and (started_by is None or started_by.is_alive()):
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


def follow_parent_if_told(*, elsewhere: bool = False) -> None:
    """Call ``end_with_parent`` if the parent asked for it through the environment.

    If it has died meanwhile, while this process imported torch, this process ends at once, unless
    the one that asked may be on another machine (``elsewhere``), where it cannot be seen from here.
    """
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))
    if parent == os.getppid():
        end_with_parent(parent)
    elif parent and not elsewhere and os.name != "nt":  # There, os.kill would send Ctrl-C.
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(1)
        except PermissionError:
            pass
