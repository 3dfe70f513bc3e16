"""A release is that of the version and of the changes that its tag names."""

import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fineprune.cli.main import app

CHECKS = runpy.run_path(str(Path(__file__).parents[1] / ".ci/check_release.py"))


@pytest.mark.parametrize(
    ("tag", "heading", "message"),
    [
        ("v1.2.0", "## 1.2.0", None),
        (
            "v1.2.1",
            "## 1.2.0",
            "expected the tag v1.2.0, which is the project's version, got v1.2.1",
        ),
        ("1.2.0", "## 1.2.0", "expected the tag v1.2.0, which is the project's version, got 1.2.0"),
        ("v1.2.0", "## 1.2.0 (unreleased)", "expected the section '## 1.2.0' in CHANGES.md"),
        ("v1.2.0", "## 1.1.0", "expected the section '## 1.2.0' in CHANGES.md"),
    ],
)
def test_a_tag_must_agree_with_the_version_and_the_changes(
    tag, heading, message, tmp_path, monkeypatch
):
    monkeypatch.setitem(CHECKS["check_tag"].__globals__, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGES.md").write_text(f"# Changes\n\n{heading}\n")
    if message is None:
        CHECKS["check_tag"](tag)
        return
    with pytest.raises(SystemExit) as error:
        CHECKS["check_tag"](tag)
    assert str(error.value).startswith(message)


def test_the_command_prints_the_version_of_the_project():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"fineprune {CHECKS['read_project']()['version']}\n"
