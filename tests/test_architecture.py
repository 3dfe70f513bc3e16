"""Which module may import which, and that the pages about the architecture describe the code."""

import ast
import graphlib
import re
import runpy
import sys
from pathlib import Path

import pytest

import fineprune

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/fineprune"

diagram = runpy.run_path(str(ROOT / "docs/import_diagram.py"))
imported_modules, in_order, imports = (
    diagram[name] for name in ("imported_modules", "in_order", "imports")
)

# What each subpackage may import of fineprune, besides ``errors``.
ALLOWED = {
    "pruning": {"labels", "interrupts"},
    "labels": {"writing", "interrupts", "launcher"},
    "distributed": {"writing", "launcher"},
    "networks": {"importing"},
    "datasets": {"pruning", "interrupts", "writing"},
    "runs": {"pruning", "labels", "writing"},
    # It imports ``fineprune`` itself for the number of the version, and so does ``cli``.
    "training": {
        "pruning",
        "labels",
        "networks",
        "datasets",
        "distributed",
        "runs",
        "importing",
        "launcher",
        "writing",
        "__init__",
    },
    "integrations": {"pruning", "labels"},
    "streams": {"pruning", "writing"},
    "launch": set(),
    "experiments": {
        "pruning",
        "distributed",
        "labels",
        "runs",
        "training",
        "launch",
        "launcher",
        "writing",
        "interrupts",
    },
    "inspection": {"labels", "runs", "training", "datasets", "writing"},
    "report": {"labels", "runs", "experiments", "inspection", "writing"},
    "cli": {
        "pruning",
        "distributed",
        "runs",
        "training",
        "experiments",
        "inspection",
        "report",
        "launch",
        "launcher",
        "writing",
        "__init__",
    },
}
# The same for the modules at the top level.
ALLOWED_AT_THE_TOP = {
    "__init__": {"pruning", "labels"},
    "errors": set(),
    "interrupts": set(),
    "importing": set(),
    "writing": set(),
    "launcher": set(),
    "__main__": {"cli"},
}
# What ``import fineprune`` reads.
CORE = [
    PACKAGE / "__init__.py",
    PACKAGE / "errors.py",
    PACKAGE / "interrupts.py",
    PACKAGE / "writing.py",
    *sorted((PACKAGE / "pruning").rglob("*.py")),
    *sorted((PACKAGE / "labels").rglob("*.py")),
]
SERVERS = "distributed/parameter_servers"
ONLY_IMPORT = {
    "ray": [f"{SERVERS}/"],
    "lightning": ["integrations/lightning/"],
}


def files_of(name):
    folder = PACKAGE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]


def own_imports(file):
    """Return the parts of fineprune that a file imports, such as "pruning" or "errors"."""
    parts = set()
    for module in imported_modules(file):
        package, _, rest = module.partition(".")
        if package == "fineprune":
            part = rest.partition(".")[0]
            known = part in ALLOWED or part in ALLOWED_AT_THE_TOP
            parts.add(part if known else "__init__")
    return parts


@pytest.mark.parametrize("name", [*ALLOWED, *ALLOWED_AT_THE_TOP])
def test_a_part_imports_only_what_the_table_allows(name):
    allowed = {name, "errors"} | {**ALLOWED, **ALLOWED_AT_THE_TOP}[name]
    wrong = {
        f"{file.relative_to(PACKAGE)} imports {part}"
        for file in files_of(name)
        for part in own_imports(file) - allowed
    }
    assert not wrong


def test_every_part_is_in_the_table():
    assert set(diagram["subpackages"]()) == set(ALLOWED)
    assert {file.stem for file in PACKAGE.glob("*.py")} == set(ALLOWED_AT_THE_TOP)


def test_the_core_imports_torch_numpy_and_the_standard_library_only():
    allowed = {"fineprune", "torch", "numpy", *sys.stdlib_module_names}
    for file in CORE:
        assert {module.partition(".")[0] for module in imported_modules(file)} <= allowed, file


@pytest.mark.parametrize("package", ONLY_IMPORT)
def test_few_modules_or_one_folder_import_a_large_package(package):
    importing = [
        str(file.relative_to(PACKAGE))
        for file in sorted(PACKAGE.rglob("*.py"))
        if any(module.partition(".")[0] == package for module in imported_modules(file))
    ]
    assert importing
    assert not [file for file in importing if not file.startswith(tuple(ONLY_IMPORT[package]))]


def test_subpackages_do_not_import_each_other_in_a_cycle():
    assert len(in_order(imports())) == len(imports())  # Raises CycleError if there is a cycle.


def read_on_import():
    """Return which modules each module needs before the rest of it can run."""
    modules = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): file
        for file in PACKAGE.rglob("*.py")
    }
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, file in modules.items():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            for one in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                parts = one.split(".")
                # A module also needs the packages that it is in, unless its importer is in them.
                needed = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
                graph[name] |= {
                    other
                    for other in needed & modules.keys()
                    if not f"{name}.".startswith(f"{other}.")
                }
    return graph


def test_modules_do_not_import_each_other_in_a_cycle():
    tuple(graphlib.TopologicalSorter(read_on_import()).static_order())  # Raises CycleError.


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


def test_the_diagram_shows_the_imports_as_they_are():
    drawn = diagram["svg"](imports())
    committed = (ROOT / "docs/images/imports.svg").read_text(encoding="utf-8")
    assert drawn == committed, "run: python docs/import_diagram.py docs/images/imports.svg"


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
    assert set(re.findall(r"^([a-z_]+)/ ", tree, re.MULTILINE)) == set(diagram["subpackages"]())


@pytest.mark.parametrize("relative", ["from . import errors", "from .plan import EpochPlan"])
def test_relative_imports_are_not_overlooked(tmp_path, relative):
    (tmp_path / "module.py").write_text(relative)
    with pytest.raises(ValueError, match="expected absolute imports"):
        imported_modules(tmp_path / "module.py")


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs/reference/library.md").read_text(encoding="utf-8")
    assert set(re.findall(r"::: fineprune\.(\w+)$", page, re.MULTILINE)) == set(fineprune.__all__)
