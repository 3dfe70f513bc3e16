"""The library needs torch and numpy only, and the command says what else it needs.

The tests run in an environment of their own: a folder with torch, numpy and what these two require,
and nothing else besides the standard library and this package.
"""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fineprune

ROOT = Path(__file__).parent.parent

LIBRARY = """
import importlib, json, pkgutil, sys
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import fineprune as fp

torch.manual_seed(0)
inputs = torch.randn(200, 8)
train_set = TensorDataset(inputs, (inputs.sum(1) > 0).long())
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

schedule = fp.Schedule(epochs=6, window=3, start=1)
pruner = fp.Pruner(train_set, fp.FinePruning(schedule, prune=0.3), batch_size=20, seed=0)
loader = DataLoader(pruner.dataset, batch_size=20, sampler=pruner.sampler)  # 1

batches = []
for epoch in pruner.epochs():  # 2
    batches.append(len(loader))
    for index, (x, y) in loader:
        loss = pruner.record(index, F.cross_entropy(model(x), y, reduction="none"))  # 3
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

imported = []
for name in ("datasets", "labels", "networks", "pruning", "streams"):
    package = importlib.import_module(f"fineprune.{name}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        imported.append(importlib.import_module(module.name).__name__)

from pathlib import Path
from fineprune.datasets.digits import load_digits
from fineprune.datasets.download import fetch
from fineprune.errors import InputError
try:
    fetch("https://example.org/a.tar.gz", "0" * 32, Path(sys.argv[1]))
except InputError as error:
    download = str(error)
print(json.dumps({
    "batches": batches,
    "imported": imported,
    "download": download,
    "others": [name for name in ("typer", "rich", "msgspec", "scipy", "matplotlib")
               if importlib.util.find_spec(name)],
}))
"""


def required(*names: str) -> set[str]:
    """Return distributions and all that they require, by their names as installed."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A function that runs Python with torch and numpy alone."""
    packages = tmp_path_factory.mktemp("packages")
    for name in required("torch", "numpy"):
        installed = metadata.distribution(name)
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(installed.locate_file(top))
    source = Path(fineprune.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(source), str(packages)))}

    def run(*arguments, cwd):
        # -S: without the packages that are installed beside this test's own.
        command = [sys.executable, "-S", *(str(argument) for argument in arguments)]
        return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)

    return run


def test_the_library_trains_with_torch_and_numpy_alone(bare, tmp_path):
    result = bare("-c", LIBRARY, tmp_path, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["others"] == []
    assert told["batches"] == [7, 7, 10, 7, 7, 10]
    assert "fineprune.pruning.pruner" in told["imported"]
    assert "pip install 'fineprune[cli]'" in told["download"]


def test_the_command_says_in_one_line_what_to_install(bare, tmp_path):
    result = bare("-m", "fineprune", "train", ROOT / "recipes/digits.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    said = r"fineprune: expected the packages of the command line, but \w+ is not installed: "
    assert re.fullmatch(said + r"pip install 'fineprune\[cli\]'\n", result.stderr)
    assert list(tmp_path.iterdir()) == []
