"""Fixtures and settings that several test files share."""

import contextlib
import multiprocessing.spawn
import os
import shlex
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from preloaded_python import for_ray_workers, preloaded_python, waiting

# For torch, which is imported later, and for processes that tests start. Several processes with
# several threads each would mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray reads it when it is imported, which tests do before fineprune does.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

# Hypothesis fails a slow example by default. How long one takes says more about the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# The files that take longest, because they start many processes. They are run first, so that the
# processes of pytest end at about the same time.
_LONGEST = (
    "test_kills",
    "test_parameter_servers",
    "test_cli",
    "test_compare",
    "test_all_reduce",
    "test_scale",
    "test_ray_session",
    "test_epoch_served",
    "test_slurm",
    "test_lightning",
    "test_tuning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first, and leave the others in their order."""
    place = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(_LONGEST)))


@pytest.fixture(scope="session")
def preloaded():
    """The command of a Python that has imported torch."""
    if sys.platform != "linux":
        pytest.skip("preloaded_python.py runs on Linux")
    # Not in pytest's folder, because the path of a socket has at most 107 bytes.
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        preloaded_python(Path(folder)) as command,
    ):
        yield command


@pytest.fixture(scope="session")
def python(request):
    """The command of a Python, as a list: one that has imported torch already, if possible.

    Programs that it runs are processes of another session than the command.
    """
    if sys.platform != "linux":
        return [sys.executable]
    return waiting(request.getfixturevalue("preloaded"))


@pytest.fixture(scope="session")
def python_file(python, tmp_path_factory):
    """The same Python as a file, for those who start it by its path."""
    file = tmp_path_factory.mktemp("python") / "python"
    file.write_text(f'#!/bin/sh\nexec {shlex.join(python)} "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.fixture(scope="module")
def fast_spawn(python_file):
    """Lets ``multiprocessing`` and experiments start processes in the Python with torch."""
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(python_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python_file)
        yield
    multiprocessing.set_executable(before)


@pytest.fixture(scope="module")
def spawned(fast_spawn, tmp_path_factory):
    """Runs ``ranks(rank, folder)`` in as many processes, and returns what each saved there."""
    import torch  # not above, because the process that distributes the tests does not need it
    from torch.multiprocessing.spawn import spawn

    def run(ranks, number):
        folder = tmp_path_factory.mktemp("ranks")
        spawn(ranks, args=(folder,), nprocs=number)
        return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(number)]

    return run


@pytest.fixture
def fast_runs(python_file, preloaded_ray_workers, monkeypatch):
    """Lets commands start their runs, ranks and workers in the Python that has imported torch."""
    monkeypatch.setattr(sys, "executable", python_file)
    monkeypatch.setenv("PYTHON_EXEC", python_file)  # for torchrun
    for name, value in preloaded_ray_workers.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def one_thread_everywhere():
    """One thread for torch, also in processes that tests start: results are then equal bits."""
    import torch  # not above, because the process that distributes the tests does not need it

    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(before)


@pytest.fixture
def short_folder():
    """A folder whose name is short enough for the names of sockets in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@pytest.fixture(scope="session")
def preloaded_ray_workers(request):
    """Environment variables of a Ray whose workers need not import torch, if that is possible."""
    if sys.platform != "linux":
        return {}
    return for_ray_workers(request.getfixturevalue("preloaded"))


@pytest.fixture(scope="module")
def running_ray(request, preloaded_ray_workers):
    """Ray with eight places, for a file's tests."""
    ray = pytest.importorskip("ray")
    from fineprune.distributed.parameter_servers.ray_session import ray_session

    # Workers do not import tests.
    ray.cloudpickle.register_pickle_by_value(request.module)
    with contextlib.ExitStack() as stack:
        # Commands that tests start have a Ray of their own, whose workers start as usual.
        with pytest.MonkeyPatch.context() as patch:
            for name, value in preloaded_ray_workers.items():
                patch.setenv(name, value)
            stack.enter_context(ray_session(8))
        yield
