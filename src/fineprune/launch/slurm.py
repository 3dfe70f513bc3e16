"""Batch scripts for Slurm that start one Python command on every node of a job."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from fineprune.errors import InputError, check_at_least, check_one_of, first_line

JOB_STRATEGIES = ("all-reduce", "sync", "async", "mixed")
# The strategy of a command that runs as a single process on a single node.
ALONE = "one"

# These ports are below Linux's ephemeral ports and above those of Ray's workers.
_FIRST_PORT, _PORTS = 20_000, 10_000

# How long before its time limit a job is told to stop, so that the training writes a checkpoint,
# and the part of this time that torchrun gives the ranks.
_STOP_SECONDS = 120
_RANKS_STOP_SECONDS = 110

# How long a training has to end after the job is cancelled. Slurm kills everything after 30 seconds
# (KillWait), and Ray must be stopped before.
_CANCEL_SECONDS = 15

# The signal goes to the processes of the step and not to this script, which must not end if the
# step has ended meanwhile.
_STOP_STEP = 'scancel --signal=TERM "$SLURM_JOB_ID" || true'
_STOP_RAY = """\
# Again and again, because the training may not have started yet.
while kill -0 "$step" 2>/dev/null; do
  [[ ! -s "$training" ]] || kill -USR1 "$(<"$training")" 2>/dev/null || true
  sleep 1
done &"""

# Starts torchrun on a node, after the words that come before its arguments. Each node gives its own
# address, at which all ranks meet if it has rank 0: its host name may not resolve on other nodes.
# The rank determines the host, because torchrun's guess is wrong if that name means 127.0.1.1.
_TORCHRUN = (
    '[[ "$(scontrol show node "$SLURMD_NODENAME")" =~ NodeAddr=([^[:space:]]+) ]]; '
    'exec {} --local-addr="${{BASH_REMATCH[1]}}" --rdzv-conf is_host=$((SLURM_NODEID == 0)) "$@"'
)

_REQUEUE = """
# Slurm requeues no job that it pre-empts and that ends before its time of grace is over.
requeue() {
  [[ "$(scontrol show job "$SLURM_JOB_ID")" =~ PreemptTime=[0-9] ]] || return 0
  scontrol requeue "$SLURM_JOB_ID" || true
}
"""
# How a step ends, and how one with Ray does.
_END = """\
((status == 0)) || requeue
exit "$status"
"""
_END_OF_RAY = """\
# The status of srun is not that of the command: Ray on waiting nodes is killed, and
# symmetric-run reports success even if Ray did not start.
if [[ -s "$ended" ]]; then
  result="$(<"$ended")"
else
  echo "the command did not finish: see above, and submit the job again to continue"
  result="$((status ? status : 1))"
fi
rm -f -- "$ended" "$training"
if ((result)); then
  # A command that was killed has not stopped Ray.
  ((status <= 128)) || srun --export=ALL ray stop --force || true
  requeue
