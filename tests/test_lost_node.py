"""A training in a Ray cluster that it joins goes on, exactly, if a node is lost."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("ray")

# Three nodes on one machine, one of which has no place to spare. The check is that of the kills.
TRAINING = """
import logging
import os
import sys
from pathlib import Path
import ray
import test_kills as kills
from ray.cluster_utils import Cluster
from fineprune.distributed.parameter_servers.start import parameter_servers
from fineprune.distributed.strategy import Strategy

ray.cloudpickle.register_pickle_by_value(kills)
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
lost, _ = (nodes.add_node(num_cpus=2) for _ in range(2))
os.environ["RAY_ADDRESS"] = nodes.address
strategy = Strategy("async", workers=4, servers=2, snapshot_every=5)
orders, watch, rows = kills.Orders(Path(sys.argv[1]) / "orders"), kills.Watch(), 20_000
with (
    kills.on_events(watch, logging.DEBUG),
    parameter_servers(strategy, kills.Model(rows), *kills.factories(rows, orders)) as training,
):
    training.wait_for_workers()
    lose = lambda: nodes.remove_node(lost, allow_graceful=False)
    watch.once(kills.EventKind.LEASED, kills.BatchKey(1, 10), lose)
    results = [training.run_epoch(e, kills.batches_of(e), kills.rate) for e in range(3)]
    kills.check(strategy, training, watch, results, rows, lost_node=True)
    print(sum(map(sum, map(watch.deaths_in, range(3)))))
nodes.shutdown()
"""


@pytest.mark.long
def test_a_lost_node_changes_nothing(tmp_path, preloaded_ray_workers):
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, tmp_path],
        env={
            **os.environ,
            **preloaded_ray_workers,
            "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 0
