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

import pytest
from typer.testing import CliRunner

from fineprune.cli.main import app
from fineprune.launch.slurm import KINDS, batch_script
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


def run(*arguments):
    return CliRunner().invoke(app, ["slurm", *(str(argument) for argument in arguments)])


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
def test_hostile_names_reach_torchrun_unchanged(tmp_path):
    command = training(HOSTILE, HOSTILE, f"data.dir={HOSTILE}")
    text = batch_script(command, kind="all-reduce", nodes=2, setup=["echo $NOT_SET"])
    assert run_with_stand_ins(text, tmp_path) == 0, log_of(tmp_path)
    given = words(tmp_path / "words")
    assert given[-len(command) :] == command
    assert {"is_host=1", "--local-addr=10.0.0.1"} <= set(given)
    assert "--rdzv-endpoint=10.0.0.1:23456" in given


@needs_bash
def test_hostile_names_reach_the_command_in_ray_unchanged(tmp_path):
    command = training(HOSTILE, HOSTILE, f"data.dir={HOSTILE}")
    text = batch_script(command, kind="ray", nodes=2)
    assert run_with_stand_ins(text, tmp_path) == 0, log_of(tmp_path)
    assert words(tmp_path / "python-words") == command
    meeting = ["symmetric-run", "--address", "10.0.0.1:23456", "--min-nodes", "2"]
    assert words(tmp_path / "words")[:5] == meeting
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
    """Before the script has started it, while it starts, and later."""
    (tmp_path / "stoppable.py").write_text(STOPPABLE, encoding="utf-8")
    python = f"exec {shlex.quote(sys.executable)} stoppable.py"
    text = script(kind="ray", setup=["touch begun", "sleep 0.2"])
    job = start_with_stand_ins(text, tmp_path, python=python)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    time.sleep(seconds)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 0, log_of(tmp_path)
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


def test_the_ranks_have_the_time_before_the_limit_to_write_their_checkpoint():
    text = script()
    assert "--signal=B:USR1@120" in text
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110\n" in text


@needs_bash
def test_a_signal_reaches_no_process_of_an_earlier_job(tmp_path):
    """The file of the job before it was requeued names a process that is another's."""
    with subprocess.Popen(["sleep", "60"]) as bystander:
        (tmp_path / "fineprune-123456.pid").write_text(str(bystander.pid))
        (tmp_path / "stoppable.py").write_text(STOPPABLE, encoding="utf-8")
        python = f"exec {shlex.quote(sys.executable)} stoppable.py"
        text = script(kind="ray", setup=["touch begun"])
        job = start_with_stand_ins(text, tmp_path, python=python)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(30) == 0, log_of(tmp_path)
        assert bystander.poll() is None
        bystander.kill()


@needs_bash
@pytest.mark.parametrize(
    "broken", [{"ray": "exit 0"}, {"python": "exit 7"}, {"scontrol": "exit 1"}], ids=str
)
def test_a_job_that_did_not_train_fails(broken, tmp_path):
    """``ray symmetric-run`` exits with 0 also where Ray could not start."""
    text = script(kind="ray")
    assert run_with_stand_ins(text, tmp_path, **broken) == (7 if "python" in broken else 1)


@needs_bash
def test_a_job_whose_waiting_nodes_are_killed_has_trained(tmp_path):
    killed = STAND_INS["srun"].replace("exec ", "") + "; exit 137"
    assert run_with_stand_ins(script(kind="ray"), tmp_path, srun=killed) == 0
    assert not (tmp_path / "stopped").exists()


@needs_bash
def test_a_job_ends_with_the_status_of_its_training(tmp_path):
    """srun kills the other nodes when one fails, and returns the largest status of all."""
    killed = STAND_INS["srun"].replace("exec ", "") + "; exit 143"
    text = script(kind="ray")
    assert "export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0\n" in text
    assert run_with_stand_ins(text, tmp_path, srun=killed, python="exit 2") == 2
    assert (tmp_path / "stopped").exists()
    assert left(tmp_path) == []


