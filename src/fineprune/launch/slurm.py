"""Batch scripts for Slurm: one Python command, started on every node of a job."""

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from fineprune.errors import InputError

STRATEGIES = ("all-reduce", "sync", "async", "mixed")

# Below Linux's ephemeral ports and above those that Ray's workers take by default.
_FIRST_PORT, _PORTS = 20_000, 10_000

# Slurm's own forms: M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
_TIME = re.compile(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+@-]*")


def train_command(recipe: Path, out: Path, changes: Iterable[str] = ()) -> list[str]:
    """Return the arguments of Python that train a recipe, or go on with it, in a job.

    Args:
        recipe: the recipe's file, as the nodes see it.
        out: run folder, as the nodes see it. ``--resume`` starts afresh where it holds no
            checkpoint, so the same command serves the first start and every later one.
        changes: ``section.key=value`` each.
    """
    command = ["-m", "fineprune", "train", str(recipe), "--out", str(out), "--resume"]
    for change in changes:
        command += ["--set", change]
    return command


def fit_servers(
    nodes: int,
    *,
    workers: int,
    group: int = 1,
    dedicated: int = 0,
    threads: int = 0,
    on_gpus: bool = False,
    gpus_per_node: int = 0,
    cpus_per_task: int | None = None,
) -> tuple[int, int]:
    """Check that a training with servers fits a job's nodes, as Ray spreads it over them.

    Args:
        nodes: of the job.
        workers: replicas of the network.
        group: of them, all on one node.
        dedicated: servers that have CPUs of their own; 0 where they share the workers'.
        threads: CPUs of each worker and dedicated server; 0 for as many as there is room for.
        on_gpus: whether each worker takes a GPU.
        gpus_per_node: of each node.
        cpus_per_task: of each node; by default what its processes take, and one more for the
            driver and for servers that share.

    Returns:
        CPUs of a node, and threads of each process.

    Raises:
        InputError: it does not fit.
    """
    _at_least("nodes", nodes, 1)
    if workers // group + dedicated < nodes:
        fewest = (nodes - dedicated) * group
        servers = f" and {dedicated} dedicated servers" if dedicated else ""
        raise InputError(
            f"expected work for all {nodes} nodes, got {workers} workers in groups of "
            f"{group}{servers}: ask for fewer nodes, or --set distributed.workers={fewest}"
        )
    # Each next one goes to the node with the most room, and a group is not split.
    processes = [0] * nodes
    for size in [group] * (workers // group) + [1] * dedicated:
        processes[processes.index(min(processes))] += size
    most = max(processes)
    gpus = -(-(workers // group) // nodes) * group if on_gpus else 0
    if gpus > gpus_per_node:
        raise InputError(
            f"expected {gpus} GPUs a node, one for each of its workers, got {gpus_per_node}: ask "
            f"for more GPUs or nodes, for fewer distributed.workers, or --set run.device=cpu"
        )
    least = most * max(1, threads)
    cpus = least + 1 if cpus_per_task is None else cpus_per_task
    if cpus < least:
        raise InputError(
            f"expected {least} CPUs a node, {max(1, threads)} for each of its {most} processes, "
            f"got {cpus}: ask for more CPUs or nodes, or for fewer distributed.workers or "
            f"run.threads"
        )
    return cpus, threads or max(1, (cpus - 1) // most)


def batch_script(
    command: Sequence[str],
    out: Path,
    *,
    nodes: int,
    strategy: str = "all-reduce",
    processes_per_node: int | None = None,
    gpus_per_node: int = 0,
    cpus_per_task: int | None = None,
    time: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    job_name: str = "fineprune",
    setup: Sequence[str] = (),
) -> str:
    """Return the text of a batch script for ``sbatch``.

    Args:
        command: arguments of Python: ``-m fineprune train ...`` (``train_command``), or a script of
            your own and its arguments.
        out: folder for the job's log, made by the job.
        nodes: how many; each gets one Slurm task, which starts the node's processes.
        strategy: ``all-reduce`` runs the command in every process of ``torchrun``; ``sync``,
            ``async`` and ``mixed`` run it once, on the first node of a Ray cluster over all nodes.
        processes_per_node: of ``torchrun``; by default one for each GPU, or one. With servers, the
            recipe says how many workers there are.
        gpus_per_node: 0 to train on CPUs.
        cpus_per_task: CPUs of a node, for all its processes; by default one for each process, and
            one for a server.
        time: limit in one of Slurm's forms, ``24:00:00`` or ``2-12``; by default the partition's.
        partition: by default the cluster's.
        account: by default the user's.
        job_name: letters, digits and ``_.,+@-``.
        setup: lines of shell that run once, before anything else: ``module load cuda``,
            ``source venv/bin/activate``. They are taken as they are.

    Raises:
        InputError: a setting is wrong.
    """
    if strategy not in STRATEGIES:
        raise InputError(
            f"expected strategy to be one of {', '.join(STRATEGIES)}, got {strategy!r}"
        )
    _at_least("nodes", nodes, 1)
    _at_least("gpus_per_node", gpus_per_node, 0)
    processes = _processes(strategy, processes_per_node, gpus_per_node)
    servers = 0 if strategy == "all-reduce" else 1
    cpus = processes + servers if cpus_per_task is None else cpus_per_task
    _at_least("cpus_per_task", cpus, 1)
    if time is not None and not _TIME.fullmatch(time):
        raise InputError(
            f"expected time in a form of Slurm's, such as 90 (minutes), 24:00:00 or 2-12, "
            f"got {time!r}"
        )
    for what, name in (("partition", partition), ("account", account), ("job_name", job_name)):
        if name is not None and not _NAME.fullmatch(name):
            raise InputError(f"expected {what} of letters, digits and _.,+@- only, got {name!r}")
    asked = {
        "job-name": job_name,
        "partition": partition,
        "account": account,
        "time": time,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "gpus-per-node": gpus_per_node or None,
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{key}={value}" for key, value in asked.items() if value is not None]
    if servers:
        # Ray counts a whole machine as its own, and stops every Ray process on it at the end.
        lines.append("#SBATCH --exclusive")
    lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append", "set -euo pipefail", ""]
    lines += _log(out)
    lines += _setup(setup)
    lines += _first_node()
    step = f"srun --export=ALL --cpus-per-task={cpus} --kill-on-bad-exit=1"
    if servers:
        lines += _ray(step, command, nodes, cpus, gpus_per_node)
    else:
        lines += _torchrun(step, command, nodes, processes, max(1, cpus // processes))
    return "\n".join(lines) + "\n"


def _processes(strategy: str, given: int | None, gpus: int) -> int:
    if given is None:
        return gpus or 1
    _at_least("processes_per_node", given, 1)
    if strategy != "all-reduce":
        raise InputError(
            f"expected processes_per_node with all-reduce only, got {given} with {strategy}: "
            f"the recipe's distributed.workers says how many workers there are"
        )
    if gpus and given > gpus:
        raise InputError(f"expected a GPU for each process of a node, got {given} on {gpus}")
    return given


def _log(out: Path) -> list[str]:
    # Slurm does not make the folder of --output, so the script opens its log itself.
    return [
        f"out={shlex.quote(str(out))}",
        'mkdir -p -- "$out"',
        'log="$out/slurm-$SLURM_JOB_ID.log"',
        'echo "the log is $log"',
        'exec >>"$log" 2>&1',
        "",
    ]


def _setup(setup: Sequence[str]) -> list[str]:
    # What environments source themselves is seldom written for "set -u".
    return ["set +u", *setup, "set -u", ""] if setup else []


def _first_node() -> list[str]:
    return [
        "# Where the nodes meet: the first one, by the address that Slurm itself reaches it at.",
        'nodes="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"',
        "first=\"${nodes%%$'\\n'*}\"",
        'if [[ "$(scontrol show node "$first")" =~ NodeAddr=([^[:space:]]+) ]]; then',
        '  first="${BASH_REMATCH[1]}"',
        "fi",
        f'meet="$first:$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))"',
        "",
    ]


def _torchrun(
    step: str, command: Sequence[str], nodes: int, processes: int, threads: int
) -> list[str]:
    return [
        f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"',
        "# Without this, a restart under Gloo finds the store of the attempt before.",
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        f"{step} --label \\",
        # Said by rank, since torchrun's guess from the host name fails where that is 127.0.1.1.
        "  bash -c 'exec torchrun --rdzv-conf is_host=$((SLURM_NODEID == 0)) \"$@\"' torchrun \\",
        f"  --nnodes={nodes} --nproc-per-node={processes} --max-restarts=3 \\",
        '  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$meet" \\',
        f"  {shlex.join(command)}",
    ]


def _ray(step: str, command: Sequence[str], nodes: int, cpus: int, gpus: int) -> list[str]:
    return [
        'export RAY_ADDRESS="$meet"',
        "export RAY_USAGE_STATS_ENABLED=0",
        "# Who reaches a Ray without a token runs what he likes as its owner.",
        'RAY_AUTH_TOKEN="$(od -An -N32 -tx1 /dev/urandom | tr -d " \\n")"',
        "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN",
        "export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300",
        'ended="$out/slurm-$SLURM_JOB_ID.ended"',
        'rm -f -- "$ended"',
        "# The other nodes' Rays would look for the first one for a minute after its end.",
        f"{step} --wait=10 --label \\",
        f'  ray symmetric-run --address "$meet" --min-nodes {nodes} \\',
        f"  --num-cpus={cpus} --num-gpus={gpus} -- \\",
        '  bash -c \'"$@" && touch -- "$0"\' "$ended" \\',
        f"  python {shlex.join(command)} || status=$?",
        "# srun's status says little: waiting Rays are killed, and symmetric-run says that all is",
        "# well also where Ray did not start.",
        'if [[ ! -e "$ended" ]]; then',
        '  echo "the command did not run to its end"',
        "  # One that was killed has not stopped its Ray.",
        '  [[ "${status:-1}" != 137 ]] || srun --export=ALL ray stop --force || true',
        '  exit "${status:-1}"',
        "fi",
        'rm -- "$ended"',
    ]


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"expected {name} to be at least {least}, got {value}")
