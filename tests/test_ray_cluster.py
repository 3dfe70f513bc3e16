"""What a Ray that training starts by itself lets in: nothing from outside."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

# It prints the addresses at which it and its children listen, as Linux writes them.
LISTENERS = """
import os
from pathlib import Path
from fineprune.distributed.parameter_servers.ray_cluster import Places, cluster
from fineprune.distributed.parameter_servers.link import open_store

def family(process):
    children = (Path("/proc") / str(process) / "task").glob("*/children")
    return [process] + [p for file in children for c in file.read_text().split() for p in family(c)]

def sockets(process):
    try:
        links = [os.readlink(fd) for fd in (Path("/proc") / str(process) / "fd").iterdir()]
    except FileNotFoundError:  # it has ended
        return set()
    return {link[8:-1] for link in links if link.startswith("socket:[")}

with cluster(Places(groups=1)) as places:
    store = open_store(places.host)
    ours = set().union(*map(sockets, family(os.getpid())))
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in ours:
                print(words[1].partition(":")[0])
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc/net")
def test_nothing_listens_beyond_loopback():
    done = subprocess.run([sys.executable, "-c", LISTENERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    addresses = done.stdout.split()
    assert len(addresses) > 4  # the driver's, its store's, and Ray's own processes'
    assert set(addresses) <= LOOPBACK
