"""Batch scripts: their words, their errors, and a job on a real Slurm where one can be started."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from commands import printed

from fineprune.errors import InputError
from fineprune.launch.slurm import KINDS, batch_script, torchrun_in_job
from fineprune.runs.files import read_metrics
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.recipe import read_recipe

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "recipes/digits.toml"
BASH = shutil.which("bash") or ""
needs_bash = pytest.mark.skipif(not BASH, reason="no bash")

HOSTILE = 'it\'s "a" $HOME `x` \\ *; #\n&'


def script(**settings):
    values = {"kind": "all-reduce", "nodes": 2, **settings}
    return batch_script(["train.py"], **values)


def training(recipe, out, *changes):
    return ["-m", "fineprune", "train", str(recipe), "--out", str(out), *changes, "--resume"]


# The script's text


@needs_bash
@pytest.mark.parametrize("kind", KINDS)
def test_the_script_is_bash(kind):
    nodes = 1 if kind == "one" else 8
    text = batch_script(
        training(HOSTILE, HOSTILE, f"data.dir={HOSTILE}"),
        nodes=nodes,
        kind=kind,
        gpus=4,
        setup=["module load cuda", "source venv/bin/activate"],
    )
    subprocess.run([BASH, "-n"], input=text.encode(), check=True)
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --requeue", f"#SBATCH --nodes={nodes}"} <= set(options)
    assert text.index("set -euo pipefail") > text.index(options[-1])
    assert ("#SBATCH --exclusive" in options) == (kind == "ray")
    assert ("export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0\n" in text) == (kind == "ray")
    if kind == "all-reduce":  # The ranks have the time before the limit to write a checkpoint.
        assert "--signal=B:USR1@120" in text
        assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110\n" in text
        assert "--nproc-per-node=4" in text


# Programs of these names stand in for Slurm and the launchers, and write down what they are given.
STAND_INS = {
    "scontrol": '[ "$2" = hostnames ] && printf "n1\\nn2\\n" || echo " NodeAddr=10.0.0.1 X=1"',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; SLURM_NODEID=0 exec "$@"',
    "torchrun": 'printf "%s\\0" "$@" >words',
    "ray": (
        '[ "$1" = stop ] && exec touch stopped; printf "%s\\0" "$@" >words; '
        'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'
    ),
    "python": 'printf "%s\\0" "$@" >python-words',
}


def run_with_stand_ins(text, folder, **changed):
    return start_with_stand_ins(text, folder, **changed).wait()


def start_with_stand_ins(text, folder, **changed):
    (folder / "bin").mkdir()
    for name, body in (STAND_INS | changed).items():
        program = folder / "bin" / name
        program.write_text(f"#!{BASH}\n{body}\n", encoding="utf-8")
        program.chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    job = {"PATH": path, "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "n[1-2]"}
    (folder / "job.sh").write_text(text, encoding="utf-8")
    with (folder / "log").open("wb") as log:
        command = [BASH, "job.sh"]
        return subprocess.Popen(command, cwd=folder, env=job, stdout=log, stderr=log)


def log_of(folder):
    return (folder / "log").read_text()


def left(folder):
    """Return the files of a job that are left when it has ended."""
    return sorted(file.name for file in folder.glob("fineprune-*"))


def words(file):
    return file.read_bytes().decode().split("\0")[:-1]


@needs_bash
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_names_reach_the_training_unchanged(kind, tmp_path):
    command = training(HOSTILE, HOSTILE, f"data.dir={HOSTILE}")
    text = batch_script(command, kind=kind, nodes=1 + (kind != "one"), setup=["echo $NOT_SET"])
    assert run_with_stand_ins(text, tmp_path) == 0, log_of(tmp_path)
    file = tmp_path / ("words" if kind == "all-reduce" else "python-words")
    assert words(file)[-len(command) :] == command
    if kind == "all-reduce":
        place = {"is_host=1", "--local-addr=10.0.0.1", "--rdzv-endpoint=10.0.0.1:23456"}
        assert place <= set(words(file))
    elif kind == "ray":
        meeting = ["symmetric-run", "--address", "10.0.0.1:23456", "--min-nodes", "2"]
        assert words(tmp_path / "words")[:5] == meeting
    else:
        assert not (tmp_path / "words").exists()
    assert left(tmp_path) == []


# A training that ends when the signal comes, and takes some time to start.
STOPPABLE = """
import signal, sys, time
time.sleep(1)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(open("stopped", "w").close()))
time.sleep(60)
"""


@needs_bash
@pytest.mark.parametrize("seconds", [0.0, 0.3, 2.5])
def test_a_signal_reaches_the_training_whenever_it_comes(seconds, tmp_path):
    """Before the script has started it, while it starts, and later.

    And no process of an earlier job: the file of the job before it was requeued names another's.
    """
    (tmp_path / "stoppable.py").write_text(STOPPABLE, encoding="utf-8")
    python = f"exec {shlex.quote(sys.executable)} stoppable.py"
    text = script(kind="ray", setup=["touch begun", "sleep 0.2"])
    with subprocess.Popen(["sleep", "60"]) as bystander:
        (tmp_path / "fineprune-123456.pid").write_text(str(bystander.pid))
        job = start_with_stand_ins(text, tmp_path, python=python)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        time.sleep(seconds)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(30) == 0, log_of(tmp_path)
        assert bystander.poll() is None
        bystander.kill()
    assert re.search(r"asked to stop after \d+ s: a training that has begun", log_of(tmp_path))
    assert (tmp_path / "stopped").exists()
    assert left(tmp_path) == []


@needs_bash
@pytest.mark.parametrize("kind", ["all-reduce", "one"])
def test_a_job_waits_for_its_step_whatever_happens_to_the_signal(kind, tmp_path):
    step = "touch running; sleep 1; exit 7"
    text = script(kind=kind, nodes=1)
    job = start_with_stand_ins(text, tmp_path, torchrun=step, python=step, scancel="exit 1")
    while not (tmp_path / "running").exists():
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 7


RETURNS = STAND_INS["srun"].replace("exec ", "")


@needs_bash
@pytest.mark.parametrize(
    ("changed", "status", "stops_ray"),
    [
        # ``ray symmetric-run`` exits with 0 also where Ray could not start.
        ({"ray": "exit 0"}, 1, None),
        ({"python": "exit 7"}, 7, None),
        ({"scontrol": "exit 1"}, 1, None),
        # srun kills the other nodes when one fails, and returns the largest status of all.
        ({"srun": f"{RETURNS}; exit 137"}, 0, False),
        ({"srun": f"{RETURNS}; exit 143", "python": "exit 2"}, 2, True),
        # ``symmetric-run`` that gets SIGTERM, because another node failed, does not stop its Ray.
        *(
            ({"srun": f'[ "$2" = ray ] || exit {status}; {STAND_INS["srun"]}'}, status, True)
            for status in (137, 143)
        ),
    ],
    ids=str,
)
def test_a_job_ends_with_the_status_of_its_training(changed, status, stops_ray, tmp_path):
    assert run_with_stand_ins(script(kind="ray"), tmp_path, **changed) == status
    if stops_ray is not None:
        assert (tmp_path / "stopped").exists() == stops_ray
    if status > 128:
        assert "and submit the job again to continue" in log_of(tmp_path)


@needs_bash
@pytest.mark.parametrize(
    ("kind", "status", "preempted", "requeued"),
    [
        ("all-reduce", 143, "2026-11-27", True),
        ("ray", 143, "2026-11-27", True),
        ("ray", 143, "None", False),
        ("ray", 0, "2026", False),
    ],
)
def test_a_job_that_was_preempted_requeues_itself(kind, status, preempted, requeued, tmp_path):
    """Slurm does not, if the job ends before its time of grace is over."""
    scontrol = (
        f'case "$1 $2" in "show job") echo "PreemptTime={preempted}";; '
        f'"requeue 123456") touch requeued;; *) {STAND_INS["scontrol"]};; esac'
    )
    ends = {"torchrun": f"exit {status}", "python": f"exit {status}"}
    text = script(kind=kind)
    assert run_with_stand_ins(text, tmp_path, scontrol=scontrol, **ends) == status
    assert (tmp_path / "requeued").exists() == requeued


@needs_bash
def test_a_job_that_is_cancelled_stops_its_ray_after_the_training(tmp_path):
    """Else the same job cannot start again on this node: Ray's processes have left the step."""
    python = "touch running; sleep 2; [ -e stopped ] || touch saved"
    job = start_with_stand_ins(script(kind="ray"), tmp_path, python=python)
    number = tmp_path / "fineprune-123456.pid"
    while not ((tmp_path / "running").exists() and number.exists() and number.read_text()):
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 143, log_of(tmp_path)
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "stopped").exists()
    assert not number.exists()


