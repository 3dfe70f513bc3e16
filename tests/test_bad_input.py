"""Wrong input of a hundred kinds: one line that says what was expected and given, and no change.

On the command line, the exit status is 2 and the line begins with ``fineprune: ``. In the library,
it is the message of an ``InputError``. Nothing on disk is created, changed or removed.
"""

import hashlib
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fineprune as fp
from fineprune.cli.main import app
from fineprune.errors import InputError
from fineprune.networks.registry import build_network
from fineprune.training.recipe import make_recipe, read_recipe
from fineprune.training.trainer import train

ROOT = Path(__file__).parent.parent

OWN_INPUTS = """
import torch
from torch.utils.data import IterableDataset, TensorDataset

number = 3
images = TensorDataset(torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64))
labelled = TensorDataset(torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64))
labelled.classes = ["one", "two", "three"]

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))

pair = lambda: (images, images)
named = lambda: (labelled, labelled)
single = lambda: images
stream = lambda: (Stream(), Stream())
empty = lambda: ([], [])
unlabelled = lambda: ([torch.zeros(3, 32, 32)] * 8, images)

flat = lambda last: torch.nn.Sequential(torch.nn.Flatten(), last)
two_logits = lambda classes, channels: flat(torch.nn.Linear(channels * 1024, 2))
no_arguments = lambda: torch.nn.Flatten()
no_network = lambda classes, channels: "a network"
instance = torch.nn.Flatten()
lazy = lambda classes, channels: flat(torch.nn.LazyLinear(classes))
constant = lambda classes, channels: torch.nn.Linear(channels * 1024, classes).requires_grad_(False)
frozen = lambda classes, channels: flat(constant(classes, channels))
"""

QUICK = "fine.toml"
FINE = """
data = {name = "digits", train_size = 1024}
network = {name = "lenet"}
training = {epochs = 12, batch_size = 32, lr = 0.05, milestones = [6, 9], momentum = 0.9}
pruning = {policy = "fine-pruning", window = 6, start = 2, block = 1, count = 1, prune = 0.5}
run = {threads = 1}
"""
PLAN = "plan training.epochs=20 pruning.window=10 pruning.start=4"


def own(name: str) -> str:
    return f"data.name=own_inputs:{name} data.train_size=none"


NO_MPS = [("run.device=mps", "(if using custom build)\n")]
SHORT = "training.epochs=2 training.milestones=[] run.threads=1"

