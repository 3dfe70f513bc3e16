"""The help answers without torch, and a name of the library is imported when it is used."""

import importlib
import re
import subprocess
import sys

import pytest

import fineprune
from fineprune.cli.main import VERBS


def started(arguments, status):
    """Run the command line; return what it printed, its errors and what it imported."""
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fineprune", *arguments.split()],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == status
    lines = shown.stderr.splitlines()
    timed = [line for line in lines if line.startswith("import time:")]
    errors = [line for line in lines if line not in timed]
    return shown.stdout, errors, {line.rpartition("|")[2].strip() for line in timed}


def test_the_help_imports_no_torch_and_says_what_each_verb_does():
    shown, _, imported = started("--help", 0)
    assert "typer" in imported
    assert not {"torch", "numpy", "rich", "msgspec"} & imported
    for verb, does in VERBS.items():
        assert re.search(rf"^  {verb} +\S", shown, re.MULTILINE)
        module = importlib.import_module(f"fineprune.cli.{verb}")
        first = getattr(module, verb).__doc__.partition(".")[0].split()
        assert does.split()[0] == first[0]


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_recipe_that_there_is_not_is_said_before_torch_is_imported(verb):
    _, (said,), imported = started(f"{verb} quik", 2)
    assert said.endswith("cannot read quik: No such file or directory; did you mean quick?")
    assert not {"torch", "numpy", "rich", "msgspec"} & imported


def test_every_public_name_can_be_imported():
    assert {*fineprune.__all__} == {*fineprune._MODULES}
    for name in fineprune.__all__:
        assert getattr(fineprune, name).__name__ == name
    assert not hasattr(fineprune, "nothing")
