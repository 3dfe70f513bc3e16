"""Batch scripts for Slurm: three templates, filled in. And torchrun in a job of several nodes."""

import os
import shlex
import socket
import sys
from collections.abc import Sequence

import jinja2

from fineprune.errors import InputError

# What runs the command: every process of torchrun, the first node of a Ray cluster, or one process.
KINDS = ("all-reduce", "ray", "one")

# Starts torchrun on a node, after the words that come before its arguments. Each node gives its own
# address, at which all ranks meet if it has rank 0: its host name may not resolve on other nodes.
# The rank determines the host, because torchrun's guess is wrong if that name means 127.0.1.1.
_TORCHRUN = (
    '[[ "$(scontrol show node "$SLURMD_NODENAME")" =~ NodeAddr=([^[:space:]]+) ]]; '
    'exec {} --local-addr="${{BASH_REMATCH[1]}}" --rdzv-conf is_host=$((SLURM_NODEID == 0)) "$@"'
)


def batch_script(
    command: Sequence[str],
    *,
    kind: str,
    nodes: int,
    gpus: int = 0,
    cpus: int | None = None,
    setup: Sequence[str] = (),
) -> str:
    """Return the text of a batch script for ``sbatch``, to which its other options can be given.

    Args:
        command: The arguments of Python, such as ``-m fineprune train ...``.
        kind: One of ``KINDS``.
        nodes: The number of nodes. Each node runs one Slurm task, which starts its processes.
        gpus: The number of GPUs per node, and with torchrun of its processes; 0 to train on CPUs.
        cpus: The number of CPUs per node; by default one for each process, and one more with Ray.
        setup: Lines of shell that run before the command, such as ``source venv/bin/activate``.
    """
    if kind == "one" and nodes > 1:
        raise InputError(f"expected one node for a single process, got {nodes}")
    processes = gpus or 1
    cpus = cpus or processes + (kind == "ray")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fineprune.launch", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(quote=shlex.quote, join_quoted=shlex.join)
    return environment.get_template(f"{kind}.sh.j2").render(
        command=command,
        nodes=nodes,
        gpus=gpus,
        cpus=cpus,
        processes=processes,
        threads=max(1, cpus // processes),
        setup=setup,
        torchrun=_TORCHRUN.format("torchrun"),
    )


def torchrun_in_job(nodes: int, processes: int) -> list[str] | None:
    """Return the command that starts ``torchrun`` on the first ``nodes`` of this process's job.

    This process runs on the job's first node, as a command of ``batch_script`` does. The program
    and its arguments are appended. None if this process is not in a job of several nodes.
    """
    job = os.environ
    available = int(job.get("SLURM_JOB_NUM_NODES", "1"))
    if available == 1:
        return None
    if nodes > available:
        raise InputError(
            f"expected all-reduce on at most the {available} nodes of the job, got {nodes} nodes: "
            f"give group=, the number of processes per node, or ask for more nodes"
        )
    host = job.get("RAY_ADDRESS", "").rpartition(":")[0] or socket.gethostname()
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    step = ["srun", "--overlap", "--relative=0", f"--nodes={nodes}", "--ntasks-per-node=1"]
    step += ["--export=ALL", "--kill-on-bad-exit=1"]
    for name in ("CPUS_PER_TASK", "GPUS_PER_NODE"):
        if value := job.get(f"SLURM_{name}"):
            step.append(f"--{name.lower().replace('_', '-')}={value}")
    start = _TORCHRUN.format('"$0" -m fineprune.launch.torchrun')
    return [
        *(*step, "bash", "-c", start, sys.executable),
        *(f"--nnodes={nodes}", f"--nproc-per-node={processes}", "--rdzv-backend=c10d"),
        f"--rdzv-id={job.get('SLURM_JOB_ID', 'job')}-{port}",
        f"--rdzv-endpoint={host}:{port}",
    ]