# Changes of a recipe that is trained, and what the line of the command must contain.
CHANGES = [
    ("nonsense", "expected section.key=value, such as training.epochs=20, got"),
    ("training.=3", "section.key=value, such as training.epochs=20, got"),
    ("--sets a=1", "No such option: --sets"),
    ("--out", "Option '--out' requires an argument: see fineprune --help\n"),
    ("training.epoch=3", "did you mean 'epochs'"),
    ("trainig.epochs=3", "did you mean 'training'"),
    ("training.zzzz=1", "'zzzz': it has epochs, batch_size, accumulation"),
    ("training.epochs=ten", "training.epochs to be a whole number, got 'ten'"),
    ("training.epochs=1000000000", "in [1, 100000], got 1000000000"),
    ("training.lr=0", "expected training.lr to be above 0, got 0"),
    ("training.optimizer=sdg", "did you mean 'sgd'"),
    ("training.optimizer=adam", "got 0.9 with 'adam': set training.momentum = none"),
    ("training.decay=0.5", "training.optimizer = rmsprop or rmsprop-tf only, got"),
    ("training.schedule=cosine", "got [6, 9] with 'cosine': set training"),
    ("training.milestones=[9,3]", "expected training.milestones to be strictly"),
    ("training.milestones=[99]", "within 1..12, got [99]"),
    ("training.warmup=99", "training.warmup in [0, 12], got 99"),
    ("training.drop_last=true training.batch_size=1025 pruning.policy=full", "at most 1024, the"),
    ("pruning.save=0.3", "'save': it has prune, tolerance, window"),
    ("pruning.policy=full pruning.prune=0.3", "with pruning.policy = 'full'"),
    ("pruning.policy=rondom", "did you mean 'random'"),
    ("pruning.prune=1.5", "share in [0, 1)"),
    ("pruning.prune=1024", "1024"),
    ("pruning.windows_per_interval=1", "either pruning.window"),
    ("pruning.start=0.5", "pruning.start to be a whole number or a list, got 0.5"),
    ("pruning.count=3", "count=3 and block=1"),
    ("pruning.attenuation=0.5", "at least 1, got 0.5"),
    ("run.seed=-1", "expected run.seed to be in [0, 4294967295], got -1"),
    ("run.threads=100000", "run.threads to be in [0, 1024], got 100000"),
    ("run.device=meta", "auto, cpu, cuda, cuda:N or mps, got 'meta'"),
    ("run.device=cuda:99", "cuda:99"),
    *([] if torch.backends.mps.is_available() else NO_MPS),
    ("run.precision=float16", "one of auto, float32, bfloat16, got 'float16': did"),
    ("distributed.strategy=sink", "did you mean 'sync'"),
    ("distributed.strategy=all-reduce", "start the command with torchrun"),
    ("distributed.backup=2", "expected distributed.backup below"),
    # Data and networks.
    ("data.name=digit", "did you mean 'digits'"),
    ("data.train_size=1797", "train_size in 1..1796, got 1797"),
    ("data.validation=1024", "to be below 1024, the number of training samples,"),
    ("data.workers=2", "data.workers with data.name = images or user-defined"),
    ("data.image_size=64", "data.image_size with data.name = synthetic or images"),
    ("data.crop_padding=128", "padding in 0..127, got 128"),
    ("data.name=synthetic data.image_size=64", "expected a network for samples of"),
    (
        "data.name=synthetic data.image_size=16 network.name=vgg13",
        ": set another network.name or data.image_size",
    ),
    ("network.classes=9", "at least 10, the classes of digits, got 9"),
    ("network.name=resnet188", "did you mean 'resnet18'"),
    ("network.name=own_inputs:", "module:attribute, got 'own_inputs:'"),
    ("network.name=own_inputs:no_arguments", "classes=10, channels=3"),
    ("network.name=own_inputs:no_network", "torch.nn.Module, got str"),
    ("network.name=own_inputs:instance", "got a network: return it from a"),
    ("network.name=own_inputs:lazy", "got lazy layers: call it once"),
    ("network.name=own_inputs:frozen", "to have parameters to train, got none"),
    ("network.name=own_inputs:two_logits", "(1, 10) from network.name"),
    ("network.name=nowhere:network", "there is no module 'nowhere'"),
    (own("nothing"), "has no attribute 'nothing'"),
    (own("number"), "a class or a function, got int"),
    (own("single"), "got TensorDataset"),
    (own("stream"), "expected map-style datasets"),
    (own("empty"), "got an empty list"),
    (f"{own('unlabelled')} network.classes=2", "expected items (x, y)"),
    (f"{own('pair')} pruning.policy=full", "expected at least two classes in"),
    (f"{own('named')} network.classes=2", "at least 3, the classes of"),
    (f"{own('named')} data.flip=true", "expected data.flip with data.name = digits"),
    (f"{own('named')} data.train_size=99", "expected data.train_size with"),
    # Labels.
    ("data.labels=nowhere.txt", "labels in nowhere.txt, cannot read it: No"),
    ("data.labels=file", "of a class in line 1 of file, got 'a file'"),
    ("data.labels=labels/few.txt", "expected 1024 labels in labels/few.txt"),
    ("data.labels=labels/none.txt", "before it is split, got 0"),
    ("data.labels=labels/ten.txt", "in line 3 of labels/ten.txt, got '10'"),
    ("data.labels=labels/long.txt", "of a class in line 1 of labels/long.txt, got '1111"),
    ("data.labels=labels/long.csv", "expected an index of 0 to 1023, or a key, in line 2"),
    ("data.labels=labels/latin1.txt", "labels in labels/latin1.txt, cannot"),
    ("data.labels=labels/dropped.txt", "got only images to leave out or hold"),
    ("data.labels=labels/pickle.npy", "labels in labels/pickle.npy, cannot"),
    ("data.labels=labels/text.npy", "cannot read it: no whole array of numbers"),
    ("data.labels=labels/float.npy", "got float64 of shape (1024,)"),
    ("data.labels=labels/table.npy", "got int64 of shape (1024, 1)"),
    ("data.labels=labels/ten.npy", "labels 0..9, or -1 to leave an image out"),
    ("data.labels=labels/few.npy", "expected 1024 labels in labels/few.npy"),
    ("data.labels=x data.label_noise=0.1", "data.labels or data.label_noise"),
    ("data.true_labels=dataset", "expected data.labels with data.true_labels"),
    ("data.labels=x data.true_labels=all", "to be one of dataset, got 'all'"),
    ("data.label_noise=1.5", "expected data.label_noise to be in [0, 1], got 1.5"),
    ("data.label_noise_seed=3", "expected data.label_noise with data.label_noise_s"),
    ("\"data.label_noise_map=['1->2']\"", "expected data.label_noise with data.label_noise_map"),
    ("data.label_noise=0.1 \"data.label_noise_map=['1->ten']\"", "of a class in data.label_noi"),
    (f"{own('named')} data.label_noise=0.1", "cifar100 or images only, got 0.1"),
    # Where the run is written, and runs that are resumed.
    ("--out ''", "expected a path, got an empty text"),
    ("--out b\udce4d", "expected --out to be a path in UTF-8"),
    ("--out file", "expected --out to be in a folder, got file, but file is a file"),
    ("--out file/below/it", "got file/below/it, but file is a file"),
    ("--out runs/done", "expected a new folder"),
    (f"{SHORT} training.lr=0.5 --out runs/stopped --resume", "expected a checkpoint of this rec"),
    (f"{SHORT} --out runs/checkpoint-list --resume", "something else: resume with the version"),
    (f"{SHORT} --out runs/checkpoint-text --resume", ": restore the checkpoint, or train into"),
]

