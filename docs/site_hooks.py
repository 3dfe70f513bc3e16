"""What the site adds to its pages: the README, files that they link to, and help texts.

``mkdocs`` calls these functions; ``mkdocs.yml`` names this file.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

from fineprune.cli.main import VERBS, app

ROOT = Path(__file__).resolve().parents[1]
# Files outside the folder of the pages, to which pages may link. The site has copies of them.
LINKED = ("recipes/**/*.toml", "examples/*.py", "benchmarks/*.py", "*.md")
COPIES = PurePosixPath("files")
LINK = re.compile(r"\]\((\.\./[^)#]+)(#[^)]*)?\)")
README = "<!-- the README -->"
COMMANDS = "<!-- the help text of each command -->"


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside the folder of the pages."""
    for pattern in LINKED:
        for path in sorted(ROOT.glob(pattern)):
            copy = str(COPIES / path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, copy, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files outside lead to their copies, and insert the README and the help texts."""
    if README in markdown:
        markdown = _readme()
    folder = PurePosixPath(page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        target = os.path.normpath(ROOT / "docs" / folder / link[1])
        inside = Path(target).is_relative_to(ROOT / "docs")
        if inside or not Path(target).is_file():
            return link[0]  # ``mkdocs`` checks it.
        copy = COPIES / Path(target).relative_to(ROOT).as_posix()
        return f"]({os.path.relpath(copy, folder)}{link[2] or ''})"

    return LINK.sub(replaced, markdown).replace(COMMANDS, _help_texts())


def _readme() -> str:
    """Return the README with links that are relative to the folder of the pages."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("[all results](docs/results)", "all results")
    text = re.sub(r"\]\((?!docs/|https?:)([^)]+)\)", r"](../\1)", text)
    return text.replace("](docs/", "](")


def _help_texts() -> str:
    runner = CliRunner()
    parts = []
    for verb in sorted(VERBS):
        shown = runner.invoke(app, [verb, "--help"], prog_name="fineprune", terminal_width=80)
        parts.append(f"## {verb}\n\n```text\n{shown.output.strip()}\n```\n")
    return "\n".join(parts)