# The verb


def test_the_verb_writes_the_script(tmp_path):
    command = ["--nodes", 8, "--", "train", DIGITS, "run.seed=1"]
    shown = printed("slurm", *command)
    assert shown.startswith("#!/bin/bash\n#SBATCH --job-name=fineprune\n")
    given = shlex.join(["-m", "fineprune", "train", str(DIGITS), "run.seed=1", "--resume"])
    assert f"  {given} &\n" in shown
    assert printed("slurm", *command, "--resume") == shown
    file = tmp_path / "jobs/job.sh"
    assert "sbatch" in printed("slurm", "--out", file, *command)
    assert file.read_text(encoding="utf-8") == shown


@pytest.mark.parametrize(
    ("options", "command", "cpus", "kind"),
    [
        ("", "train digits", 1, "torchrun"),
        ("--gpus 4", "train digits --out runs/a", 4, "torchrun"),
        ("--cpus 9", "train digits distributed.strategy=sync", 9, "symmetric-run"),
        ("--gpus 4", "train digits distributed.strategy=async", 5, "symmetric-run"),
        ("", "scale digits one 'async 4+2'", 2, "symmetric-run"),
        ("", "paper 2 --full", 2, "symmetric-run"),
        ("", "paper 1 --full", 1, ""),
        ("", "compare digits --seeds 3", 1, ""),
    ],
)
def test_the_command_says_what_starts_it(options, command, cpus, kind):
    nodes = "2" if kind else "1"
    shown = printed("slurm", "--nodes", nodes, *options.split(), "--", *shlex.split(command))
    assert f"#SBATCH --cpus-per-task={cpus}\n" in shown
    for one in ("torchrun", "symmetric-run"):
        assert (f" {one} " in shown) == (one == kind)
    assert (" --resume" in shown) == command.startswith("train")


