"""Every command on a page is valid, and runs here unless ``WHY_NOT`` gives the reason.

A block of commands has no language or is ``sh``, and all its lines are commands. In blocks with the
output of commands (``console``) and in scripts (``bash``), the commands of ``fineprune`` are
checked. In prose, those that name a recipe are.
"""

import itertools
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from commands import printed
from typer.core import TyperGroup
from typer.main import get_command

from fineprune.cli.main import VERBS as ALL_VERBS
from fineprune.cli.main import app
from fineprune.cli.options import split_changes
from fineprune.experiments.configurations import configuration, configured
from fineprune.experiments.controls import default_arms, make_arms
from fineprune.experiments.planner import described
from fineprune.training.recipe import read_recipe

ROOT = Path(__file__).parent.parent
NAMES = ("README.md", "CHANGES.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md"))]

# Why commands are not run here, by their first words. They are checked without being run.
WHY_NOT = {
    "fineprune compare": "it trains several runs; test_compare.py runs it",
    "fineprune scale": "it starts workers and servers; test_scale.py runs it",
    "fineprune paper": "it trains several runs; test_papers.py runs it",
    "torchrun": "it starts several processes; test_all_reduce.py runs it",
    "make": "it installs; the workflow in .github runs each target but coverage and mutants",
    "python": "benchmarks take minutes to hours; test_benchmarks.py runs them with small settings",
    ".venv/bin/python": "it runs the tests themselves",
    "pip": "it installs",
    "git": "it needs an address to clone from",
    ".venv/bin/pre-commit": "it changes the settings of the clone",
    "sbatch": "it needs Slurm; test_slurm.py runs the scripts",
}
# Why a training is not run here. Its settings are resolved to a recipe.
WHY_NOT_TRAINED = {
    "cifar10": "the data set must be downloaded",
    "images": "the files must be made first; test_image_files.py trains on files",
    "served": "parameter servers need Ray; test_ray_session.py trains with them",
    "resumed": "there is nothing to resume",
    "long": "it takes minutes; test_cli.py trains this recipe on less data",
}

# The names of the runs and comparisons that pages report and inspect.
NAMES_OF_RUNS = (
    *("weak-labels", "digits-compare", "tutorial", "paper/lenet"),
    *("quick-compare", "quick-adaptive"),
)
COMMAND = re.compile(r"(?:^|\s)fineprune [a-z]")
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TYPER = get_command(app)
assert isinstance(_TYPER, TyperGroup)
_CONTEXT: Any = None  # It is not read.
VERBS = {verb: _TYPER.get_command(_CONTEXT, verb) for verb in ALL_VERBS}


def first_words(line):
    """The program of a line without variables, or ``fineprune`` and its verb."""
    words = shlex.split(line, comments=True)
    words = list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))
    return " ".join(words[:2]) if words[0] == "fineprune" else words[0]


def known(line):
    return any(line.strip().startswith(name) for name in ("fineprune ", "FINEPRUNE_", *WHY_NOT))