fi
exit "$result"
"""

# The forms that Slurm accepts: M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
_TIME = re.compile(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}")
_UNITS = 3600, 60, 1
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+@-]*")


def job_command(
    verb: str,
    recipe: Path,
    out: Path,
    changes: Iterable[str] = (),
    *,
    configurations: Iterable[str] = (),
    options: Iterable[str] = (),
) -> list[str]:
    """Return the arguments of Python that start or continue a training or an experiment in a job.

    The same command serves for the first start and for every later one. That of ``train`` contains
    ``--resume``, which starts a new training if there is no checkpoint. The paths are those on the
    nodes, and ``options`` are more options of the verb.
    """
    command = ["-m", "fineprune", verb, str(recipe), *configurations, "--out", str(out), *options]
    if verb == "train":
        command.append("--resume")
    return [*command, *changes]


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
    """Check that a training with parameter servers fits the nodes of a job.

    Args:
        group: The number of workers per group. The workers of a group run on one node.
        dedicated: The number of servers that have CPUs of their own; 0 if servers share the CPUs of
            the workers.
        threads: The number of CPUs of each worker and dedicated server; 0 to divide the CPUs of a
            node among its processes.
        cpus_per_task: The number of CPUs per node. By default, this is what the processes of a node
            use, plus one for the driver and for servers that share CPUs.

    Returns:
        The number of CPUs per node, and the number of threads of each process.
    """
    check_at_least("nodes", nodes, 1)
    if workers // group + dedicated < nodes:
        fewest = (nodes - dedicated) * group
        servers = f" and {dedicated} dedicated servers" if dedicated else ""
        raise InputError(
            f"expected work for all {nodes} nodes, got {workers} workers in groups of "
            f"{group}{servers}: ask for fewer nodes, or set distributed.workers={fewest}"
        )
    # Ray puts each group or dedicated server on the node with the fewest processes so far.
    processes = [0] * nodes
    for size in [group] * (workers // group) + [1] * dedicated:
        processes[processes.index(min(processes))] += size
    most = max(processes)
    gpus = -(-(workers // group) // nodes) * group if on_gpus else 0
    if gpus > gpus_per_node:
        raise InputError(
            f"expected {gpus} GPUs per node, one for each of its workers, got {gpus_per_node}: ask "
            f"for more GPUs or nodes, for fewer distributed.workers, or set run.device=cpu"
        )
    least = most * max(1, threads)
    cpus = least + 1 if cpus_per_task is None else cpus_per_task
    if cpus < least:
        raise InputError(
            f"expected {least} CPUs per node, {max(1, threads)} for each of its {most} processes, "
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
        command: The arguments of Python: ``-m fineprune train ...`` (see ``job_command``), or a
            script of the user's own and its arguments.
        out: The folder of the job's log. The job creates it.
        nodes: The number of nodes. Each node runs one Slurm task, which starts its processes.
        strategy: ``all-reduce`` runs the command in every process of ``torchrun``. ``sync``,
            ``async`` and ``mixed`` run it once, on the first node of a Ray cluster over all nodes.
            ``one`` runs it once, in a job of one node.
        processes_per_node: The number of processes that ``torchrun`` starts on each node; by
            default one per GPU, or one. With servers, the recipe determines the number of workers.
        gpus_per_node: The number of GPUs per node; 0 to train on CPUs.
        cpus_per_task: The number of CPUs per node, for all its processes; by default one for each
            process, and one more with servers.
        time: The time limit in a form that Slurm accepts, such as ``24:00:00`` or ``2-12``; by
            default that of the partition.
        partition: The partition; by default that of the cluster.
        account: The account; by default that of the user.
        job_name: The name of the job: letters, digits and ``_.,+@-``.
        setup: Lines of shell that run before anything else, such as ``module load cuda`` or
            ``source venv/bin/activate``. They are written to the script unchanged.
    """
    check_one_of("strategy", strategy, (*JOB_STRATEGIES, ALONE))
    check_at_least("nodes", nodes, 1)
    if strategy == ALONE and nodes > 1:
        raise InputError(f"expected one node for a single process, got {nodes}")
    check_at_least("gpus_per_node", gpus_per_node, 0)
    processes = _processes(strategy, processes_per_node, gpus_per_node)
    servers = 0 if strategy in ("all-reduce", ALONE) else 1
    cpus = processes + servers if cpus_per_task is None else cpus_per_task
    check_at_least("cpus_per_task (--cpus)", cpus, 1)
    if not servers and cpus < processes:
        raise InputError(
            f"expected a CPU for each process of a node, got {processes} processes on {cpus} CPUs: "
            f"ask for more CPUs or fewer processes"
        )
    if time is not None and not _TIME.fullmatch(time):
        raise InputError(
            f"expected time in a form that Slurm accepts, such as 90 (minutes), 24:00:00 or 2-12, "
            f"got {time!r}"
        )
    if time is not None and 0 < _seconds(time) <= _STOP_SECONDS:  # 0 is no limit.
        raise InputError(
            f"expected time above {_STOP_SECONDS} seconds, which a job has left when it is told to "
            f"stop, got {time!r}: ask for more time"
        )
    for what, name in (("partition", partition), ("account", account), ("job_name", job_name)):
        if name is not None and not _NAME.fullmatch(name):
            raise InputError(f"expected {what} of letters, digits and _.,+@- only, got {name!r}")
    _check_setup(setup)
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
        # Ray takes a machine as a whole, and stops every Ray process on it at the end.
        lines.append("#SBATCH --exclusive")
    lines.append(f"#SBATCH --signal=B:USR1@{_STOP_SECONDS}")
    lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append", "set -euo pipefail"]
    lines += ["# A signal that comes before the training is started is passed on later."]
    lines += ["asked=", "trap asked=yes USR1"]
    script = "\n".join(lines) + "\n" + _log(out) + _REQUEUE
    if setup:
        # Scripts that activate environments often fail with "set -u".
        script += "\n".join(["", "set +u", *setup, "set -u", ""])
    # All numbers are given again, because options of sbatch replace those of the script.
    step = f"srun --export=ALL --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1"
    step += f" --cpus-per-task={cpus} --kill-on-bad-exit=1"
    if strategy == ALONE:
        return script + _alone(step, command)
    script += _first_node()
    if servers:
        return script + _ray(step, command, nodes, cpus, gpus_per_node)
    return script + _torchrun(step, command, nodes, processes, max(1, cpus // processes))


def _seconds(time: str) -> int:
    """Return a time in one of the forms that Slurm accepts, in seconds."""
    days, _, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    begin = 0 if days or len(numbers) == 3 else 1
    units = zip(numbers, _UNITS[begin:], strict=False)
    return 86_400 * int(days or 0) + sum(number * unit for number, unit in units)


def _check_setup(setup: Sequence[str]) -> None:
    """Raise InputError if bash cannot parse the lines of the user, as far as there is a bash."""
    bash = shutil.which("bash")
    if bash is None or not setup:
        return
    lines = "\n".join(setup)
    parsed = subprocess.run([bash, "-n"], input=lines, capture_output=True, text=True)
    if parsed.returncode:
        raise InputError(
            f"expected setup in the syntax of bash, got {lines!r}: {first_line(parsed.stderr)}"
        )


def _processes(strategy: str, given: int | None, gpus: int) -> int:
    if given is None:
        return 1 if strategy == ALONE else gpus or 1
    check_at_least("processes per node", given, 1)
    if strategy != "all-reduce":
        raise InputError(
            f"expected processes per node only with all-reduce, got {given} with {strategy}: set "
            f"distributed.workers in the recipe"
        )
    if gpus and given > gpus:
        raise InputError(
            f"expected a GPU for each process of a node, got {given} processes on {gpus} GPUs: ask "
            f"for more GPUs or fewer processes"
        )
    return given


def _log(out: Path) -> str:
    # The script opens its log itself, because Slurm does not create the folder of --output.
    return f"""
out={shlex.quote(str(out))}
mkdir -p -- "$out"
log="$out/slurm-$SLURM_JOB_ID.log"
echo "the log is $log"
exec >>"$log" 2>&1
"""


def _first_node() -> str:
    return rf"""
# The nodes meet at the first one, at the address by which Slurm itself reaches it.
nodes="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
first="${{nodes%%$'\n'*}}"
if [[ "$(scontrol show node "$first")" =~ NodeAddr=([^[:space:]]+) ]]; then
  first="${{BASH_REMATCH[1]}}"
fi
meet="$first:$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))"
"""


def _in_background(step: str, stop: str) -> str:
    """Run a step so that a signal reaches the script meanwhile, and passes on to the training.

    Args:
        step: The command.
        stop: The commands that tell the training to stop. The training then writes a checkpoint.
    """
    return f"""\
stop() {{
  asked=yes
  echo "asked to stop after $SECONDS s: a training that has begun writes a checkpoint"
{textwrap.indent(stop, "  ")}
}}
{step} &
step=$!
trap stop USR1
[[ ! "$asked" ]] || stop
# A signal interrupts wait, so wait again after each signal.
asked=yes
while [[ "$asked" ]]; do asked=; status=0; wait "$step" || status=$?; done
"""


def _alone(step: str, command: Sequence[str]) -> str:
    run = f"{step} --label \\\n  python {shlex.join(command)}"
    return "\n" + _in_background(run, _STOP_STEP) + _END


def _torchrun(step: str, command: Sequence[str], nodes: int, processes: int, threads: int) -> str:
    run = rf"""{step} --label \
  bash -c {shlex.quote(_TORCHRUN.format("torchrun"))} torchrun \
  --nnodes={nodes} --nproc-per-node={processes} --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$meet" \
  {shlex.join(command)}"""
    settings = f"""
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"
# Without this, a restart under Gloo finds the store of the previous attempt.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Else torchrun kills the processes 30 seconds after the signal to stop.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={_RANKS_STOP_SECONDS}
"""
    return settings + _in_background(run, _STOP_STEP) + _END


def _ray(step: str, command: Sequence[str], nodes: int, cpus: int, gpus: int) -> str:
    settings = rf"""
export RAY_ADDRESS="$meet"
export RAY_USAGE_STATS_ENABLED=0
# Without a token, anyone who reaches Ray's ports can run any program as the job's user.
RAY_AUTH_TOKEN="$(od -An -N32 -tx1 /dev/urandom | tr -d " \n")"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
# Else Ray gives workers and servers a lower priority than other processes.
export RAY_worker_niceness=0
# Else Ray on the other nodes ends half a minute after the command has failed.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
ended="$out/slurm-$SLURM_JOB_ID.ended"
training="$out/slurm-$SLURM_JOB_ID.pid"
rm -f -- "$ended" "$training"  # of the job before it was requeued
# If the job is cancelled, nothing else stops Ray here: its processes left the step.
cancel() {{
  for _ in {{1..{_CANCEL_SECONDS}}}; do  # The training may write a checkpoint.
    {{ kill -0 "$(<"$training")"; }} 2>/dev/null || break
    sleep 1
  done
  ray stop --force || true
  rm -f -- "$ended" "$training"
  requeue
  exit 143
}}
trap cancel TERM
# Without --wait, Ray on the other nodes looks for the first one for a minute at the end.
"""
    # The shell in which the training runs, on this node, ignores the signal, and so does the
    # training until it has started.
    run = rf"""{step} --wait=10 --label \
  ray symmetric-run --address "$meet" --min-nodes {nodes} \
  --num-cpus={cpus} --num-gpus={gpus} -- \
  bash -c 'trap "" USR1; "${{@:2}}" & echo $! >"$1"; wait $!; echo $? >"$0"; exit $(<"$0")' \
  "$ended" "$training" \
  python {shlex.join(command)}"""
    return settings + _in_background(run, _STOP_RAY) + _END_OF_RAY
