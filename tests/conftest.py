"""Fixtures that several test files share."""

import pytest


@pytest.fixture(scope="module")
def running_ray(request):
    """Ray with eight places, for a file's tests."""
    ray = pytest.importorskip("ray")
    from fineprune.distributed.parameter_servers.ray_cluster import ray_session

    # Workers do not import tests.
    ray.cloudpickle.register_pickle_by_value(request.module)
    with ray_session(8):
        yield
