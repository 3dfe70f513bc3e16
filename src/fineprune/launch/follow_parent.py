"""End this process when the one that started it ends, however that happens."""

import multiprocessing
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
    started_by = multiprocessing.parent_process()  # None unless multiprocessing started this one.

    def watch() -> None:
        # On Windows, the number of the parent stays the same when it has ended.
        while os.getppid() == parent and (started_by is None or started_by.is_alive()):
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


def follow_parent_if_told(*, elsewhere: bool = False) -> None:
    """Call ``end_with_parent`` if the parent asked for it through the environment.

    If the parent has died meanwhile, while this process imported torch, this process ends at once.

    Args:
        elsewhere: Whether the process that asked may be on another machine, where it cannot be
            seen from here.
    """
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))
    if parent == os.getppid():
        end_with_parent(parent)
    elif parent and not elsewhere and not _exists(parent):
        os._exit(1)


def _exists(process: int) -> bool:
    if os.name == "nt":
        return True  # There, os.kill would send Ctrl-C.
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