@needs_bash
@pytest.mark.parametrize("kind", ["all-reduce", "ray"])
@pytest.mark.parametrize(
    ("status", "preempted", "requeued"),
    [(143, "2026-11-27", True), (143, "None", False), (0, "2026", False)],
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
@pytest.mark.parametrize("status", [134, 137, 143])
def test_a_job_that_was_killed_stops_its_ray(status, tmp_path):
    """``symmetric-run`` that gets SIGTERM, because another node failed, does not stop its Ray."""
    killed = f'[ "$2" = ray ] || exit {status}; {STAND_INS["srun"]}'
    assert run_with_stand_ins(script(kind="ray"), tmp_path, srun=killed) == status
    assert (tmp_path / "stopped").exists()
    assert "and submit the job again to continue" in log_of(tmp_path)


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


def test_defaults_follow_the_gpus():
    text = script(gpus=4)
    assert "--nproc-per-node=4" in text
    assert "#SBATCH --cpus-per-task=4\n" in text
    assert "--nproc-per-node=1" in script()
    assert "gpus" not in script()
    assert "#SBATCH --cpus-per-task=5\n" in script(gpus=4, kind="ray")


# The verb


def test_the_verb_writes_the_script(tmp_path):
    command = ["--nodes", 8, "--", "train", DIGITS, "run.seed=1"]
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("#!/bin/bash\n#SBATCH --job-name=fineprune\n")
    given = shlex.join(["-m", "fineprune", "train", str(DIGITS), "run.seed=1", "--resume"])
    assert f"  {given} &\n" in result.output
    assert run("--nodes", 8, "--", "train", DIGITS, "--resume", "run.seed=1").exit_code == 0
    file = tmp_path / "jobs/job.sh"
    written = run("--out", file, *command)
    assert "sbatch" in written.output
    assert file.read_text(encoding="utf-8") == result.output


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
    result = run("--nodes", nodes, *options.split(), "--", *shlex.split(command))
    assert result.exit_code == 0, result.output
    assert f"#SBATCH --cpus-per-task={cpus}\n" in result.output
    for one in ("torchrun", "symmetric-run"):
        assert (f" {one} " in result.output) == (one == kind)
    assert (" --resume" in result.output) == command.startswith("train")


@needs_bash
@pytest.mark.parametrize(
    ("nodes", "command"),
    [
        (
            "4",
            ["scale", "digits", "async 4+2 dedicated lr=0.05", "--target-loss", "1", "run.seed=1"],
        ),
        ("1", ["compare", "digits", "--seeds", "3"]),
    ],
)
def test_a_job_can_run_an_experiment(nodes, command, tmp_path):
    result = run("--nodes", nodes, "--", *command)
    assert result.exit_code == 0, result.output
    assert run_with_stand_ins(result.output, tmp_path) == 0, log_of(tmp_path)
    assert words(tmp_path / "python-words") == ["-m", "fineprune", *command]
    # A comparison has neither torchrun nor Ray.
    assert (tmp_path / "words").exists() == (command[0] == "scale")


# It runs the two tasks of a step on this machine.
BOTH_NODES = """
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
trap 'kill "$first" "$second"' TERM
wait "$first" && wait "$second"
"""


@needs_bash
@pytest.mark.long
def test_all_reduce_in_scale_runs_over_the_nodes_of_a_job(tmp_path, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text(f'#!{BASH}\nprintf "%s\\0" "$@" >{tmp_path}/words\n{BOTH_NODES}')
    srun.chmod(0o755)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!{BASH}\n[ $# = 3 ] && echo NodeAddr=127.0.0.1 | tee {tmp_path}/asked")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    small = ["data.train_size=256", "training.epochs=2", "training.milestones=[]"]
    small += ["training.batch_size=32", "pruning.policy=full", "run.threads=1", "run.device=cpu"]
    command = ["scale", str(DIGITS), "all-reduce 2", *small, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    given = words(tmp_path / "words")
    assert given[:4] == ["--overlap", "--relative=0", "--nodes=2", "--ntasks-per-node=1"]
    assert {"--cpus-per-task=1", "--nnodes=2", "--nproc-per-node=1"} <= set(given)
    assert (tmp_path / "asked").exists()  # for the address of each node
    # Each of the two ranks trains half of the eight batches.
    assert [
        line["steps"] for line in read_metrics(tmp_path / "out/all-reduce-2/metrics.jsonl")
    ] == [*(4, 4)]
    done = CliRunner().invoke(app, [*command[:2], "all-reduce 3", *small])
    assert done.exit_code == 2
    assert "expected all-reduce on at most the 2 nodes of the job, got 3 nodes" in done.output


@pytest.mark.parametrize(
    ("options", "command", "message"),
    [
        ("--nodes 0", "train digits", "--nodes"),
        ("--nodes 2", "train digits run.device=cuda", "expected --gpus with run.device=cuda"),
        ("--nodes 2", "train digits training.epoch=3", "did you mean 'epochs'"),
        ("--nodes 2", "train digits --seeds 3", "train: No such option: --seeds"),
        ("--nodes 2", "plan digits", "expected the verb of the job to be one of"),
        ("--nodes 2", "compare digits", "expected one node for a single process, got 2"),
    ],
)
def test_the_verb_refuses_wrong_input(options, command, message, tmp_path):
    file = tmp_path / "job.sh"
    result = run(*options.split(), "--out", file, "--", *command.split())
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1
    assert not file.exists()


def test_the_page_shows_what_the_verb_writes(tmp_path):
    page = (ROOT / "docs/slurm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    joined = page.replace("\\\n    ", "")
    commands = re.findall(r"^fineprune slurm (.*)$", joined, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        options, verb = command.split(" -- ")
        file = tmp_path / "shown.sh"
        result = run(*shlex.split(options), "--out", file, "--", *shlex.split(verb))
        assert result.exit_code == 0, result.output
        if command is commands[0]:
            assert file.read_text(encoding="utf-8") in blocks


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
                wait_for((folder / "munge.socket").exists, 20, "munged", lambda: logs(folder))
            with (folder / "daemons.log").open("ab") as log:
                daemons.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

        def idle():
            asked = ["sinfo", "--noheader", "--Node", "--format=%t"]
            return output(asked, environment, check=False).split() == ["idle", "idle"]

        wait_for(idle, 60, "two idle nodes", lambda: logs(folder))
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


def logs(folder):
    return "\n".join(file.read_text(errors="replace") for file in sorted(folder.glob("*.log")))


def wait_for(condition, seconds, what, explain=lambda: ""):
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            pytest.fail(f"waited {seconds} s for {what}\n{explain()}")
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
        self.slurm = slurm
        (folder / "job.sh").write_text(text, encoding="utf-8")
        command = ["sbatch", "--parsable", f"--chdir={folder}", "--time=5"]
        self.number = output([*command, str(folder / "job.sh")], slurm).strip()
        self.log = folder / f"fineprune-{self.number}.log"

    def state(self):
        return output(["scontrol", "show", "job", self.number], self.slurm)

    def over(self):
        state = self.state()
        return not any(f"JobState={word}" in state for word in UNFINISHED)

    def explain(self):
        return self.state() + (self.log.read_text() if self.log.exists() else "")

    def wait(self, seconds=300):
        wait_for(self.over, seconds, "the job", self.explain)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        output(["scancel", self.number], self.slurm, check=False)
        self.wait(90)


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
        job.wait()
        assert "JobState=COMPLETED" in job.state(), job.explain()
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
        wait_for(lambda: len(read_metrics(metrics)) > 2, 120, "three epochs", job.explain)
        output(["scancel", "--batch", "--signal=USR1", job.number], slurm)
        job.wait(60)
        assert "asked to stop" in job.log.read_text()
        assert "stopped by SIGTERM in epoch" in job.log.read_text()
    saved = load_checkpoint(out / "checkpoint.pt")
    assert len(saved["random"]) == 2
    assert saved["pruner"]["epoch"] == len(read_metrics(metrics))
