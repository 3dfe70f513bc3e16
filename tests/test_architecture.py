"""What import-linter cannot say of the structure, and that its pages describe the code.

Which part may import which stands in ``pyproject.toml``; ``make lint`` checks it.
"""

import ast
import re
from pathlib import Path

import fineprune

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/fineprune"


def test_no_module_is_named_for_nothing_in_particular():
    names = {part for file in PACKAGE.rglob("*.py") for part in file.relative_to(PACKAGE).parts}
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not {name.removesuffix(".py") for name in names} & vague


def test_there_is_one_training_loop():
    loops = [
        str(file.relative_to(PACKAGE))
        for file in sorted(PACKAGE.rglob("*.py"))
        if "in pruner.epochs(" in file.read_text(encoding="utf-8")
    ]
    assert loops == ["training/trainer.py"]


def members_of_classes():
    """Return the names of the methods and annotated attributes of each class."""
    members: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = members.setdefault(node.name, set())
                names |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                names |= {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}
    return members


def test_the_page_on_the_architecture_names_what_exists():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([a-z_/]+\.py)`", page))
    folders = (PACKAGE, PACKAGE / "distributed/parameter_servers", ROOT)
    assert not [name for name in files if not any((top / name).exists() for top in folders)]
    members = members_of_classes()
    methods = re.findall(r"`([A-Z][A-Za-z]+)\.([a-z_]+)", page)
    assert methods
    assert not [f"{cls}.{name}" for cls, name in methods if name not in members.get(cls, ())]
    tree = page.partition("## The subpackages")[2].partition("\n## ")[0]
    assert set(re.findall(r"^([a-z_]+)/ ", tree, re.MULTILINE)) == {
        file.parent.name for file in PACKAGE.glob("*/__init__.py")
    }


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs/reference/library.md").read_text(encoding="utf-8")
    assert set(re.findall(r"::: fineprune\.(\w+)$", page, re.MULTILINE)) == set(fineprune.__all__)
