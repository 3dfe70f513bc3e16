"""Fixtures and settings that several test files share."""

import pytest
from hypothesis import settings

# Hypothesis fails a slow example by default. How long one takes says more about the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="module")
def running_ray(request):
    """Ray with eight places, for a file's tests."""
    ray = pytest.importorskip("ray")
    from fineprune.distributed.parameter_servers.ray_cluster import ray_session

    # Workers do not import tests.
    ray.cloudpickle.register_pickle_by_value(request.module)
    with ray_session(8):
        yield