@needs_bash
def test_all_reduce_in_scale_is_started_on_the_nodes_of_a_job(tmp_path, monkeypatch):
    assert torchrun_in_job(2, 1) is None
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    command = torchrun_in_job(2, 1)
    assert command is not None
    step = ["srun", "--overlap", "--relative=0", "--nodes=2", "--ntasks-per-node=1"]
    assert command[:5] == step
    assert {"--cpus-per-task=3", "--nnodes=2", "--nproc-per-node=1"} <= set(command)
    text = shlex.join([*command, HOSTILE]).replace(shlex.quote(sys.executable), "python")
    assert run_with_stand_ins(text, tmp_path) == 0, log_of(tmp_path)
    given = words(tmp_path / "python-words")
    assert given[:3] == ["-m", "fineprune.launch.torchrun", "--local-addr=10.0.0.1"]
    assert given[-1] == HOSTILE
    with pytest.raises(InputError, match="at most the 2 nodes of the job, got 3 nodes"):
        torchrun_in_job(3, 1)


def test_the_page_shows_what_the_verb_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/slurm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = re.search(r"^fineprune (slurm .*)$", page.replace("\\\n    ", ""), re.MULTILINE)
    assert shown is not None
    printed(*shlex.split(shown[1]))
    assert (tmp_path / "job.sh").read_text(encoding="utf-8") in blocks


# A real Slurm, of two nodes on this machine

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "srun")
UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=10 State=UP
"""


@pytest.fixture
def slurm():
    """The environment of a running Slurm; its daemons and its folder go at the end."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"no Slurm here: {', '.join(missing)} not found")
    if os.geteuid() != 0:
        pytest.skip("starting a Slurm needs root")
    # Not pytest's folder: munged refuses a socket that others cannot reach, and a long path.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    daemons = []
    try:
        environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        (folder / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(folder=folder, host=host, ports=free_ports(3))
        (folder / "slurm.conf").write_text(text, encoding="utf-8")
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        commands = [
            ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "n1"],
            ["slurmd", "-D", "-N", "n2"],
        ]
        for command in commands:
            if command[0] == "slurmctld":
                wait_for((folder / "munge.socket").exists, 20, folder)
            with (folder / "daemons.log").open("ab") as log:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                options: dict[str, Any] = {"env": environment, "start_new_session": True, **streams}
                daemons.append(subprocess.Popen(command, **options))

        def idle():
            asked = ["sinfo", "--noheader", "--Node", "--format=%t"]
            return output(asked, environment, check=False).split() == ["idle", "idle"]

        wait_for(idle, 60, folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def output(command, environment, check=True):
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=check
    )
    return done.stdout