def commands():
    """Yield (page, line) of each command, also those in the help of a verb."""
    for file in sorted((ROOT / "src/fineprune/cli").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        yield from ((file, line) for line in re.findall("Example: (fineprune .*)", text))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for kind, block in FENCED.findall(text):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            if kind in ("bash", "console"):
                lines = [line for line in lines if COMMAND.search(line)]
            elif kind not in ("", "sh") or not any(map(known, lines)):
                continue
            yield from ((page, line) for line in lines)
        for code in re.findall(r"`([^`\n]+)`", FENCED.sub("", text)):
            if COMMAND.search(code) and ".toml" in code:
                yield page, code


ALL = [
    pytest.param(line, id=f"{page.relative_to(ROOT)}-{number}")
    for number, (page, line) in enumerate(commands())
]


def fineprune_arguments(line):
    """The arguments of the command ``fineprune`` in a line; None if there is none."""
    words = shlex.split(line, comments=True)
    if not COMMAND.search(line):
        return None
    rest = words[words.index("fineprune") + 1 :]
    return list(itertools.takewhile(lambda word: word not in ("&", ">"), rest))


def test_pages_show_every_verb_and_each_exception_is_needed():
    lines = [line for _, line in commands()]
    shown = {arguments[0] for line in lines if (arguments := fineprune_arguments(line))}
    assert shown == set(VERBS)
    first = {first_words(line) for line in lines}
    assert set(WHY_NOT) <= first


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the recipes, one short run under each name of the pages, and its labels."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    (folder / "benchmarks").mkdir()
    for recipe in (ROOT / "benchmarks").glob("*.toml"):
        shutil.copy(recipe, folder / "benchmarks")
    for page in PAGES:  # Recipes that a page asks to save.
        text = page.read_text(encoding="utf-8")
        for name, recipe in re.findall(
            r'^```toml title="(.*?)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL
        ):
            (folder / name).write_text(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        printed("train", "recipes/weak-labels.toml", "--out", "runs/first", *tiny(64))
        for name in NAMES_OF_RUNS:
            shutil.copytree("runs/first", f"runs/{name}")
        printed("inspect", "runs/first", "--labels", "made.csv")
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def tiny(batch_size):
    """Settings for four batches per epoch, one evaluation and one checkpoint."""
    once = ("training.evaluate_every=100", "training.evaluate_last=1", "run.checkpoint_every=100")
    return f"data.train_size={4 * batch_size}", *once


@pytest.mark.parametrize("line", ALL)
def test_a_command_is_valid_and_runs_unless_there_is_a_reason(line, folder):
    arguments = fineprune_arguments(line)
    if arguments is not None:
        check_fineprune(arguments, launched="torchrun" in line)
        return
    program = first_words(line.removeprefix("while "))
    assert program in WHY_NOT, f"neither run nor excepted: {line}"
    words = shlex.split(line.replace(";", " ; "), comments=True)
    if program == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif program == "pip":
        extras = set(re.findall(r"[\w-]+", " ".join(re.findall(r"\[(.*?)\]", " ".join(words)))))
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert extras <= set(project["optional-dependencies"])
    elif "pytest" in words:
        files = [word for word in words if word.endswith(".py") and not word.startswith(".")]
        assert all((ROOT / word).is_file() for word in files if "/" in word)
    else:
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))


def check_fineprune(arguments, *, launched):
    """Run a command of ``fineprune``, or resolve all its settings to recipes."""
    verb, *rest = arguments
    # Unknown verbs, options and missing arguments are errors.
    params = VERBS[verb].make_context(verb, list(rest)).params
    if verb == "paper":
        return
    if verb == "scale":
        texts, changes = split_changes(params["configurations"])
        settings = [change for change in changes if change.startswith(("cluster.", "costs."))]
        assert not settings or params["prediction"]
        described(settings)
        recipe = read_recipe(params["recipe"], [one for one in changes if one not in settings])
        for text in texts:
            configured(recipe, configuration(text), same_update=params["same_update"])
    elif verb == "compare":
        recipe = read_recipe(params["recipe"], params["changes"] or ())
        named = params["arms"]
        arms = named.split(",") if named else default_arms(recipe)
        make_arms(recipe, arms, num_samples=50_000)
    elif verb == "train":
        recipe = read_recipe(params["recipe"], params["changes"] or ())
        what = "served" if recipe.distributed.served else recipe.data.name
        what = "resumed" if params["resume"] else what
        what = "long" if recipe.training.epochs > 50 else what
        if what in WHY_NOT_TRAINED or launched:
            return
        if recipe.data.labels is not None:
            Path("made.csv").rename(recipe.data.labels)
        if params["out"] is not None:
            shutil.rmtree(params["out"], ignore_errors=True)
        assert "accuracy " in printed(*arguments, *tiny(recipe.training.batch_size))
    else:
        printed(*(file for word in arguments for file in expanded(word)))
        if params.get("out") is not None:
            assert Path(params["out"]).stat().st_size


def expanded(word):
    """The files that the shell makes of a pattern."""
    return sorted(map(str, Path().glob(word))) if "*" in word else [word]