# Each command, and what its line must contain.
COMMANDS = [
    *((f"train {QUICK} {changes}", said) for changes, said in CHANGES),
    ("tarin recipes/quick.toml", "Did you mean 'train'?: see fineprune --help\n"),
    ("train", "Missing argument 'recipe': see fineprune train --help\n"),
    ("train missing.toml", "cannot read missing.toml: No such file"),
    ("train not-toml.toml", "expected TOML in not-toml.toml"),
    ("train latin1.toml", "expected TOML in latin1.toml"),
    ("train flat.toml", "expected [epochs] to be a section with keys, got epochs = 3"),
    ("train empty.toml", "expected the settings of a recipe in empty.toml, got none"),
    ("train recipes/paper/lenet.toml data.dir=nowhere", "in nowhere, found neither"),
    ("train recipes/paper/lenet.toml data.dir=cut-short", "expected MD5"),
    # Runs that are reported and inspected.
    ("report nowhere", "expected a finished run"),
    ("report runs/stopped", "expected a finished run"),
    ("report runs/summary-text", ": remove the file and continue the run, which writes it again"),
    ("report runs/comparison-empty", "expected title in runs/comparison-empty/compare.json, got"),
    ("report runs/done --out runs", "expected --out to be a file, got the folder runs"),
    ("report runs/done --out file/report.html", "got file/report.html, but file is a file"),
    *(
        (f"{verb} runs/paper", "give runs/paper/lenet runs/paper/resnet18")
        for verb in ("report", "inspect", "plan")
    ),
    ("inspect runs/bare", "expected a run with evidence.pt to know about its labels"),
    ("inspect runs/done --most 0", "expected --most to be at least 1, got 0"),
    ("inspect runs/done --accept 0.9", "expected --labels with --accept, got no table: add --la"),
    ("inspect runs/done --labels l.csv --accept nan", "expected --accept above 0 and at most 1"),
    ("inspect runs/done --labels ''", "expected a path, got an empty text"),
    ("inspect runs/done --labels l.txt", "expected a .csv file for --labels"),
    ("inspect runs/done --labels labels", "give a name such as labels.csv"),
    ("inspect runs/done --labels labels/long.csv", "expected a new file for --labels"),
    # Comparisons, scaling experiments and papers.
    (f"compare {QUICK} --seeds two", "valid integer, unable to parse string as an integer, got"),
    (f"compare {QUICK} --seeds 100000000", "less than or equal to 1000, got '100000000'"),
    (f"compare {QUICK} --jobs 0", "'--jobs': Input should be greater than or equal to 1, got '0'"),
    (f"compare {QUICK} --margin 0", "expected --margin as percentage points above 0 and below 100"),
    (f"compare {QUICK} --arms full,half", "expected arms out of full, watched, second, adaptive"),
    (f"compare {QUICK} --arms full,full", "every arm once, got 'full' 2 times"),
    (f"compare {QUICK} pruning.policy=full", "expected a recipe with a pruning schedule"),
    (f"compare {QUICK} --out file/below", "expected --out to be in a folder, got file/below"),
    (f"compare {QUICK} --out runs/done", "expected a folder for a comparison, got runs/done"),
    (f"scale {QUICK} one --out file", "expected --out to be in a folder, got file"),
    (f"scale {QUICK} 'sync 2'", "expected a configuration such as"),
    (f"scale {QUICK} 'async {'9' * 5000}+1'", "expected a configuration such as"),
    (f"scale {QUICK} 'one lr=.5' 'one  lr=0.5'", "each configuration once, got one lr=0.5, one"),
    (f"scale {QUICK} one 'mixed 3+1 group=2'", "expected distributed.workers to be a multiple"),
    (f"scale {QUICK} one 'sync 3+1' --same-update", "to be a multiple of the 3 gradients"),
    (f"scale {QUICK} one --target-loss nan", "--target-loss to be a finite number above 0, got"),
    (f"scale {QUICK} one cluster.nodes=4", "expected a known section, got 'cluster'"),
    (f"scale {QUICK} --predict --target-loss 1", "expected --target-loss without --predict"),
    (f"scale {QUICK} --predict --same-update", "expected --same-update without --predict"),
    (f"scale {QUICK} --predict cluster.nodes=many", "expected numbers such as cluster.nodes=64"),
    (f"scale {QUICK} --predict cluster.racks=2", "a known key in [cluster], got 'racks'"),
    (f"scale {QUICK} --predict cluster.latency=inf", "cluster.latency"),
    (f"scale {QUICK} --predict costs.step=0.0", "expected costs.step to be above 0, got 0.0"),
    ("paper", "Missing argument"),
    ("paper 3", "got"),
    # Plans.
    ("plan", "expected a recipe, or training.epochs="),
    ("plan lenet", "cannot read lenet: No such file or directory; did you mean paper/lenet?"),
    ("plan quik", "expected a recipe file or a name that fineprune recipes lists"),
    ("plan zzzz", "cannot read zzzz: No such file or directory\n"),
    ("plan trainng.epochs=4", "or --save, got trainng.epochs=4"),
    ("plan training.epochs=8 pruning.save=0.1 --save 0.3", "--save or pruning.save=0.1, got both"),
    ("plan training.epochs=10", "pruning.window"),
    ("plan runs/stopped", "expected a finished run"),
    ("plan runs/bare", "expected a run with evidence.pt"),
    ("plan runs/done --save 0.3", "expected the folder of a run without changes or other"),
    (f"plan {QUICK} {QUICK}", "expected one recipe"),
    (f"plan {QUICK} {own('pair')}", "expected --samples with data.name = "),
    (f"plan {QUICK} data.labels=x", "expected --samples with data.labels = 'x', got none"),
    (f"plan {QUICK} --samples 1000000000000", "expected --samples of at most 1,000,000,000"),
    (f"plan {QUICK} --json --samples 0", "expected --samples to be at least 1, got 0"),
    (f"plan {QUICK} pruning.policy=full", "expected a policy with a schedule"),
    (f"plan {QUICK} pruning.policy=infobatch", "whose number depends on the losses: set pruning"),
    (
        f"plan {QUICK} --ranks 4 distributed.strategy=sync distributed.workers=4",
        "expected one process of torchrun with distributed.strategy or distributed.simulate",
    ),
    (
        f"plan {QUICK} data.name=cifar10 data.train_size=45001 data.validation=5000",
        "expected data.train_size to be at most 45000",
    ),
    (
        f"plan {QUICK} data.name=cifar10 data.train_size=none data.validation=60000",
        "expected data.validation to leave some of 50000 samples, got 60000",
    ),
    (
        "plan weak-labels --step-time 0.5 distributed.strategy=async distributed.workers=4",
        "use fineprune scale --predict",
    ),
    (
        "plan training.epochs=20 pruning.windows_per_interval=9 training.milestones=[4,8]",
        "at most 4 windows_per_interval",
    ),
    (f"{PLAN} --step-time 0", "expected --step-time to be above 0, got 0"),
    (f"{PLAN} --overhead=-1", "expected --overhead to be at least 0, got -1"),
    (f"{PLAN} --svg runs", "expected --svg to be a file, got the folder runs"),
    (f"{PLAN} pruning.prune=inf", "pruning.prune to be a finite number, got inf"),
    (f"{PLAN} pruning.prune=0 training.drop_last=true --samples 100", "at most 100, the samples"),
    # Batch scripts.
    (f"slurm -- train {QUICK}", "Missing option '--nodes': see fineprune slurm --help\n"),
    (f"slurm --nodes 2 -- {QUICK}", "expected the verb of the job to be one of"),
    (f"slurm --nodes 2 -- train {QUICK} --sedes 3", "train: No such option: --sedes"),
    (f"slurm --nodes 2 -- train {QUICK} training.epoch=3", "did you mean 'epochs'"),
    (f"slurm --nodes 2 -- train {QUICK} run.device=cuda", "expected --gpus with run.device=cuda"),
    (f"slurm --nodes 2 -- compare {QUICK}", "expected one node for a single process, got 2"),
    (f"slurm --nodes 2 --out runs -- train {QUICK}", "to be a file, got the folder runs"),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with recipes, data, modules and runs, sound ones and damaged ones."""
    folder = tmp_path_factory.mktemp("prepared")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    (folder / "own_inputs.py").write_text(OWN_INPUTS)
    (folder / "file").write_text("a file")
    (folder / "fine.toml").write_text(FINE)
    (folder / "not-toml.toml").write_text("[training\nepochs = 3\n")
    (folder / "latin1.toml").write_bytes('[data]\ndir = "d\xe4ta"\n'.encode("latin-1"))
    (folder / "empty.toml").write_text("# nothing\n")
    (folder / "flat.toml").write_text("epochs = 3\n")
    (folder / "cut-short").mkdir()
    (folder / "cut-short/cifar-10-binary.tar.gz").write_bytes(b"the first bytes")

    (folder / "labels").mkdir()
    for name, text in (
        ("few", "0\n1\n"),
        ("none", ""),
        ("ten", "0\n1\n10\n"),
        ("dropped", "drop\n" * 1024),
        ("long", f"{'1' * 5000}\n" * 1024),
    ):
        (folder / f"labels/{name}.txt").write_text(text)
    (folder / "labels/long.csv").write_text(f"index,label\n{'1' * 5000},0\n")
    (folder / "labels/latin1.txt").write_bytes("z\xe4hlen\n".encode("latin-1"))
    (folder / "labels/text.npy").write_text("0\n1\n")
    for name, array in (
        ("pickle", np.array([{}], dtype=object)),
        ("float", np.zeros(1024)),
        ("table", np.zeros((1024, 1), dtype=np.int64)),
        ("ten", np.full(1024, 10)),
        ("few", np.zeros(2, dtype=np.int64)),
    ):
        np.save(folder / f"labels/{name}.npy", array)

    done = folder / "runs/done"
    less = ["training.epochs=2", "training.milestones=[]", "run.threads=1"]
    train(read_recipe(folder / "fine.toml", less), done)
    for name, file, content in (
        ("stopped", "summary.json", None),
        ("summary-text", "summary.json", "finished"),
        ("checkpoint-text", "checkpoint.pt", "a checkpoint"),
        ("checkpoint-list", "checkpoint.pt", None),
        ("bare", "history/evidence.pt", None),
    ):
        damaged = folder / "runs" / name
        shutil.copytree(done, damaged)
        if content is not None:
            (damaged / file).write_text(content)
        elif name != "checkpoint-list":
            (damaged / file).unlink()
        if name.startswith("checkpoint"):
            (damaged / "summary.json").unlink()
    torch.save([1, 2, 3], folder / "runs/checkpoint-list/checkpoint.pt")
    for name in ("paper/lenet", "paper/resnet18", "comparison-empty"):
        (folder / f"runs/{name}").mkdir(parents=True)
        (folder / f"runs/{name}/compare.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def before(prepared):
    """Everything in this folder before the first command."""
    return state_of(prepared)


def state_of(folder: Path) -> dict[str, str]:
    """Everything in a folder: the names of folders, and the digests of files."""
    return {
        str(path.relative_to(folder)): (
            "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        )
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def refused(code, said, stdout, stderr):
    assert code == 2, stderr
    assert stderr.startswith("fineprune: ")
    assert said in stderr
    assert stderr.count("\n") == 1
    assert stdout == ""


@pytest.mark.parametrize(("command", "said"), COMMANDS, ids=str)
def test_a_wrong_command_says_so_in_one_line_and_changes_nothing(
    command, said, prepared, before, monkeypatch
):
    monkeypatch.chdir(prepared)
    monkeypatch.syspath_prepend(prepared)
    handler = signal.getsignal(signal.SIGINT)
    result = CliRunner().invoke(app, shlex.split(command))
    refused(result.exit_code, said, result.stdout, result.stderr)
    assert signal.getsignal(signal.SIGINT) is handler
    assert state_of(prepared) == before


def test_a_process_ends_with_the_same_line_and_status(prepared, before, python):
    command = [*python, "-m", "fineprune", "report", "file"]
    result = subprocess.run(command, cwd=prepared, capture_output=True, text=True)
    refused(result.returncode, "expected a finished run", result.stdout, result.stderr)
    assert state_of(prepared) == before


SCHEDULE = fp.Schedule(epochs=4, window=2, start=1)


def pruner(**settings):
    return fp.Pruner(100, fp.FinePruning(SCHEDULE, prune=0.3), **settings)


# Each call, and what the message of its InputError must contain.
CALLS = [
    (lambda: fp.Schedule(4, 2, 1, block=1, count=2), "count=2", "block=1"),
    (lambda: fp.FinePruning(SCHEDULE, prune=1.0), "share", "got 1.0"),
    (lambda: fp.FinePruning(SCHEDULE, prune=0.3, tolerance=float("nan")), "tolerance", "got nan"),
    (lambda: fp.Pruner(0, fp.FullData(3)), "number of samples", "got 0"),
    (lambda: fp.Pruner(10, fp.FinePruning(SCHEDULE, prune=10)), "prune", "10"),
    (lambda: pruner(seed=-1), "seed", "got -1"),
    (lambda: pruner(batch_size=0), "batch_size", "got 0"),
    (lambda: pruner(accumulation=2), "batch_size with accumulation=2", "got None"),
    (lambda: pruner(batch_size=100), "batch_size", "100 samples"),
    (lambda: pruner(num_replicas=2, rank=2), "rank in 0..1", "got 2"),
    (lambda: pruner().set_epoch(4), "epoch", "got 4"),
    (lambda: next(pruner().epochs(4)), "an epoch in 0..3", "got 4"),
    (lambda: pruner().record(torch.tensor([0, 1]), torch.zeros(3)), "shape", "(3,)"),
    (lambda: pruner().total_steps(), "batch_size=...", "got None"),
    (lambda: pruner().load_state_dict({"version": 0}), "num_samples", "got one without it"),
    (lambda: fp.predict_savings(fp.FullData(3), 0, 10), "num_samples", "got 0"),
    (lambda: fp.predict_savings(fp.FullData(3), 9, 10, drop_last=True), "at most 9", "got 10"),
    (lambda: build_network("torchvision:resnet18", 10, 1), "3 channels", "got 1"),
    (lambda: make_recipe({"run": {"device": "tpu"}}), "run.device", "got 'tpu'"),
    (lambda: make_recipe({"training": 3}), "[training]", "training = 3"),
    (lambda: make_recipe({}, ["training.epochs=1.5"]), "training.epochs", "got 1.5"),
]


@pytest.mark.parametrize(("call", "expected", "given"), CALLS)
def test_wrong_arguments_raise_an_error_of_one_line(call, expected, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        call()
    message = str(error.value)
    assert "expected" in message
    assert expected in message
    assert given in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []
