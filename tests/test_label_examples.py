"""The examples of ``LabelWatch`` find the wrong labels that they make."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def printed(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "share", "suggests"),
    [("label_watch", 0.9, True), ("text_suspects", 0.7, True), ("tabular_suspects", 0.85, False)],
)
def test_wrong_labels_are_found_and_suggestions_are_right(name, share, suggests, capsys):
    out = printed(name, capsys)
    (found,) = re.findall(r"(\d+) of the first (\d+) suspects of (\d+) ", out)
    hits, first, samples = map(int, found)
    assert hits > share * first
    assert first < 0.25 * samples
    rights = re.findall(r"(\d+) of the first .* right for (\d+) of these", out.replace("\n", " "))
    assert len(rights) == suggests
    assert all(int(right) > 0.85 * int(hits) for hits, right in rights)
    assert float(re.findall(r"accuracy ([\d.]+)%", out)[-1]) > 85


def test_cleanlab_finds_wrong_labels_in_what_was_recorded(capsys):
    pytest.importorskip("cleanlab", reason="needs cleanlab, which is not installed with the tests")
    out = printed("label_watch_cleanlab", capsys)
    listed, hits = map(int, re.findall(r"lists (\d+) samples, of which (\d+)", out)[0])
    (wrong,) = map(int, re.findall(r"(\d+) of \d+ labels are wrong", out))
    assert hits > 0.7 * wrong
    assert hits > 0.7 * listed