def wait_for(condition, seconds, folder):
    """Wait for a condition, or fail with the logs in a folder."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            logs = "\n".join(file.read_text(errors="replace") for file in folder.glob("*.log"))
            pytest.fail(f"waited {seconds} s\n{logs}")
        time.sleep(0.2)


SUM_OF_RANKS = """
import json, os, pathlib, signal, sys
import torch
import torch.distributed as dist

rank, out = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
if rank == 1 and not (out / "killed").exists():
    (out / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
said = {"sum": total.item(), "world": dist.get_world_size(), "node": os.environ["SLURMD_NODENAME"]}
(out / f"rank-{rank}.json").write_text(json.dumps(said))
dist.destroy_process_group()
"""


def in_python_s_path():
    return [f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"]


class Job:
    """A job on a real Slurm."""

    def __init__(self, slurm, folder, text):
        self.slurm, self.folder = slurm, folder
        (folder / "job.sh").write_text(text, encoding="utf-8")
        command = ["sbatch", "--parsable", f"--chdir={folder}", "--time=5"]
        self.number = output([*command, str(folder / "job.sh")], slurm).strip()
        self.log = folder / f"fineprune-{self.number}.log"

    def state(self):
        return output(["scontrol", "show", "job", self.number], self.slurm)

    def over(self):
        state = self.state()
        return not any(f"JobState={word}" in state for word in UNFINISHED)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        output(["scancel", self.number], self.slurm, check=False)
        wait_for(self.over, 90, self.folder)


@needs_bash
@pytest.mark.long
def test_a_job_on_a_real_slurm_meets_and_restarts(slurm, tmp_path):
    """Two nodes, one process each, add up their ranks after one of them was killed."""
    program = tmp_path / "sum of ranks.py"
    program.write_text(SUM_OF_RANKS, encoding="utf-8")
    out = tmp_path / "it's $out"
    out.mkdir()
    command = [str(program), str(out)]
    text = batch_script(command, kind="all-reduce", nodes=2, setup=in_python_s_path())
    with Job(slurm, tmp_path, text) as job:
        wait_for(job.over, 300, tmp_path)
        assert "JobState=COMPLETED" in job.state(), job.log.read_text()
    assert (out / "killed").exists()
    said = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(one["sum"], one["world"]) for one in said] == [(3, 2), (3, 2)]
    assert {one["node"] for one in said} == {"n1", "n2"}


@needs_bash
@pytest.mark.long
def test_a_job_on_a_real_slurm_that_is_told_to_stop_writes_a_checkpoint(slurm, tmp_path):
    recipe = tmp_path / "recipe.toml"
    changes = ["data.train_size=256", "training.epochs=100000", "training.milestones=[]"]
    changes += ["training.batch_size=32", "run.checkpoint_every=100000", "run.device=cpu"]
    recipe.write_text(read_recipe(DIGITS, changes).to_toml())
    out = tmp_path / "run"
    command = training(recipe, out)
    text = batch_script(command, kind="all-reduce", nodes=2, setup=in_python_s_path())
    with Job(slurm, tmp_path, text) as job:
        metrics = out / "metrics.jsonl"
        wait_for(lambda: len(read_metrics(metrics)) > 2, 120, tmp_path)
        output(["scancel", "--batch", "--signal=USR1", job.number], slurm)
        wait_for(job.over, 60, tmp_path)
        assert "asked to stop" in job.log.read_text()
        assert "stopped by SIGTERM in epoch" in job.log.read_text()
    saved = load_checkpoint(out / "checkpoint.pt")
    assert len(saved["random"]) == 2
    assert saved["pruner"]["epoch"] == len(read_metrics(metrics))
