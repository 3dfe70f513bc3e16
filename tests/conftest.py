"""Fixtures and settings that several test files share."""

import pytest
from hypothesis import settings

# Hypothesis fails a slow example by default. How long one takes says more about the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# The files that take longest, because they start many processes. They are run first, so that both
# processes of pytest end at about the same time.
_LONGEST = (
    "test_kills",
    "test_coordinator",
    "test_epoch_served",
    "test_cli",
    "test_killed_runs",
    "test_compare",
    "test_all_reduce",
    "test_scale",
    "test_ray_cluster",
    "test_benchmarks",
    "test_slurm",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first, and leave the others in their order."""
    place = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(_LONGEST)))


@pytest.fixture(scope="module")
def running_ray(request):
    """Ray with eight places, for a file's tests."""
    ray = pytest.importorskip("ray")
    from fineprune.distributed.parameter_servers.ray_cluster import ray_session

    # Workers do not import tests.
    ray.cloudpickle.register_pickle_by_value(request.module)
    with ray_session(8):
        yield
