"""Trains several runs of a comparison at the same time, each in a process of its own."""

import concurrent.futures
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures.process import BrokenProcessPool

from fineprune.errors import RunError
from fineprune.experiments.controls import NothingSkipped
from fineprune.experiments.cooldowns import train_trunk
from fineprune.experiments.planned_run import PlannedRun
from fineprune.interrupts import blocked
from fineprune.launch.follow_parent import end_with_parent
from fineprune.training.epoch_metrics import TrainingDiverged
from fineprune.training.stop import stop_requests

_POLL_SECONDS = 0.5


def train_runs(
    runs: Sequence[PlannedRun],
    jobs: int,
    on_poll: Callable[[], None],
    *,
    later: int = 0,
    may_skip_nothing: bool = False,
) -> Iterator[tuple[PlannedRun, TrainingDiverged | None]]:
    """Train the runs in separate processes, and yield each run when it is finished.

    A run that diverges is yielded unfinished, with the error. One that needs it is not trained, and
    is yielded unfinished.

    A run starts as soon as a process is free, in the given order. A run that needs another one, as
    ``PlannedRun.needs`` says, starts after it; until then, the runs behind it come first.

    Args:
        runs: The runs, none of which is finished.
        jobs: The number of runs that train at the same time and share the cores equally.
        on_poll: Called every fraction of a second while runs train.
        later: The number of runs that the caller trains after these, for the message of
            ``Stopped``.
        may_skip_nothing: Whether a run may have skipped nothing, so that its control is not
            trained, and is yielded unfinished.
    """
    # Spawned processes do not inherit the memory and the threads of this process.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=context, initializer=end_with_parent, initargs=(os.getpid(),)
    )
    waiting = list(runs)
    training: dict[Future[None], PlannedRun] = {}
    with stop_requests() as stop:

        def check_stop() -> None:
            stop.check(f"with {len(waiting) + len(training) + later} runs to go")

        try:
            while waiting or training:
                unfinished = {run.folder for run in (*waiting, *training.values())}
                ready = [
                    run
                    for run in waiting
                    if (first := run.needs) is None or first.folder not in unfinished
                ]
                for run in ready[: jobs - len(training)]:
                    waiting.remove(run)
                    if run.matches is not None and run.finished():
                        yield run, None  # Only its method had to be trained again.
                        continue
                    try:
                        recipe = run.complete()
                    except NothingSkipped:
                        if not may_skip_nothing:
                            raise
                        recipe = None
                    # The trunk may have diverged before a cooldown began.
                    begun = run.trunk is None or run.trunk.finished() or run.folder.exists()
                    begun = begun and (run.first is None or run.first.finished())
                    if recipe is None or not begun:
                        yield run, None
                        continue
                    copies = [
                        (other.folder, other.recipe)
                        for other in waiting
                        if other.trunk is not None and other.trunk.folder == run.folder
                    ]
                    # SIGTERM ends the process. At Ctrl-C, it would print a traceback if it is
                    # still importing.
                    with blocked([signal.SIGINT]):
                        future = pool.submit(train_trunk, recipe, run.folder, jobs, copies)
                    training[future] = run
                done, _ = concurrent.futures.wait(
                    training, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED
                )
                for future in done:
                    error = future.exception()
                    if error is not None and not isinstance(error, TrainingDiverged):
                        raise error
                    yield training.pop(future), error
                on_poll()
                check_stop()
            pool.shutdown()
        except BrokenProcessPool:
            check_stop()  # A signal to the whole group kills a process that is just starting.
            raise RunError(
                "the process of a run was killed, perhaps because memory ran out: run the same "
                "command again to continue"
            ) from None
        finally:
            # A terminated run writes a checkpoint before its process ends.
            pool.shutdown(wait=False, cancel_futures=True)
            started = set(multiprocessing.active_children()) - others
            for process in started:
                process.terminate()
            for process in started:
                # It notes the signal while it trains. Afterwards, it may wait for ever for its next
                # run, since another process was terminated while it had the lock of the queue.
                while process.is_alive():
                    process.terminate()
                    process.join(_POLL_SECONDS)
