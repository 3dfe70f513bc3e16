"""Wrong input of a hundred kinds: one line that says what was expected and given, and no change.

On the command line, the exit status is 2 and the line begins with ``fineprune: ``. In the library,
it is the message of an ``InputError``. Nothing on disk is created, changed or removed.
"""

import hashlib
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fineprune as fp
from fineprune.cli.main import app
from fineprune.datasets.augment import Augment
from fineprune.datasets.cifar import load_cifar10
from fineprune.datasets.device_images import DeviceImages
from fineprune.datasets.digits import load_digits
from fineprune.datasets.download import fetch
from fineprune.datasets.image_set import ImageSet
from fineprune.errors import InputError
from fineprune.importing import call_attribute
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

def pair():
    return images, images

def named():
    return labelled, labelled

def single():
    return images

def stream():
    return Stream(), Stream()

def empty():
    return [], []

def unlabelled():
    return [torch.zeros(3, 32, 32)] * 8, images

def two_logits(classes, channels):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(channels * 1024, 2))

def no_arguments():
    return torch.nn.Flatten()

def no_network(classes, channels):
    return "a network"

instance = torch.nn.Flatten()

def lazy(classes, channels):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(classes))

def frozen(classes, channels):
    layer = torch.nn.Linear(channels * 1024, classes).requires_grad_(False)
    return torch.nn.Sequential(torch.nn.Flatten(), layer)
"""

QUICK = "fine.toml"
FINE = """
[data]
name = "digits"
train_size = 1024

[network]
name = "lenet"

[training]
epochs = 12
batch_size = 32
lr = 0.05
milestones = [6, 9]
gamma = 0.2
momentum = 0.9
weight_decay = 5e-4
evaluate_every = 3
evaluate_last = 1

[pruning]
policy = "fine-pruning"
window = 6
start = 2
attenuation = 2.0
block = 1
count = 1
prune = 0.5

[run]
seed = 0
threads = 1
"""
PLAN = "plan training.epochs=20 pruning.window=10 pruning.start=4"


def own(name: str) -> str:
    return f"data.name=own_inputs:{name} data.train_size=none"


# Each command, and what its line must contain.
COMMANDS = [
    # The command line itself.
    ("tarin recipes/quick.toml", "Did you mean 'train'?: see fineprune --help\n"),
    ("--recipe recipes/quick.toml", "No such option: --recipe: see fineprune --help\n"),
    ("train", "Missing argument 'recipe': see fineprune train --help\n"),
    (f"train {QUICK} --sets a=1", "No such option: --sets"),
    (f"train {QUICK} --out", "Option '--out' requires an argument: see fineprune --help\n"),
    (f"train {QUICK} nonsense", "expected section.key=value, such as training.epochs=20, got"),
    (f"compare {QUICK} --seeds two", "valid integer, unable to parse string as an integer, got"),
    (f"compare {QUICK} --jobs 1.5", "got '1.5'"),
    (f"slurm -- train {QUICK}", "Missing option '--nodes': see fineprune slurm --help\n"),
    # Recipes and their settings.
    ("train missing.toml", "cannot read missing.toml: No such file"),
    ("train runs", "cannot read runs: Is a directory"),
    ("train not-toml.toml", "expected TOML in not-toml.toml"),
    ("train latin1.toml", "expected TOML in latin1.toml"),
    ("train flat.toml", "expected [epochs] to be a section with keys, got epochs = 3"),
    (f"train {QUICK} training.epoch=3", "did you mean 'epochs'"),
    (f"train {QUICK} trainig.epochs=3", "did you mean 'training'"),
    (f"train {QUICK} training.epochs", "section.key=value, such as training.epochs=20, got"),
    (f"train {QUICK} training.epochs=ten", "training.epochs to be a whole number, got 'ten'"),
    (f"train {QUICK} training.epochs=0", "training.epochs to be in [1, 100000], got 0"),
    (f"train {QUICK} training.epochs=1000000000", "in [1, 100000], got 1000000000"),
    (f"train {QUICK} training.lr=0", "expected training.lr to be above 0, got 0"),
    (f"train {QUICK} training.optimizer=adam", "got 0.9 with 'adam': set training.momentum = none"),
    (f"train {QUICK} training.decay=0.5", "training.optimizer = rmsprop or rmsprop-tf only, got"),
    (f"train {QUICK} training.schedule=cosine", "got [6, 9] with 'cosine': set training"),
    (f"train {QUICK} training.zzzz=1", "'zzzz': it has epochs, batch_size, accumulation"),
    (f"train {QUICK} pruning.save=0.3", "'save': it has prune, tolerance, window"),
    (f"train {QUICK} pruning.policy=full pruning.prune=0.3", "with pruning.policy = 'full'"),
    (f"train {QUICK} pruning.tolerance=nan", "pruning.tolerance to be a finite number, got nan"),
    (f"train {QUICK} data.label_noise_seed=3", "expected data.label_noise with data.label_noise_s"),
    ("plan lenet", "cannot read lenet: No such file or directory; did you mean paper/lenet?"),
    ("plan zzzz", "cannot read zzzz: No such file or directory\n"),
    (f"train {QUICK} --set training.epochs=3", "No such option: --set"),
    (f"train {QUICK} training.lr=nan", "training.lr to be a finite number, got nan"),
    (f"train {QUICK} training.momentum=1.5", "training.momentum to be in [0, 1], got 1.5"),
    (f"train {QUICK} training.optimizer=sdg", "did you mean 'sgd'"),
    (
        f"train {QUICK} training.optimizer=adam training.momentum=none training.nesterov=true",
        "training.nesterov with training.optimizer = sgd only, got true with 'adam': set",
    ),
    (
        f"train {QUICK} training.optimizer=adamw training.momentum=none training.epsilon=0.1",
        "rmsprop-tf only, got 0.1 with 'adamw': set training.epsilon = none",
    ),
    (f"train {QUICK} training.milestones=[9,3]", "expected training.milestones to be strictly"),
    (f"train {QUICK} training.milestones=[99]", "within 1..12, got [99]"),
    (f"train {QUICK} training.warmup=99", "training.warmup in [0, 12], got 99"),
    (f"train {QUICK} training.batch_size=0", "training.batch_size to be at least 1, got 0"),
    (
        f"train {QUICK} training.drop_last=true training.batch_size=1025 pruning.policy=full",
        "at most 1024, the samples of each process, with training.drop_last, got 1025",
    ),
    (f"train {QUICK} pruning.policy=rondom", "did you mean 'random'"),
    (f"train {QUICK} pruning.prune=1.5", "share in [0, 1)"),
    (f"train {QUICK} pruning.windows_per_interval=1", "either pruning.window"),
    (f"train {QUICK} pruning.prune=1024", "1024"),
    (f"train {QUICK} pruning.start=0.5", "pruning.start to be a whole number or a list, got 0.5"),
    (f"train {QUICK} pruning.count=3", "count=3 and block=1"),
    (f"train {QUICK} pruning.attenuation=0.5", "at least 1, got 0.5"),
    (f"train {QUICK} run.seed=-1", "expected run.seed to be in [0, 4294967295], got -1"),
    (f"train {QUICK} run.seed=18446744073709551616", "run.seed to be in [0, 4294967295], got"),
    (f"train {QUICK} run.device=meta", "auto, cpu, cuda, cuda:N or mps, got 'meta'"),
    (f"train {QUICK} run.device=cuda:99", "cuda:99"),
    *(
        []
        if torch.backends.mps.is_available()
        else [(f"train {QUICK} run.device=mps", "(if using custom build)\n")]
    ),
    (f"train {QUICK} run.precision=float16", "one of auto, float32, bfloat16, got 'float16': did"),
    (f"train {QUICK} distributed.strategy=sink", "did you mean 'sync'"),
    (f"train {QUICK} distributed.strategy=ring", "sync, async, mixed, got 'ring'\n"),
    (f"train {QUICK} distributed.strategy=all-reduce", "start the command with torchrun"),
    (f"train {QUICK} distributed.backup=2", "expected distributed.backup below"),
    (f"train {QUICK} distributed.simulate=100000", "simulate in [0, 1024], got 100000"),
    # Data and networks.
    (f"train {QUICK} data.name=digit", "did you mean 'digits'"),
    (f"train {QUICK} data.train_size=1797", "train_size in 1..1796, got 1797"),
    (f"train {QUICK} data.validation=1024", "to be below 1024, the number of training samples,"),
    (f"train {QUICK} data.workers=2", "data.workers with data.name = images or user-defined"),
    (f"train {QUICK} data.image_size=64", "data.image_size with data.name = synthetic or images"),
    (f"train {QUICK} data.crop_padding=128", "padding in 0..127, got 128"),
    (f"train {QUICK} data.name=synthetic data.image_size=64", "expected a network for samples of"),
    (
        f"train {QUICK} data.name=synthetic data.image_size=16 network.name=vgg13",
        "expected a network for samples of shape (3, 16, 16), got network.name 'vgg13'",
    ),
    (
        f"train {QUICK} data.name=synthetic data.image_size=16 network.name=vgg13",
        ": set another network.name or data.image_size",
    ),
    (f"train {QUICK} run.threads=100000", "run.threads to be in [0, 1024], got 100000"),
    (f"train {QUICK} training.=3", "section.key=value, such as training.epochs=20, got"),
    (
        f"plan {QUICK} --ranks 4 distributed.strategy=sync distributed.workers=4",
        "expected one process of torchrun with distributed.strategy or distributed.simulate",
    ),
    ("train empty.toml", "expected the settings of a recipe in empty.toml, got none"),
    (f"train {QUICK} {own('labelled')} data.workers=100000", "data.workers to be in [0, 256],"),
    (f"train {QUICK} network.classes=9", "at least 10, the classes of digits, got 9"),
    (f"train {QUICK} network.name=resnet188", "did you mean 'resnet18'"),
    (f"train {QUICK} network.name=own_inputs", "own_inputs"),
    (f"train {QUICK} network.name=own_inputs:", "module:attribute, got 'own_inputs:'"),
    (f"train {QUICK} network.name=own_inputs:number", "a class or a function, got int"),
    (f"train {QUICK} network.name=own_inputs:no_arguments", "classes=10, channels=3"),
    (f"train {QUICK} network.name=own_inputs:no_network", "torch.nn.Module, got str"),
    (f"train {QUICK} network.name=own_inputs:instance", "got a network: return it from a"),
    (f"train {QUICK} network.name=own_inputs:lazy", "got lazy layers: call it once"),
    (f"train {QUICK} network.name=own_inputs:frozen", "to have parameters to train, got none"),
    (f"train {QUICK} network.name=own_inputs:two_logits", "(1, 10) from network.name"),
    (f"train {QUICK} network.name=nowhere:network", "there is no module 'nowhere'"),
    (f"train {QUICK} {own('nothing')}", "has no attribute 'nothing'"),
    (f"train {QUICK} {own('number')}", "a class or a function, got int"),
    (f"train {QUICK} {own('single')}", "got TensorDataset"),
    (f"train {QUICK} {own('stream')}", "expected map-style datasets"),
    (f"train {QUICK} {own('empty')}", "got an empty list"),
    (f"train {QUICK} {own('unlabelled')} network.classes=2", "expected items (x, y)"),
    (f"train {QUICK} {own('pair')} pruning.policy=full", "expected at least two classes in"),
    (f"train {QUICK} {own('named')} network.classes=2", "at least 3, the classes of"),
    (f"train {QUICK} {own('named')} data.flip=true", "expected data.flip with data.name = digits"),
    ("train recipes/paper/lenet.toml data.dir=nowhere", "in nowhere, found neither"),
    (
        "train recipes/paper/lenet.toml data.train_size=2560 data.dir=nowhere",
        "nowhere, found neither",
    ),
    ("train recipes/paper/lenet.toml data.dir=cut-short", "expected MD5"),
    (f"train {QUICK} {own('named')} data.train_size=99", "expected data.train_size with"),
    # Labels.
    (f"train {QUICK} data.labels=nowhere.txt", "labels in nowhere.txt, cannot read it: No"),
    (f"train {QUICK} data.labels=runs", "expected labels in runs, cannot read it: Is a dir"),
    (f"train {QUICK} data.labels=file", "of a class in line 1 of file, got 'a file'"),
    (f"train {QUICK} data.labels=labels/few.txt", "expected 1024 labels in labels/few.txt"),
    (f"train {QUICK} data.labels=labels/none.txt", "before it is split, got 0"),
    (f"train {QUICK} data.labels=labels/ten.txt", "in line 3 of labels/ten.txt, got '10'"),
    (f"train {QUICK} data.labels=labels/latin1.txt", "labels in labels/latin1.txt, cannot"),
    (f"train {QUICK} data.labels=labels/dropped.txt", "got only images to leave out or hold"),
    (f"train {QUICK} data.labels=labels/text.npy", "labels in labels/text.npy, cannot read"),
    (f"train {QUICK} data.labels=labels/pickle.npy", "labels in labels/pickle.npy, cannot"),
    (f"train {QUICK} data.labels=labels/text.npy", "cannot read it: no whole array of numbers"),
    (f"train {QUICK} data.labels=labels/float.npy", "got float64 of shape (1024,)"),
    (f"train {QUICK} data.labels=labels/table.npy", "got int64 of shape (1024, 1)"),
    (f"train {QUICK} data.labels=labels/ten.npy", "labels 0..9, or -1 to leave an image out"),
    (f"train {QUICK} data.labels=labels/few.npy", "expected 1024 labels in labels/few.npy"),
    (f"train {QUICK} data.labels=x data.label_noise=0.1", "data.labels or data.label_noise"),
    (f"train {QUICK} data.true_labels=dataset", "expected data.labels with data.true_labels"),
    (f"train {QUICK} data.labels=x data.true_labels=all", "to be one of dataset, got 'all'"),
    (f"train {QUICK} data.label_noise=1.5", "expected data.label_noise to be in [0, 1], got 1.5"),
    (f"train {QUICK} data.label_noise=nan", "data.label_noise to be a finite number, got nan"),
    (
        f"train {QUICK} \"data.label_noise_map=['1->2']\"",
        "expected data.label_noise with data.label_noise_map, got",
    ),
    (
        f"train {QUICK} data.label_noise=0.1 \"data.label_noise_map=['1->ten']\"",
        "of a class in data.label_noise_map, got 'ten'",
    ),
    (f"train {QUICK} data.label_noise_seed=-1", "data.label_noise_seed to be at least 0"),
    (f"train {QUICK} {own('named')} data.label_noise=0.1", "cifar100 or images only, got 0.1"),
    (f"train {QUICK} {own('named')} data.labels=x", "expected labels in x, cannot read it"),
    (f"plan {QUICK} data.labels=x", "expected --samples with data.labels = 'x', got none"),
    (
        f"plan {QUICK} data.name=cifar10 data.train_size=45001 data.validation=5000",
        "expected data.train_size to be at most 45000",
    ),
    (
        f"plan {QUICK} data.name=cifar10 data.train_size=none data.validation=60000",
        "expected data.validation to leave some of 50000 samples, got 60000",
    ),
    # Where results are written.
    (f"train {QUICK} --out file", "expected --out to be in a folder, got file, but file is a file"),
    (f"train {QUICK} --out file/below/it", "got file/below/it, but file is a file"),
    (f"train {QUICK} --out runs/done", "expected a new folder"),
    (f"compare {QUICK} --out file/below", "expected --out to be in a folder, got file/below"),
    (f"scale {QUICK} one --out file", "expected --out to be in a folder, got file"),
    ("report runs/done --out runs", "expected --out to be a file, got the folder runs"),
    ("report runs/done --out file/report.html", "got file/report.html, but file is a file"),
    (f"{PLAN} --svg runs", "expected --svg to be a file, got the folder runs"),
    (f"slurm --nodes 2 --out runs -- train {QUICK}", "to be a file, got the folder runs"),
    # Runs that are resumed or reported.
    (
        f"train {QUICK} training.epochs=2 training.milestones=[] training.lr=0.5 "
        "--out runs/stopped --resume",
        "expected a checkpoint of this recipe",
    ),
    (
        f"train {QUICK} training.epochs=2 training.milestones=[] run.threads=1 "
        "--out runs/checkpoint-list --resume",
        "checkpoint.pt, got something else: resume with the version",
    ),
    (
        f"train {QUICK} training.epochs=2 training.milestones=[] run.threads=1 "
        "--out runs/checkpoint-text --resume",
        ": restore the checkpoint, or train into a new folder",
    ),
    ("report nowhere", "expected a finished run"),
    ("report file", "expected a finished run"),
    ("report runs/stopped", "expected a finished run"),
    ("report runs/recipe-text", "runs/recipe-text"),
    ("report runs/summary-text", ": remove the file and continue the run, which writes it again"),
    ("report runs/summary-empty", "expected arm in runs/summary-empty/summary.json, got none"),
    ("report runs/metrics-text", "runs/metrics-text"),
    ("report runs/comparison-text", "expected JSON in"),
    ("report runs/comparison-empty", "expected title in runs/comparison-empty/compare.json, got"),
    # Comparisons and configurations.
    (
        f"compare {QUICK} --seeds 0",
        "'--seeds': Input should be greater than or equal to 1, got '0'",
    ),
    (f"compare {QUICK} --jobs 0", "'--jobs': Input should be greater than or equal to 1, got '0'"),
    (f"compare {QUICK} --margin 0", "expected --margin as percentage points above 0 and below 100"),
    (f"compare {QUICK} --arms full,half", "expected arms out of full, watched, second, adaptive"),
    (f"compare {QUICK} pruning.policy=full", "expected a recipe with a pruning schedule"),
    (f"scale {QUICK} 'sync 2'", "expected a configuration such as"),
    (f"scale {QUICK} 'all-reduce 1'", "at least two processes for all-reduce"),
    (f"scale {QUICK} one one", "expected each configuration once"),
    (f"scale {QUICK} --same-update 'async 2+1 bond=1'", "expected one of group, backup, bound"),
    (f"scale {QUICK} one --target-loss nan", "--target-loss to be a finite number above 0, got"),
    # Plans.
    ("plan", "expected a recipe, or training.epochs="),
    ("plan trainng.epochs=4", "or --save, got trainng.epochs=4"),
    ("plan training.epochs=8 pruning.save=0.1 --save 0.3", "--save or pruning.save=0.1, got both"),
    (f"plan {QUICK} {QUICK}", "expected one recipe"),
    (f"plan {QUICK} pruning.policy=full", "expected a policy with a schedule"),
    (
        f"plan {QUICK} pruning.policy=infobatch",
        "whose number depends on the losses: set pruning",
    ),
    (
        "plan weak-labels --step-time 0.5 distributed.strategy=async distributed.workers=4",
        "use fineprune scale --predict",
    ),
    ("plan training.epochs=10", "pruning.window"),
    ("plan training.epochs=10 pruning.window=0", "at least 1"),
    (f"plan {QUICK} pruning.prune=1.5", "share in [0, 1)"),
    ("plan training.epochs=1000000000 pruning.window=5", "in [1, 100000], got 1000000000"),
    (f"{PLAN} --step-time 0", "expected --step-time to be above 0, got 0"),
    (f"{PLAN} --step-time nan", "got nan"),
    (f"{PLAN} --overhead=-1", "expected --overhead to be at least 0, got -1"),
    (f"{PLAN} --samples 0", "expected --samples to be at least 1, got 0"),
    (f"{PLAN} pruning.prune=inf", "pruning.prune to be a finite number, got inf"),
    (f"{PLAN} pruning.prune=0 training.drop_last=true --samples 100", "at most 100, the samples"),
    (
        "plan training.epochs=20 pruning.windows_per_interval=9 training.milestones=[4,8]",
        "at most 4 windows_per_interval",
    ),
    (f"plan {QUICK} {own('pair')}", "expected --samples with data.name = "),
    # Batch scripts.
    (
        f"slurm --nodes 0 -- train {QUICK}",
        "'--nodes': Input should be greater than or equal to 1, got '0'",
    ),
    (f"slurm --nodes 2 -- train {QUICK} distributed.strategy=sink", "did you mean 'sync'"),
    (f"slurm --nodes 2 -- train {QUICK} --sedes 3", "train: No such option: --sedes"),
    (f"slurm --nodes 2 -- {QUICK}", "expected the verb of the job to be one of"),
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
    ):
        (folder / f"labels/{name}.txt").write_text(text)
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
        ("recipe-text", "recipe.toml", "[training\n"),
        ("summary-text", "summary.json", "finished"),
        ("summary-empty", "summary.json", "{}"),
        ("metrics-text", "metrics.jsonl", "epoch 1\n"),
        ("checkpoint-text", "checkpoint.pt", "a checkpoint"),
        ("checkpoint-list", "checkpoint.pt", None),
    ):
        damaged = folder / "runs" / name
        shutil.copytree(done, damaged)
        if content is not None:
            (damaged / file).write_text(content)
        if name == "stopped" or name.startswith("checkpoint"):
            (damaged / "summary.json").unlink()
    torch.save([1, 2, 3], folder / "runs/checkpoint-list/checkpoint.pt")
    for name, content in (("text", "two runs"), ("empty", "{}")):
        (folder / f"runs/comparison-{name}").mkdir()
        (folder / f"runs/comparison-{name}/compare.json").write_text(content)
    return folder


def state_of(folder: Path) -> dict[str, str]:
    """Everything in a folder: the names of folders, and the digests of files."""
    return {
        str(path.relative_to(folder)): (
            "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        )
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


@pytest.mark.parametrize(("command", "said"), COMMANDS, ids=str)
def test_a_wrong_command_says_so_in_one_line_and_changes_nothing(
    command, said, prepared, monkeypatch
):
    monkeypatch.chdir(prepared)
    monkeypatch.syspath_prepend(prepared)
    before = state_of(prepared)
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("fineprune: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert state_of(prepared) == before


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"train {QUICK} training.epochs=20 training.milestones=[30]", "got [30]"),
        ("report file", "expected a finished run"),
    ],
)
def test_a_process_ends_with_the_same_line_and_status(command, said, prepared, python):
    before = state_of(prepared)
    arguments = [*python, "-m", "fineprune", *shlex.split(command)]
    result = subprocess.run(arguments, cwd=prepared, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("fineprune: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert state_of(prepared) == before


SCHEDULE = fp.Schedule(epochs=4, window=2, start=1)
IMAGES = ImageSet(
    torch.zeros((8, 3, 4, 4), dtype=torch.uint8), torch.zeros(8, dtype=torch.int64), ("one",)
)


def pruner(**settings):
    return fp.Pruner(100, fp.FinePruning(SCHEDULE, prune=0.3), **settings)


def on_device(std):
    mean = (0.5,) * 3
    return DeviceImages(IMAGES, seed=0, device="cpu", augment=Augment(), mean=mean, std=std)


# Each call, and what the message of its InputError must contain.
CALLS = [
    (lambda: fp.Schedule(4, 2, 1, block=1, count=2), "count=2", "block=1"),
    (lambda: fp.Schedule(4, (2, 1), (1,)), "start", "window"),
    (lambda: fp.FinePruning(SCHEDULE, prune=1.0), "share", "got 1.0"),
    (lambda: fp.FinePruning(SCHEDULE, prune=-0.1), "share", "got -0.1"),
    (lambda: fp.FinePruning(SCHEDULE, prune=0.3, tolerance=float("nan")), "tolerance", "got nan"),
    (
        lambda: fp.FinePruning("60 epochs", prune=0.3),  # type: ignore[arg-type]
        "Schedule",
        "got str",
    ),
    (lambda: fp.FullData(0), "epochs", "got 0"),
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
    (lambda: pruner().record(torch.tensor([100]), torch.zeros(1)), "99", "100"),
    (lambda: pruner().total_steps(), "batch_size=...", "got None"),
    (lambda: pruner().load_state_dict({"version": 0}), "num_samples", "got one without it"),
    (lambda: fp.predict_savings(fp.FullData(3), 0, 10), "num_samples", "got 0"),
    (lambda: fp.predict_savings(fp.FullData(3), 9, 3, step_time=0), "step_time", "got 0"),
    (lambda: fp.predict_savings(fp.FullData(3), 9, 10, drop_last=True), "at most 9", "got 10"),
    (lambda: on_device((0.0,) * 3), "positive std", "(0.0, 0.0, 0.0)"),
    (lambda: Augment(padding=128), "padding in 0..127", "got 128"),
    (lambda: load_digits(0), "train_size in 1..1796", "got 0"),
    (lambda: load_cifar10("nowhere"), "CIFAR-10", "nowhere"),
    (lambda: fetch("http://example.org/x", "0", Path("new")), "https", "http://example.org/x"),
    (lambda: build_network("resnet19", 10, 3), "network.name", "resnet19"),
    (lambda: build_network("torchvision:resnet18", 10, 1), "3 channels", "got 1"),
    (lambda: call_attribute("nowhere:data", "data"), "module:attribute", "nowhere"),
    (lambda: call_attribute("json:datta", "data"), "module:attribute", "datta"),
    (lambda: make_recipe({"run": {"device": "tpu"}}), "run.device", "got 'tpu'"),
    (lambda: make_recipe({"run": {"seed": 2**64}}), "run.seed", f"got {2**64}"),
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
