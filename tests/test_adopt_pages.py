"""The pages about frameworks: the code that they show is that of the examples, which tests run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    "trainer": "trainer_image",
    "accelerate": "accelerate_loop",
    "ddp": "ddp",
    "fsdp2": "fsdp2",
    "streams": "stream_shards",
}


@pytest.mark.parametrize(("page", "example"), EXAMPLES.items())
def test_the_code_of_a_page_is_that_of_its_example(page, example):
    text = (ROOT / f"docs/adopt/{page}.md").read_text(encoding="utf-8")
    code = (ROOT / f"examples/{example}.py").read_text(encoding="utf-8")
    lines = {line.strip() for line in code.splitlines()}
    (block,) = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert not [line for line in block.splitlines() if line.strip() not in lines]


def test_the_code_for_other_packages_is_that_of_the_tests():
    text = (ROOT / "docs/adopt/streams.md").read_text(encoding="utf-8")
    tests = [ROOT / "tests" / name for name in ("test_streams.py", "made_streams.py")]
    lines = {line.strip() for file in tests for line in file.read_text("utf-8").splitlines()}
    blocks = re.findall(r"^```py title=.*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert not [line for line in block.splitlines() if line.strip() not in lines]
