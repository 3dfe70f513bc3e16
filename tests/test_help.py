"""The help answers without torch, and a name of the library is imported when it is used."""

import importlib
import re
import subprocess
import sys

import fineprune
from fineprune.cli.main import VERBS


def test_the_help_imports_no_torch_and_says_what_each_verb_does():
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fineprune", "--help"],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0
    imported = [line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()]
    assert "typer" in imported
    assert not {"torch", "numpy", "rich", "msgspec"} & set(imported)
    for verb, does in VERBS.items():
        assert re.search(rf"^  {verb} +\S", shown.stdout, re.MULTILINE)
        module = importlib.import_module(f"fineprune.cli.{verb}")
        first = getattr(module, verb).__doc__.partition(".")[0].split()
        assert does.split()[0] == first[0]


def test_every_public_name_can_be_imported():
    assert {*fineprune.__all__} == {*fineprune._MODULES}
    for name in fineprune.__all__:
        assert getattr(fineprune, name).__name__ == name
    assert not hasattr(fineprune, "nothing")
