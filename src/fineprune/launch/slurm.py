"""Batch scripts for Slurm: three templates, filled in. And torchrun in a job of several nodes."""

import os
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2

from fineprune.errors import InputError, check_at_least

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
    out: Path,
    *,
    kind: str,
    nodes: int,
    gpus: int = 0,
    cpus: int | None = None,
    time: str | None = None,
    name: str = "fineprune",
    setup: Sequence[str] = (),
) -> str:
    """Return the text of a batch script for ``sbatch``.

    Slurm itself checks what it is asked for; its other options can be given to ``sbatch``.

    Args:
        command: The arguments of Python, such as ``-m fineprune train ...``.
        out: The folder of the job's log. The job creates it.
        kind: One of ``KINDS``.
        nodes: The number of nodes. Each node runs one Slurm task, which starts its processes.
        gpus: The number of GPUs per node, and with torchrun of its processes; 0 to train on CPUs.
        cpus: The number of CPUs per node; by default one for each process, and one more with Ray.
        time: The time limit in a form that Slurm accepts; by default that of the partition.
        name: The name of the job.
        setup: Lines of shell that run before the command, such as ``source venv/bin/activate``.
    """
    check_at_least("nodes", nodes, 1)
    check_at_least("gpus", gpus, 0)
    if kind == "one" and nodes > 1:
        raise InputError(f"expected one node for a single process, got {nodes}")
    processes = gpus or 1
    cpus = processes + (kind == "ray") if cpus is None else cpus
    check_at_least("cpus", cpus, 1)
    # Slurm's forms: M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
    if time is not None and not re.fullmatch(
        r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}", time
    ):
        raise InputError(
            f"expected time in a form that Slurm accepts, such as 90 (minutes), 24:00:00 or 2-12, "
            f"got {time!r}"
        )
    for line in (name, *setup):
        if "\n" in line:
            raise InputError(f"expected one line, got {line!r}: give --setup once for each line")
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
        out=str(out),
        nodes=nodes,
        gpus=gpus,
        cpus=cpus,
        processes=processes,
        threads=max(1, cpus // processes),
        time=time,
        name=name,
        setup=setup,
        torchrun=_TORCHRUN.format("torchrun"),
    )


def torchrun_in_job(nodes: int, processes: int) -> list[str] | None:
    """Return the command that starts ``torchrun`` on the first ``nodes`` of this process's job.

    This process runs on the job's first node, as a command of ``batch_script`` does. The arguments
    for ``torchrun`` that are appended to the command are those of the program.

    Returns:
        The command; None if this process is not in a job of several nodes.
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
        *step,
        *("bash", "-c", start, sys.executable),
        f"--nnodes={nodes}",
        f"--nproc-per-node={processes}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={job.get('SLURM_JOB_ID', 'job')}-{port}",
        f"--rdzv-endpoint={host}:{port}",
    ]
