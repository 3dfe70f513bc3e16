"""Checks what ``make release`` built: contents, metadata, and the demo from the installed wheel.

    python .ci/check_release.py dist
    python .ci/check_release.py dist --tag v0.1.0

The wheel is installed into an environment of its own, outside the clone. With a tag, its version
and that of the project must be equal, and CHANGES.md must have a section for it.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Files without which the source distribution would be of no use.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "Makefile", "mkdocs.yml", "constraints.txt")
# Recipes by their names, since a user of the wheel has no clone.
DEMO = ("compare", "weak-labels", "--arms", "full,adaptive", "--seeds", "1")


def main() -> None:
    """Check the only wheel and the only source distribution of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", help="the tag of the release, such as v0.1.0")
    options = parser.parse_args()
    folder = options.folder
    if options.tag is not None:
        check_tag(options.tag)
    (wheel,), (sources,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_wheel(wheel)
    check_sources(sources)
    run_demo(wheel)
    print(f"{wheel.name} and {sources.name} are complete, and the demo runs from the wheel")


def read_project() -> dict[str, Any]:
    """Return the section ``[project]`` of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def check_tag(tag: str) -> None:
    """Check that a tag names the version of the project, which CHANGES.md describes."""
    version = read_project()["version"]
    expect(tag == f"v{version}", f"the tag v{version}, which is the project's version, got {tag}")
    headings = (ROOT / "CHANGES.md").read_text(encoding="utf-8").splitlines()
    expect(f"## {version}" in headings, f"the section '## {version}' in CHANGES.md, so named")


def check_wheel(wheel: Path) -> None:
    """Check that the wheel contains every file of the package and nothing else."""
    project = read_project()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        described = message_from_bytes(archive.read(metadata))
    command = ["git", "ls-files", "src", "recipes"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).split()
    package = {
        name.removeprefix("src/") if name.startswith("src/") else f"fineprune/{name}"
        for name in listed
    }
    found = {name for name in names if ".dist-info/" not in name}
    expect(found == package, f"the package's files, differing: {sorted(found ^ package)}")
    expect("fineprune/py.typed" in found, "py.typed, which declares the types")
    expect(described["Version"] == project["version"], f"version {project['version']}")
    expect(described["License-Expression"] == project["license"], f"licence {project['license']}")
    required = [line for line in described.get_all("Requires-Dist") or () if "extra ==" not in line]
    expect(sorted(required) == sorted(project["dependencies"]), f"two dependencies, got {required}")


def check_sources(sources: Path) -> None:
    """Check that the source distribution contains what a clone needs for its tests and its site."""
    with tarfile.open(sources) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in SOURCES if name not in names]
    expect(not missing, f"{missing} in {sources.name}")
    for folder in ("src", "tests", "docs", "recipes", "examples", "benchmarks"):
        expect(any(name.startswith(f"{folder}/") for name in names), f"{folder}/ in {sources.name}")


def run_demo(wheel: Path) -> None:
    """Install the wheel alone, and train a comparison with it."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = Path(folder) / ("Scripts" if sys.platform == "win32" else "bin")
        install = [programs / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
        constraints = ["--constraint", ROOT / "constraints.txt"]
        subprocess.run([*install, *constraints, "torch"], check=True)
        subprocess.run([*install, *constraints, f"{wheel.resolve()}[cli]"], check=True)
        command = [programs / "fineprune", *DEMO, "--out", Path(folder) / "demo"]
        # Without the variables that could let Python find the package in the clone.
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run(command, cwd=folder, env=clean, check=True)
        expect((Path(folder) / "demo/report.html").exists(), "a report of the demo")


def expect(condition: bool, what: str) -> None:
    """End with status 1 and one line if a condition is not met."""
    if not condition:
        sys.exit(f"expected {what}")


if __name__ == "__main__":
    main()
