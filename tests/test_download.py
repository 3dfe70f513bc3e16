"""Downloads: from https only, whole or not at all, and a failure is one line."""

import hashlib
from pathlib import Path

import pytest

from fineprune.datasets.download import DownloadError, fetch
from fineprune.errors import InputError

requests = pytest.importorskip("requests")  # pooch uses it.

CONTENT = bytes(range(256)) * 40
MD5 = hashlib.md5(CONTENT).hexdigest()
URL = "https://example.org/some-file.tar.gz"


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def sent(monkeypatch):
    """Lets a server send some bytes, or raise what cannot reach it."""

    def let(answer):
        def send(self, url, output_file, pooch, check_only=False):
            if isinstance(answer, BaseException):
                raise answer
            Path(output_file).write_bytes(answer)

        monkeypatch.setattr("pooch.HTTPDownloader.__call__", send)

    return let


@pytest.mark.parametrize("scheme", ["http", "file", "ftp"])
def test_only_https_is_downloaded(scheme, tmp_path):
    with pytest.raises(InputError, match="expected an https address"):
        fetch(f"{scheme}://example.org/some-file.tar.gz", MD5, tmp_path / "new")
    assert names_in(tmp_path) == []


def test_a_file_is_fetched_under_its_name(sent, tmp_path):
    sent(CONTENT)
    written = fetch(URL, MD5, tmp_path / "new/folder")
    assert written.read_bytes() == CONTENT
    assert names_in(written.parent) == ["some-file.tar.gz"]


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (requests.HTTPError("404: Not Found"), DownloadError, "Not Found: try again, or put some-"),
        (requests.ConnectionError("refused"), DownloadError, f"to download {URL} .*: refused"),
        (CONTENT[::-1], InputError, f"does not match the known hash: expected md5:{MD5} but got"),
        (KeyboardInterrupt("stopped"), KeyboardInterrupt, "stopped"),
    ],
)
def test_a_server_that_does_not_send_the_file_leaves_nothing(answer, kind, said, sent, tmp_path):
    sent(answer)
    with pytest.raises(kind, match=said) as error:
        fetch(URL, MD5, tmp_path / "new")
    assert "\n" not in str(error.value)
    if kind is DownloadError:  # Nor does an empty folder stay.
        assert names_in(tmp_path) == []
    else:
        assert names_in(tmp_path / "new") == []
    (tmp_path / "some-file.tar.gz").write_bytes(b"mine")
    with pytest.raises(kind):
        fetch(URL, MD5, tmp_path)
    assert (tmp_path / "some-file.tar.gz").read_bytes() == b"mine"


def test_a_folder_that_cannot_be_made_is_wrong_input(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match=r"cannot create .*file/below"):
        fetch(URL, MD5, tmp_path / "file/below")
